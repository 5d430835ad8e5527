"""Each policy, step by step, against a slow restatement of its published definition: which keys, which weights."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ambidex.attention.boxes_fixed import BoxAttention
from ambidex.attention.early_fixed import PredictedFar
from ambidex.attention.held_fixed import HeldAttention
from ambidex.attention.select.accumulated import Accumulated
from ambidex.attention.select.quest import Pages
from ambidex.attention.windows_fixed import WindowAttention
from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionSetting
from ambidex.kernels import dispatch
from naive_policies import (
    NaiveBounded,
    NaiveH2ODrop,
    NaiveH2OFlexGen,
    NaiveHybridGen,
    NaiveInfiniGen,
    NaiveKeyformer,
    NaiveQInferWindows,
    NaiveQuest,
    NaiveRun,
    NaiveSteeredHybridGen,
    NaiveStreamingLLM,
    Rule,
)
from selective_world import SelectiveWorld, TinyModel, load_tiny_model, policy_settings, random_tokens
from triton_device import INTERPRETED

NUM_PROMPT, NUM_TOKENS = 37, 57
LIMIT = 30
"""Tokens that an answer may have: keyformer's temperature follows it."""
TOLERANCE = 2e-5
"""Of a weight; fp32 rounding of scores up to about 30 in two layers."""

CASES: dict[str, tuple[dict[str, object], Callable[[], Rule]]] = {
    "streaming_llm": (
        {"policy": "streaming_llm", "sink_tokens": 3, "policy_tokens": 14},
        lambda: NaiveStreamingLLM(num_sinks=3, num_recent=11),
    ),
    "streaming_llm without sinks": (
        {"policy": "streaming_llm", "sink_tokens": 0, "policy_tokens": 9},
        lambda: NaiveStreamingLLM(num_sinks=0, num_recent=9),
    ),
    "h2o flexgen": ({"policy": "h2o"}, lambda: NaiveH2OFlexGen(20)),
    "h2o flexgen large": ({"policy": "h2o", "policy_percent": 60}, lambda: NaiveH2OFlexGen(60)),
    "h2o flexgen smallest": ({"policy": "h2o", "policy_percent": 1}, lambda: NaiveH2OFlexGen(1)),
    "h2o flexgen above the prompt": ({"policy": "h2o", "policy_tokens": 100}, lambda: NaiveH2OFlexGen(271)),
    "h2o drop": ({"policy": "h2o", "h2o_form": "drop"}, lambda: NaiveH2ODrop(20, 50)),
    "h2o drop few recent": (
        {"policy": "h2o", "h2o_form": "drop", "policy_percent": 35, "recent_percent": 20},
        lambda: NaiveH2ODrop(35, 20),
    ),
    "keyformer": ({"policy": "keyformer"}, lambda: NaiveKeyformer(60, 30, tau=(1.0, 2.0), limit=LIMIT)),
    "keyformer small and hot": (
        {"policy": "keyformer", "policy_percent": 25, "recent_percent": 50, "tau_start": 0.5, "tau_end": 6.0},
        lambda: NaiveKeyformer(25, 50, tau=(0.5, 6.0), limit=LIMIT),
    ),
    "keyformer large and hot": (  # so large that keys of the answer, which the temperature's rise weighs, are kept
        {"policy": "keyformer", "policy_percent": 90, "recent_percent": 30, "tau_start": 0.5, "tau_end": 6.0},
        lambda: NaiveKeyformer(90, 30, tau=(0.5, 6.0), limit=LIMIT),
    ),
    "qinfer_windows": ({"policy": "qinfer_windows"}, lambda: NaiveQInferWindows(20, 50)),
    "qinfer_windows few recent": (
        {"policy": "qinfer_windows", "policy_percent": 40, "recent_percent": 20},
        lambda: NaiveQInferWindows(40, 20),
    ),
    "qinfer_windows large": (  # as above: keys of the answer are kept or dropped by what the answer gave them
        {"policy": "qinfer_windows", "policy_percent": 75, "recent_percent": 30},
        lambda: NaiveQInferWindows(75, 30),
    ),
    "qinfer_windows all recent": (
        {"policy": "qinfer_windows", "recent_percent": 100},
        lambda: NaiveQInferWindows(20, 100),
    ),
    "keyformer all recent": (
        {"policy": "keyformer", "policy_percent": 20, "recent_percent": 100},
        lambda: NaiveKeyformer(20, 100, tau=(1.0, 2.0), limit=LIMIT),
    ),
    "h2o drop none recent": (
        {"policy": "h2o", "h2o_form": "drop", "recent_percent": 0},
        lambda: NaiveH2ODrop(20, 0),
    ),
    "quest": (
        {"policy": "quest", "policy_tokens": 16, "page_tokens": 4, "exact_layers": 0},
        lambda: NaiveQuest(4, 4, 0),
    ),
    "quest least": (
        {"policy": "quest", "policy_tokens": 9, "page_tokens": 3, "exact_layers": 1},
        lambda: NaiveQuest(3, 3, 1),
    ),
    "infinigen": (
        {"policy": "infinigen", "exact_layers": 1},
        lambda: NaiveInfiniGen(20, 4.0, percent=20, exact_layers=1),
    ),
    "infinigen below the cap": (
        {"policy": "infinigen", "exact_layers": 0, "alpha": 0.5, "policy_percent": 90, "partial_percent": 50},
        lambda: NaiveInfiniGen(90, 0.5, percent=50, exact_layers=1),
    ),
    "hybridgen post": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 6},
        lambda: NaiveHybridGen(20, near=6, is_pre=False, percent=20, exact_layers=1),
    ),
    "hybridgen pre": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 5, "hybridgen_mode": "pre", "partial_percent": 40},
        lambda: NaiveHybridGen(20, near=5, is_pre=True, percent=40, exact_layers=1),
    ),
    "bounded": ({"policy": "bounded"}, lambda: NaiveBounded(0.01)),
    "bounded a lot": ({"policy": "bounded", "max_dropped_mass": 0.3}, lambda: NaiveBounded(0.3)),
    "bounded nothing": ({"policy": "bounded", "max_dropped_mass": 0.0}, lambda: NaiveBounded(0.0)),
}


