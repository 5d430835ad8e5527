"""What holds for every policy: nothing from the future, nothing dropped, no more than the budget, no neighbours."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ambidex.attention.select.policy import Need, PolicyRequest
from ambidex.core.policy import PolicyName
from selective_world import SelectiveWorld, TinyModel, load_tiny_model, policy_settings, random_tokens

OPTIONS: dict[PolicyName, list[dict[str, object]]] = {
    PolicyName.EXACT: [{}],
    PolicyName.BOUNDED: [{}, {"bounded_scores": "int8", "max_dropped_mass": 0.1}],
    PolicyName.STREAMING_LLM: [{"sink_tokens": 2, "policy_tokens": 9}],
    PolicyName.H2O: [{"policy_tokens": 8}, {"h2o_form": "drop", "policy_tokens": 7, "recent_percent": 30}],
    PolicyName.KEYFORMER: [{"policy_tokens": 9}],
    PolicyName.QINFER_WINDOWS: [{"policy_tokens": 8}],
    PolicyName.QUEST: [{"policy_tokens": 9, "page_tokens": 3, "exact_layers": 0}],
    PolicyName.INFINIGEN: [{"policy_tokens": 6, "exact_layers": 1}],
    PolicyName.HYBRIDGEN: [
        {"policy_tokens": 6, "exact_layers": 1, "near_tokens": 4},
        {"policy_tokens": 6, "exact_layers": 1, "near_tokens": 4, "hybridgen_mode": "pre"},
    ],
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]
BUDGETED = [(name, options) for name, options in CASES if "policy_tokens" in options]
SAME = {"rtol": 0.0, "atol": 1e-4}
"""Hidden states are of size 1 to 4; fp32 rounding over two layers depends on how many rows a matrix product has."""

few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return load_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def test_every_policy_is_among_the_cases() -> None:
    assert set(OPTIONS) == {PolicyName.EXACT, *(name for name in PolicyName if not name.attends_all)}


@pytest.mark.parametrize(("name", "options"), CASES)
@given(num_prompt=st.integers(1, 40), num_answer=st.integers(1, 12), seed=st.integers(0, 1000))
@few
def test_choices_never_name_a_future_or_dropped_key_and_weigh_one(
    tiny: TinyModel, name: str, options: dict[str, object], num_prompt: int, num_answer: int, seed: int
) -> None:
    world = SelectiveWorld(tiny, policy_settings(name, **options), seed=seed)
    tokens = random_tokens(num_prompt + num_answer, seed=seed)
    world.add("a", tokens, num_prompt=num_prompt)
    world.step([("a", num_prompt)])
    dropped: dict[int, torch.Tensor] = {}
    for position in range(num_prompt, len(tokens)):
        world.step([("a", 1)])
        for layer_idx in range(tiny.spec.num_layers):
            choice = world.choices["a", layer_idx, position]
            assert choice.mask.shape == (tiny.spec.num_q_heads, position + 1), "the future is not even there"
            assert choice.mask[:, -1].all(), "the query's own key is attended"
            assert (choice.probs[~choice.mask] == 0).all()
            torch.testing.assert_close(choice.probs.sum(1).float(), torch.ones(len(choice.probs)))
            if layer_idx in dropped:
                gone = dropped[layer_idx].repeat_interleave(tiny.spec.num_q_heads // len(dropped[layer_idx]), 0)
                assert not (choice.mask[:, : gone.shape[1]] & gone).any(), "a dropped key came back"
            kept = choice.selector.kept
            if kept is not None:
                dropped[layer_idx] = ~kept


@pytest.mark.parametrize(("name", "options"), BUDGETED)
@given(num_prompt=st.integers(1, 40), num_answer=st.integers(1, 16), seed=st.integers(0, 1000))
@few
def test_choices_never_exceed_the_budget(
    tiny: TinyModel, name: str, options: dict[str, object], num_prompt: int, num_answer: int, seed: int
) -> None:
    world = SelectiveWorld(tiny, policy_settings(name, **options), seed=seed)
    world.add("a", random_tokens(num_prompt + num_answer, seed=seed), num_prompt=num_prompt)
    world.run("a", chunks=[num_prompt])
    budget = options["policy_tokens"] + options.get("near_tokens", 0)  # type: ignore[operator]
    if name is PolicyName.QINFER_WINDOWS:
        budget = budget * 5 // 4  # as published
    for choice in world.choices.values():
        if choice.layer_idx < options.get("exact_layers", 0):  # type: ignore[operator]
            assert choice.mask.all()
            continue
        heads = choice.mask  # quest alone chooses for each query head
        if name is not PolicyName.QUEST:
            heads = choice.mask.view(tiny.spec.num_kv_heads, -1, choice.mask.shape[1]).any(1)
        assert int(heads[:, :-1].sum(1).max()) <= budget


@pytest.mark.parametrize(("name", "options"), CASES)
def test_answers_do_not_depend_on_neighbours_chunks_or_preemption(
    tiny: TinyModel, name: str, options: dict[str, object]
) -> None:
    requests = {"a": (25, 40), "b": (3, 20), "c": (33, 37)}  # tokens of the prompt, tokens in all
    tokens = {request: random_tokens(total, seed=total) for request, (_, total) in requests.items()}
    alone = {}
    for request, (num_prompt, _) in requests.items():
        world = SelectiveWorld(tiny, policy_settings(name, **options))
        world.add(request, tokens[request], num_prompt=num_prompt)
        alone[request] = (world.run(request, chunks=[num_prompt]), world.choices)
    world = SelectiveWorld(tiny, policy_settings(name, **options), block_size=3, seed=1)
    for request, (num_prompt, _) in requests.items():
        world.add(request, tokens[request], num_prompt=num_prompt)
    states: dict[str, list[torch.Tensor]] = {request: [] for request in requests}
    for work in ([("a", 7), ("b", 3)], [("b", 2), ("a", 18)], [("c", 33), ("a", 1), ("b", 1)], [("a", 1), ("c", 1)]):
        for request, hidden in world.step(work).items():
            states[request].append(hidden)
    world.preempt("a")  # 27 of its tokens were computed, 2 of them behind the prompt
    states["a"] = [world.step([("b", 1), ("a", 26)])["a"]]
    states["b"].append(alone["b"][0][6:7])  # computed in that step: compared below by what it chose
    for _ in range(14):
        left = [request for request in requests if world.num_computed[request] < len(tokens[request])]
        for request, hidden in world.step([(request, 1) for request in left]).items():
            states[request].append(hidden)
    for request, (num_prompt, _) in requests.items():
        wanted, choices = alone[request]
        torch.testing.assert_close(torch.cat(states[request]), wanted[: len(torch.cat(states[request]))], **SAME)
        for (_, layer_idx, position), choice in choices.items():
            if position < world.num_computed[request]:
                got = world.choices[request, layer_idx, position].mask
                assert torch.equal(got, choice.mask), f"{request}, layer {layer_idx}, token {position}"
        assert world.num_computed[request] > num_prompt


@pytest.mark.parametrize(("name", "options"), CASES)
def test_prompt_that_nothing_is_decoded_after_costs_a_policy_nothing(
    tiny: TinyModel, name: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first token is chosen with all keys, whatever the policy."""
    tokens = random_tokens(31, seed=4)
    hidden: dict[int | None, torch.Tensor] = {}
    shown: dict[int | None, list[int]] = {None: [], 1: []}
    for limit, own in shown.items():
        world = SelectiveWorld(tiny, policy_settings(name, **options))
        policy = world.attention._policy
        kind = type(policy.open(PolicyRequest(num_prompt_tokens=30, max_output_tokens=limit), 1))
        monkeypatch.setattr(kind, "see_prompt", lambda _self, rows, own=own: own.append(len(rows.q)))
        monkeypatch.setattr(kind, "add_rows", lambda _self, k, _v, own=own: own.append(k.shape[1]))
        world.add("a", tokens, num_prompt=30, max_output_tokens=limit)
        hidden[limit] = torch.cat([world.step([("a", count)])["a"] for count in (20, 10)])
        monkeypatch.undo()
        assert bool(own) == (limit is None and bool(policy.needs & {Need.ROWS, Need.PROMPT}))
    assert torch.equal(hidden[None], hidden[1])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_step_that_broke_off_leaves_no_trace(tiny: TinyModel, name: str, options: dict[str, object]) -> None:
    """A step is computed again when the accelerator had no memory for one of its requests."""
    tokens = random_tokens(30, seed=3)
    worlds = [SelectiveWorld(tiny, policy_settings(name, **options)) for _ in range(2)]
    for world in worlds:
        world.add("a", tokens, num_prompt=20)
        for _ in range(4):
            world.step([("a", 20 if world.num_computed["a"] == 0 else 1)])
    with pytest.raises(torch.OutOfMemoryError):
        worlds[0].step([("a", 1)], fails_in_layer=1)
    worlds[0].attention.settle()
    for _ in range(6):
        got, wanted = (world.step([("a", 1)])["a"] for world in worlds)
        assert torch.equal(got, wanted)