@pytest.fixture(scope="module", params=["llama", "opt"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return load_tiny_model(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("case", CASES)
def test_policy_chooses_and_weighs_as_its_definition(tiny: TinyModel, case: str) -> None:
    """With the prompt whole over rows, in chunks over tiles, and from rows in host memory."""
    tokens = random_tokens(NUM_TOKENS, seed=len(case))
    naive = NaiveRun(tiny, [CASES[case][1]() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    for block_size, chunks, has_rows in ((4, [NUM_PROMPT], False), (16, [5, 20, 12], False), (16, [9, 28], True)):
        check_against(naive, case, block_size=block_size, chunks=chunks, has_rows=has_rows)


def check_against(naive: NaiveRun, case: str, *, block_size: int, chunks: list[int], has_rows: bool) -> None:
    options, tiny, tokens = CASES[case][0], naive.tiny, naive.tokens
    settings = policy_settings(**options)  # type: ignore[arg-type]
    world = SelectiveWorld(tiny, settings, block_size=block_size, has_rows=has_rows)
    world.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    hidden = world.run("a", chunks=chunks)
    for position in range(NUM_PROMPT, NUM_TOKENS):
        for layer_idx in range(tiny.spec.num_layers):
            choice = world.choices["a", layer_idx, position]
            place = f"{case}, layer {layer_idx}, token {position}"
            for head, wanted in enumerate(naive.attended[layer_idx, position]):
                assert set(choice.mask[head].nonzero()[:, 0].tolist()) == wanted, f"{place}, head {head}"
                weights = torch.zeros(position + 1)
                for place_of_key, weight in naive.weights[layer_idx, position][head].items():
                    weights[place_of_key] = weight
                assert (choice.probs[head].float() - weights).abs().max() < TOLERANCE, f"{place}, head {head}"
    error = (hidden - naive.hidden).abs().max() / naive.hidden.abs().max()
    assert error < 1e-4


def test_definitions_differ_from_full_attention(tiny: TinyModel) -> None:
    """Else the comparison would prove nothing."""
    tokens = random_tokens(NUM_TOKENS, seed=1)
    full = NaiveRun(tiny, [NaiveBounded(0.0) for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    for case, (_, make_rule) in CASES.items():
        if case in ("bounded nothing", "h2o flexgen above the prompt"):
            continue
        run = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
        assert (run.hidden[-1] - full.hidden[-1]).abs().max() > 1e-3 * full.hidden.abs().max(), case


@pytest.mark.parametrize("feedback", ["mode", "full"])
def test_hybridgen_follows_what_feedback_tells_it_from_step_to_step(tiny: TinyModel, feedback: str) -> None:
    """Modes and numbers of keys change at every step; `mode` leaves each request its own number."""
    settings = [(4, False), (7, True), (2, True), (11, False)]
    own = settings if feedback == "full" else [(None, is_pre) for _, is_pre in settings]
    tokens = random_tokens(NUM_TOKENS, seed=3)
    rules: list[Rule] = [
        NaiveSteeredHybridGen(list(own), near=6, percent=40, exact_layers=1) for _ in range(tiny.spec.num_layers)
    ]
    naive = NaiveRun(tiny, rules, tokens, NUM_PROMPT)
    options = {"exact_layers": 1, "near_tokens": 6, "partial_percent": 40, "hybridgen_feedback": feedback}
    world = SelectiveWorld(tiny, policy_settings("hybridgen", **options))
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    world.step([("a", NUM_PROMPT)])
    assert world.attention.stage_times(1.0) is None, "a prompt is no decode step"
    hidden = []
    for position in range(NUM_PROMPT, NUM_TOKENS):
        num_selected, is_pre = settings[position % len(settings)]
        mode = HybridGenMode.PRE if is_pre else HybridGenMode.POST
        world.attention.apply(SelectionSetting(num_selected=num_selected, mode=mode))
        hidden.append(world.step([("a", 1)])["a"])
        stages = world.attention.stage_times(100.0)
        assert stages is not None
        assert stages.cpu_s > 0
        assert stages.transfer_s > 0
        assert stages.gpu_s == pytest.approx(100.0 - stages.cpu_s - stages.transfer_s)
        for layer_idx in range(tiny.spec.num_layers):
            choice = world.choices["a", layer_idx, position]
            for head, wanted in enumerate(naive.attended[layer_idx, position]):
                assert set(choice.mask[head].nonzero()[:, 0].tolist()) == wanted
    error = (torch.cat(hidden) - naive.hidden[NUM_PROMPT:]).abs().max() / naive.hidden.abs().max()
    assert error < 1e-4


STEERED = [(4, False), (7, True), (2, True), (11, False), (None, False), (None, True)]
"""Keys (None: the request's own number) and whether in mode pre."""
EARLY_CASES: dict[str, tuple[dict[str, object], Callable[[], Rule]]] = {
    **{case: CASES[case] for case in ("hybridgen post", "hybridgen pre")},
    "hybridgen few near": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 0, "policy_tokens": 3},
        lambda: NaiveHybridGen(-(-300 // NUM_PROMPT), near=0, is_pre=False, percent=20, exact_layers=1),
    ),
    "hybridgen all near": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 60},
        lambda: NaiveHybridGen(20, near=60, is_pre=False, percent=20, exact_layers=1),
    ),
    "hybridgen near in part": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 45, "hybridgen_mode": "pre"},
        lambda: NaiveHybridGen(20, near=45, is_pre=True, percent=20, exact_layers=1),
    ),
    "hybridgen more keys than there are": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 6, "policy_percent": 100},
        lambda: NaiveHybridGen(100, near=6, is_pre=False, percent=20, exact_layers=1),
    ),
    **{case: CASES[case] for case in ("infinigen", "infinigen below the cap")},
    "infinigen few keys": (
        {"policy": "infinigen", "exact_layers": 1, "alpha": 0.05, "policy_percent": 100},
        lambda: NaiveInfiniGen(100, 0.05, percent=20, exact_layers=1),
    ),
    "infinigen the own key alone": (
        {"policy": "infinigen", "exact_layers": 1, "alpha": 0.0},
        lambda: NaiveInfiniGen(20, 0.0, percent=20, exact_layers=1),
    ),
    "infinigen more keys than there are": (
        {"policy": "infinigen", "exact_layers": 1, "alpha": 1e3, "policy_tokens": 100},
        lambda: NaiveInfiniGen(271, 1e3, percent=20, exact_layers=1),
    ),
    "hybridgen looks ahead nowhere": (
        {"policy": "hybridgen", "exact_layers": 2, "near_tokens": 6},
        lambda: NaiveHybridGen(20, near=6, is_pre=False, percent=20, exact_layers=2),
    ),
}


@pytest.mark.parametrize("case", EARLY_CASES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_early_decode_chooses_and_weighs_as_the_definition(tiny: TinyModel, case: str, block_size: int) -> None:
    """Steps of one token, in which the CPU scores a layer ahead, select and weigh what the definition does."""
    options, make_rule = EARLY_CASES[case]
    tokens = random_tokens(NUM_TOKENS, seed=len(case))
    naive = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    world = SelectiveWorld(tiny, policy_settings(**options), block_size=block_size, is_early=True)  # type: ignore[arg-type]
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    hidden = world.run("a", chunks=[NUM_PROMPT])
    check_choices(world, naive, case)
    assert (hidden - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4


def check_choices(world: SelectiveWorld, naive: NaiveRun, case: str, positions: range | None = None) -> None:
    """In layers that look ahead; the others attend all keys."""
    spec = naive.tiny.spec
    first = naive.rules[0].exact_layers  # type: ignore[attr-defined]
    for position in positions or range(NUM_PROMPT, NUM_TOKENS):
        for layer_idx in range(first, spec.num_layers):
            choice = world.choices["a", layer_idx, position]
            for head, wanted in enumerate(naive.attended[layer_idx, position]):
                place = f"{case}, layer {layer_idx}, token {position}, head {head}"
                assert set(choice.mask[head].nonzero()[:, 0].tolist()) == wanted, place
                weights = torch.zeros(position + 1)
                for key, weight in naive.weights[layer_idx, position][head].items():
                    weights[key] = weight
                assert (choice.probs[head].float() - weights).abs().max() < TOLERANCE, place


@pytest.mark.parametrize("case", EARLY_CASES)
@pytest.mark.parametrize(("seed", "num_fixed"), [(1, 9), (2, 20), (3, 11)])
def test_fixed_steps_give_what_the_definition_gives(tiny: TinyModel, case: str, seed: int, num_fixed: int) -> None:
    """Before and behind steps whose new row belongs to a block in host memory, which have not this form; or alone."""
    options, make_rule = EARLY_CASES[case]
    tokens = random_tokens(NUM_TOKENS, seed=len(case))
    naive = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    settings = policy_settings(**options)  # type: ignore[arg-type]
    world = SelectiveWorld(tiny, settings, block_size=16, is_early=True, is_fixed=True, seed=seed)
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    hidden = world.run("a", chunks=[NUM_PROMPT])
    assert (hidden - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4
    assert world.num_fixed == (num_fixed if naive.rules[0].exact_layers == 1 else 0)  # type: ignore[attr-defined]


@INTERPRETED
@pytest.mark.parametrize("case", ["hybridgen pre", "infinigen below the cap"])
def test_kernels_of_fixed_steps_that_predict_give_what_the_definition_gives(tiny: TinyModel, case: str) -> None:
    """A few steps: the interpreter takes long."""
    options, make_rule = EARLY_CASES[case]
    tokens = random_tokens(NUM_PROMPT + 4, seed=len(case))
    naive = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    settings = policy_settings(**options)  # type: ignore[arg-type]
    world = SelectiveWorld(tiny, settings, block_size=16, is_early=True, is_fixed=True, seed=2)
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    with dispatch.override("predict_far", "triton"), dispatch.override("attend_predicted", "triton"):
        hidden = world.run("a", chunks=[NUM_PROMPT])
    assert world.num_fixed == 4
    assert (hidden - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4


@pytest.mark.parametrize("feedback", ["mode", "full"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_early_decode_follows_feedback_from_step_to_step(tiny: TinyModel, feedback: str, *, is_fixed: bool) -> None:
    own = [(num if feedback == "full" else None, is_pre) for num, is_pre in STEERED]
    tokens = random_tokens(NUM_TOKENS, seed=4)
    rules: list[Rule] = [
        NaiveSteeredHybridGen(list(own), near=6, percent=40, exact_layers=1) for _ in range(tiny.spec.num_layers)
    ]
    naive = NaiveRun(tiny, rules, tokens, NUM_PROMPT)
    options = {"exact_layers": 1, "near_tokens": 6, "partial_percent": 40, "hybridgen_feedback": feedback}
    world = SelectiveWorld(
        tiny, policy_settings("hybridgen", **options), is_early=True, is_fixed=is_fixed, block_size=16, seed=2
    )
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    world.step([("a", NUM_PROMPT)])
    hidden = []
    for position in range(NUM_PROMPT, NUM_TOKENS):
        num_selected, is_pre = STEERED[position % len(STEERED)]
        if num_selected is None:
            num_selected = NUM_PROMPT * 20 // 100
        mode = HybridGenMode.PRE if is_pre else HybridGenMode.POST
        world.attention.apply(SelectionSetting(num_selected=num_selected, mode=mode))
        hidden.append(world.step([("a", 1)])["a"])
        stages = world.attention.stage_times(100.0)
        assert stages is not None
        assert (stages.cpu_s > 0) is not is_pre, "in mode pre the CPU scores nothing"
        assert stages.transfer_s > 0
        assert 0 < stages.gpu_s < 100
    if is_fixed:
        assert world.num_fixed > 2
    else:
        check_choices(world, naive, feedback)
    assert (torch.cat(hidden) - naive.hidden[NUM_PROMPT:]).abs().max() / naive.hidden.abs().max() < 1e-4


@pytest.mark.parametrize("case", ["hybridgen pre", "infinigen", "infinigen below the cap"])
def test_a_fixed_step_that_predicts_and_breaks_off_is_computed_again(
    tiny: TinyModel, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new partial keys, of which it has written some, are written once more, behind the same older ones."""
    tokens = random_tokens(NUM_TOKENS, seed=8)
    options, make_rule = EARLY_CASES[case]
    naive = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
    settings = policy_settings(**options)  # type: ignore[arg-type]
    world = SelectiveWorld(tiny, settings, is_early=True, is_fixed=True, block_size=16, seed=2)
    world.add("a", tokens, num_prompt=NUM_PROMPT)
    hidden = [world.step([("a", NUM_PROMPT)])["a"]]

    def break_off(far: PredictedFar, *arguments: Any) -> torch.Tensor:
        attend(far, *arguments)
        raise torch.OutOfMemoryError("no memory, says the test")

    attend = PredictedFar.attend
    for position in range(NUM_PROMPT, NUM_TOKENS):
        if position % 3 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(PredictedFar, "attend", break_off)
                with pytest.raises(torch.OutOfMemoryError):
                    world.step([("a", 1)])
        hidden.append(world.step([("a", 1)])["a"])
    assert world.num_fixed == NUM_TOKENS - NUM_PROMPT
    assert (torch.cat(hidden) - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4


@pytest.mark.parametrize("case", ["infinigen below the cap", "infinigen few keys"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_figures_of_a_choice_that_predictions_count_are_those_of_queries_answered_one_by_one(
    tiny: TinyModel, case: str, *, is_fixed: bool
) -> None:
    """How many keys are chosen is known in the step alone, and asked for behind it; the same holds of what was read."""
    tokens = {name: random_tokens(NUM_TOKENS, seed=seed) for name, seed in (("a", 3), ("b", 9))}
    settings = policy_settings(**EARLY_CASES[case][0])  # type: ignore[arg-type]
    one_by_one = SelectiveWorld(tiny, settings, block_size=16, seed=1)
    world = SelectiveWorld(tiny, settings, block_size=16, seed=2, is_early=True, is_fixed=is_fixed)
    for each in (one_by_one, world):
        for name, own in tokens.items():
            each.add(name, own, num_prompt=NUM_PROMPT)
            each.step([(name, NUM_PROMPT)])
    counts, num_heads, num_layers = set(), tiny.spec.num_q_heads, tiny.spec.num_layers
    token_bytes = world.pools[Tier.DRAM].spec.bytes_per_token_layer
    for position in range(NUM_PROMPT, NUM_TOKENS):
        for each in (one_by_one, world):
            each.step([("a", 1), ("b", 1)])
        figures = world.attention.selection
        assert figures == one_by_one.attention.selection
        assert figures.num_visible == 2 * (position + 1) * num_heads * num_layers
        chosen = figures.num_attended // num_heads - 2 * (position + 1)  # without the layer that attends all
        chosen -= 2 * (num_layers - 1)  # and without the queries' own
        assert world.attention.fixed_lane_bytes[Lane.CPU] == chosen * token_bytes
        counts.add(chosen)
    assert len(counts) > 1, "all steps choose as many: the test would prove nothing"
    assert world.num_fixed > 2 or not is_fixed


LONE_CASES = [case for case in CASES if case.startswith(("h2o", "keyformer", "qinfer", "streaming", "quest"))]
"""In whose steps of fixed form the accelerator attends on its own, in all layers that choose."""


def make_lone_world(tiny: TinyModel, case: str, *, seed: int = 2, has_fixed: bool = True) -> SelectiveWorld:
    settings = policy_settings(**CASES[case][0])  # type: ignore[arg-type]
    return SelectiveWorld(tiny, settings, is_early=has_fixed, is_fixed=has_fixed, block_size=16, seed=seed)


def run_naive(tiny: TinyModel, case: str, tokens: list[int]) -> NaiveRun:
    return NaiveRun(tiny, [CASES[case][1]() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)


@pytest.mark.parametrize("case", LONE_CASES)
@pytest.mark.parametrize(("seed", "num_fixed"), [(1, 9), (2, 20), (3, 11)])
def test_fixed_steps_of_the_accelerator_alone_drop_and_weigh_as_the_definition(
    tiny: TinyModel, case: str, seed: int, num_fixed: int
) -> None:
    """Before and behind steps whose new row belongs to a block in host memory, which have not this form; or alone. What
    is kept after a step is what the next one attends besides its own key."""
    tokens = random_tokens(NUM_TOKENS, seed=len(case))
    naive, world = run_naive(tiny, case, tokens), make_lone_world(tiny, case, seed=seed)
    world.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    hidden = [world.step([("a", NUM_PROMPT)])["a"]]
    for position in range(NUM_PROMPT, NUM_TOKENS):
        hidden.append(world.step([("a", 1)])["a"])
        for layer_idx in range(tiny.spec.num_layers if position + 1 < NUM_TOKENS else 0):
            kept = world.attention.kept(RequestId("a"), layer_idx)
            assert (kept is None) is case.startswith("quest"), "it drops nothing for good"
            if kept is None:
                continue
            kept = kept.expand(tiny.spec.num_kv_heads, -1)
            for head, attended in enumerate(naive.attended[layer_idx, position + 1]):
                found = set(kept[head // tiny.spec.group_size].nonzero()[:, 0].tolist())
                wanted = attended - {position + 1}
                # The oldest key of a window moves out with the next query; and of Q-Infer, behind a step of another
                # form, the one goes that is found to be one too many by the next.
                assert wanted <= found, f"{case}, layer {layer_idx}, token {position}, head {head}"
                assert len(found - wanted) <= {"q": 2, "s": 1}.get(case[0], 0), f"layer {layer_idx}, token {position}"
    assert (torch.cat(hidden) - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4
    assert world.num_fixed == num_fixed


@INTERPRETED
@pytest.mark.parametrize(
    "case",
    [
        "h2o flexgen",
        "h2o drop few recent",
        "keyformer large and hot",
        "qinfer_windows",
        "streaming_llm",
        "quest",
        "quest least",
    ],
)
def test_kernels_of_fixed_steps_of_the_accelerator_alone_give_what_the_definition_gives(
    tiny: TinyModel, case: str
) -> None:
    """A few steps: the interpreter takes long."""
    tokens = random_tokens(NUM_PROMPT + 6, seed=len(case))
    naive, world = run_naive(tiny, case, tokens), make_lone_world(tiny, case)
    world.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    with ExitStack() as forced:
        for op in ("attend_held", "add_sums", "attend_windows", "choose_pages", "attend_pages", "sum_prompt_weights"):
            forced.enter_context(dispatch.override(op, "triton"))
        hidden = world.run("a", chunks=[NUM_PROMPT])
    assert world.num_fixed == 6
    assert (hidden - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4


@pytest.mark.parametrize("case", LONE_CASES)
def test_a_fixed_step_of_the_accelerator_alone_that_breaks_off_is_computed_again(
    tiny: TinyModel, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has added lies in the other copy, and is written once more, as is the box of a page that it fills."""
    kinds = {"streaming": WindowAttention, "quest": BoxAttention}
    kind = kinds.get(case.replace("_", " ").split()[0], HeldAttention)
    tokens = random_tokens(NUM_TOKENS, seed=8)
    naive, world = run_naive(tiny, case, tokens), make_lone_world(tiny, case)
    world.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    hidden = [world.step([("a", NUM_PROMPT)])["a"]]

    def break_off(
        attention: HeldAttention | WindowAttention | BoxAttention, layer_idx: int, *arguments: Any, **named: Any
    ) -> torch.Tensor:
        attend(attention, layer_idx, *arguments, **named)
        raise torch.OutOfMemoryError("no memory, says the test")

    attend: Callable[..., torch.Tensor] = kind.attend
    for position in range(NUM_PROMPT, NUM_TOKENS):
        if position % 3 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(kind, "attend", break_off)
                with pytest.raises(torch.OutOfMemoryError):
                    world.step([("a", 1)])
        hidden.append(world.step([("a", 1)])["a"])
    assert world.num_fixed == NUM_TOKENS - NUM_PROMPT
    assert (torch.cat(hidden) - naive.hidden).abs().max() / naive.hidden.abs().max() < 1e-4


@pytest.mark.parametrize("case", LONE_CASES)
def test_sums_and_figures_of_fixed_steps_are_those_of_queries_answered_one_by_one(tiny: TinyModel, case: str) -> None:
    """Two requests of different lengths in a step: an answer depends on nobody else."""
    tokens = {"a": random_tokens(NUM_TOKENS, seed=3), "b": random_tokens(NUM_TOKENS + 12, seed=9)}
    one_by_one, world = make_lone_world(tiny, case, has_fixed=False), make_lone_world(tiny, case)
    for each in (one_by_one, world):
        for name, own in tokens.items():
            each.add(name, own, num_prompt=len(own) - NUM_TOKENS + NUM_PROMPT, max_output_tokens=LIMIT)
            each.step([(name, len(own) - NUM_TOKENS + NUM_PROMPT)])
    num_fixed = 0
    for _ in range(NUM_TOKENS - NUM_PROMPT):
        wanted, got = (each.step([("a", 1), ("b", 1)]) for each in (one_by_one, world))
        for name in tokens:
            assert (got[name] - wanted[name]).abs().max() / wanted[name].abs().max() < 1e-4
            for one, other in zip(
                *(each.attention.keep(RequestId(name)).selectors for each in (one_by_one, world)), strict=True
            ):
                if isinstance(one, Accumulated):
                    torch.testing.assert_close(other._sums, one._sums, rtol=1e-4, atol=1e-4)
                if isinstance(one, Pages):
                    for mine, theirs in ((other._low, one._low), (other._high, one._high)):
                        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
        assert world.attention.selection == one_by_one.attention.selection
        if world.num_fixed > num_fixed:
            num_fixed = world.num_fixed
            assert world.attention.early is not None
            boxes = one_by_one.attention._rows._num_own_bytes
            assert world.attention.early.requests.num_bytes == boxes
            assert (boxes > 0) is case.startswith("quest")
            exact = CASES[case][0].get("exact_layers", 0) * sum(world.num_computed.values())  # type: ignore[operator]
            assert num_rows(world, world.attention.fixed_lane_bytes, boxes) + exact == num_rows(
                one_by_one, one_by_one.attention.lane_bytes, boxes
            )
    assert num_fixed > 5


def num_rows(world: SelectiveWorld, lane_bytes: Mapping[Lane, int], num_own_bytes: int) -> float:
    """Rows of K and V of all heads that were read, wherever they lie: on the host they may be padded. The policy's own
    bytes do not count."""
    tiers = {Lane.GPU: Tier.GPU, Lane.CPU: Tier.DRAM}
    lane_bytes = {**lane_bytes, Lane.GPU: lane_bytes[Lane.GPU] - num_own_bytes}
    return sum(lane_bytes[lane] / world.pools[tier].spec.bytes_per_token_layer for lane, tier in tiers.items())


@pytest.mark.parametrize("case", ["h2o flexgen", "keyformer", "qinfer_windows", "streaming_llm", "quest"])
def test_a_request_goes_back_to_what_was_kept_between_fixed_steps(tiny: TinyModel, case: str) -> None:
    """Steps since then have written both copies, or boxes of pages."""
    tokens = random_tokens(NUM_TOKENS, seed=12)
    world = make_lone_world(tiny, case)
    world.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    world.run("a", chunks=[NUM_PROMPT])
    again = make_lone_world(tiny, case)
    again.add("a", tokens, num_prompt=NUM_PROMPT, max_output_tokens=LIMIT)
    again.step([("a", NUM_PROMPT)])
    for _ in range(5):
        again.step([("a", 1)])
    kept = again.attention.keep(RequestId("a"))
    first = [again.step([("a", 1)])["a"] for _ in range(6)]
    again.attention.restore(RequestId("a"), kept)
    again.num_computed["a"] -= 6
    second = [again.step([("a", 1)])["a"] for _ in range(6)]
    assert again.num_fixed == 17
    torch.testing.assert_close(torch.cat(second), torch.cat(first), rtol=0, atol=0)


FOLLOWING: dict[str, tuple[dict[str, object], Callable[[], Rule]]] = {
    "post": (
        {"policy": "hybridgen", "exact_layers": 1, "near_tokens": 6, "policy_tokens": 5},
        lambda: NaiveHybridGen(-(-500 // NUM_PROMPT), near=6, is_pre=False, percent=20, exact_layers=1),
    ),
    "infinigen": CASES["infinigen below the cap"],
    "h2o": CASES["h2o flexgen"],
    "h2o drop": CASES["h2o drop few recent"],
    "keyformer": ({"policy": "keyformer"}, lambda: NaiveKeyformer(60, 30, tau=(1.0, 2.0), limit=None)),
    "qinfer_windows": CASES["qinfer_windows"],
    "streaming_llm": CASES["streaming_llm"],
    "quest": CASES["quest"],
    "quest least": CASES["quest least"],
}


@pytest.mark.parametrize("case", FOLLOWING)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_early_decode_and_steps_of_other_forms_follow_each_other(tiny: TinyModel, case: str, *, is_fixed: bool) -> None:
    """Two requests, of which one computes its prompt in chunks, yields, and has several known tokens in a step."""
    options, make_rule = FOLLOWING[case]
    long, short = random_tokens(NUM_TOKENS, seed=5), random_tokens(NUM_TOKENS, seed=6)
    alone = {}
    for name, tokens in (("a", long), ("b", short)):
        naive = NaiveRun(tiny, [make_rule() for _ in range(tiny.spec.num_layers)], tokens, NUM_PROMPT)
        alone[name] = naive.hidden
    settings = policy_settings(**options)  # type: ignore[arg-type]
    world = SelectiveWorld(tiny, settings, is_early=True, is_fixed=is_fixed, block_size=16, seed=4)
    for name, tokens in (("a", long), ("b", short)):
        world.add(name, tokens, num_prompt=NUM_PROMPT)
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": []}

    def step(*work: tuple[str, int]) -> None:
        for name, states in world.step(list(work)).items():
            got[name].append(states)

    step(("a", NUM_PROMPT))
    step(("a", 1), ("b", 20))
    step(("a", 1))
    step(("a", 3), ("b", NUM_PROMPT - 20))
    for _ in range(3):
        step(("a", 1), ("b", 1))
    step(("b", 2))
    step(("b", 1), ("a", 1))
    with pytest.raises(torch.OutOfMemoryError):
        world.step([("a", 1), ("b", 1)], fails_in_layer=1)
    step(("a", 1), ("b", 1))
    world.preempt("b")
    got["b"] = []
    step(("b", NUM_PROMPT + 2), ("a", 1))
    step(("b", 1), ("a", 1))
    for name, states in got.items():
        hidden = torch.cat(states)
        error = (hidden - alone[name][: len(hidden)]).abs().max() / alone[name].abs().max()
        assert error < 1e-4, name
