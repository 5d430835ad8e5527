"""The fidelity check sees when a policy's rule is broken: each break here must make it fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_policies_fidelity import CASES, NUM_PROMPT, NUM_TOKENS, check_against, check_choices

import selective_world
from ambidex.attention.select.policy import DecodeRow, Policy, Positions, Selection, Selector
from ambidex.core.policy import PolicyName
from naive_policies import NaiveRun
from selective_world import SelectiveWorld, TinyModel, load_tiny_model, policy_settings, random_tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return load_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runs(tiny: TinyModel) -> Callable[[str], NaiveRun]:
    """What a case's definition does, computed once."""
    known: dict[str, NaiveRun] = {}

    def run(case: str) -> NaiveRun:
        if case not in known:
            rules = [CASES[case][1]() for _ in range(tiny.spec.num_layers)]
            known[case] = NaiveRun(tiny, rules, random_tokens(NUM_TOKENS, seed=len(case)), NUM_PROMPT)
        return known[case]

    return run


def is_faithful(naive: NaiveRun, case: str) -> bool:
    try:
        check_against(naive, case, block_size=4, chunks=[NUM_PROMPT], has_rows=False)
    except AssertionError:
        return False
    return True


WRONG_SETTINGS: list[tuple[str, dict[str, object]]] = [
    ("streaming_llm", {"sink_tokens": 4}),
    ("streaming_llm", {"policy_tokens": 15}),
    ("h2o flexgen", {"policy_percent": 26}),
    ("h2o drop", {"recent_percent": 30}),
    ("h2o drop", {"h2o_form": "flexgen", "recent_percent": None}),
    ("keyformer large and hot", {"tau_end": 1.0}),
    ("keyformer small and hot", {"tau_start": 3.0}),
    ("keyformer small and hot", {"recent_percent": 30}),
    ("keyformer", {"seed": 1}),
    ("qinfer_windows", {"policy_percent": 30}),
    ("qinfer_windows few recent", {"recent_percent": 40}),
    ("quest", {"page_tokens": 5}),
    ("quest", {"policy_tokens": 20}),
    ("quest", {"exact_layers": 1}),
    ("infinigen", {"partial_percent": 60}),
    ("infinigen", {"policy_percent": 30}),
    ("infinigen below the cap", {"alpha": 1.5}),
    ("hybridgen post", {"near_tokens": 7}),
    ("hybridgen post", {"policy_percent": 26}),
    ("hybridgen post", {"hybridgen_mode": "pre"}),
    ("hybridgen pre", {"partial_percent": 80}),
    ("bounded", {"max_dropped_mass": 0.03}),
    ("bounded a lot", {"max_dropped_mass": 0.25}),
]


@pytest.mark.parametrize(("case", "changes"), WRONG_SETTINGS)
def test_rule_with_a_wrong_number_is_seen(
    runs: Callable[[str], NaiveRun], monkeypatch: pytest.MonkeyPatch, case: str, changes: dict[str, object]
) -> None:
    naive = runs(case)
    assert is_faithful(naive, case)
    options, rule = CASES[case]
    changed = {name: value for name, value in {**options, **changes}.items() if value is not None}
    monkeypatch.setitem(CASES, case, (changed, rule))
    assert not is_faithful(naive, case)


def one_too_few(own: Callable[[Any, DecodeRow], Selection]) -> Callable[[Any, DecodeRow], Selection]:
    def select(self: Any, row: DecodeRow) -> Selection:
        selection = own(self, row)
        mask = selection.mask.clone()
        mask[:, mask.any(0).nonzero()[0]] = False
        return replace(selection, mask=mask)

    return select


def with_true_query(own: Callable[[Any, DecodeRow], Selection]) -> Callable[[Any, DecodeRow], Selection]:
    return lambda self, row: own(self, replace(row, stale_q=row.q))


def with_true_scores(own: Callable[[Any, DecodeRow], Selection]) -> Callable[[Any, DecodeRow], Selection]:
    return lambda self, row: Selection(mask=own(self, row).mask)


def ignored(_own: Callable[..., Any]) -> Callable[..., None]:
    return lambda *_: None


WRONG_DEEDS: list[tuple[str, str, Callable[[Any], Any]]] = [
    *((case, "select", one_too_few) for case in CASES if case not in ("bounded nothing",)),
    *((case, "attended", ignored) for case in ("h2o drop few recent", "keyformer small and hot")),
    ("h2o flexgen large", "attended", ignored),
    *((case, "select", with_true_query) for case in ("infinigen", "hybridgen post", "hybridgen pre")),
    ("hybridgen post", "select", with_true_scores),
]


@pytest.mark.parametrize(("case", "method", "breaks"), WRONG_DEEDS)
def test_rule_that_is_not_followed_is_seen(
    runs: Callable[[str], NaiveRun],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    method: str,
    breaks: Callable[[Any], Any],
) -> None:
    naive = runs(case)
    break_selectors(monkeypatch, method, breaks)
    assert not is_faithful(naive, case)


def break_selectors(monkeypatch: pytest.MonkeyPatch, method: str, breaks: Callable[[Any], Any]) -> None:
    """Policies made from now on have selectors with another method, those that have it at all."""
    make_policy = selective_world.make_policy

    def make_broken(*arguments: Any) -> Policy:
        policy = make_policy(*arguments)
        open_selector = policy.open

        def open_broken(*of: Any) -> Selector:
            selector = open_selector(*of)
            kind = type(selector)
            if hasattr(kind, method):
                # A class of its own, not a method of the object: selectors are copied.
                selector.__class__ = type(f"Broken{kind.__name__}", (kind,), {method: breaks(getattr(kind, method))})
            return selector

        policy.open = open_broken  # type: ignore[method-assign]
        return policy

    monkeypatch.setattr(selective_world, "make_policy", make_broken)


ChooseFar = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def one_far_too_few(own: ChooseFar) -> ChooseFar:
    def choose_far(self: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places, scores = own(self, *given)
        return places[:, 1:], scores[:, :, 1:]

    return choose_far


def the_worst(own: ChooseFar) -> ChooseFar:
    """As many of the far keys, the first ones."""

    def choose_far(self: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places, scores = own(self, *given)
        return torch.arange(places.shape[1]).expand_as(places), scores

    return choose_far


def weighed_otherwise(own: ChooseFar) -> ChooseFar:
    def choose_far(self: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places, scores = own(self, *given)
        return places, scores + torch.linspace(0, 0.1, scores.shape[2])

    return choose_far


@pytest.mark.parametrize("breaks", [None, one_far_too_few, the_worst, weighed_otherwise])
@pytest.mark.parametrize("case", ["hybridgen post", "hybridgen pre", "infinigen", "infinigen below the cap"])
def test_rule_that_the_fast_form_does_not_follow_is_seen(
    runs: Callable[[str], NaiveRun], monkeypatch: pytest.MonkeyPatch, case: str, breaks: Callable[[Any], Any] | None
) -> None:
    naive = runs(case)
    if breaks is not None:
        break_selectors(monkeypatch, "choose_scored" if case == "hybridgen post" else "choose_far", breaks)
    world = SelectiveWorld(naive.tiny, policy_settings(**CASES[case][0]), is_early=True)  # type: ignore[arg-type]
    world.add("a", naive.tokens, num_prompt=NUM_PROMPT)
    world.run("a", chunks=[NUM_PROMPT])
    if breaks is None:
        check_choices(world, naive, case)
        return
    with pytest.raises(AssertionError):
        check_choices(world, naive, case)


def test_keys_that_stand_where_they_were_are_seen(
    runs: Callable[[str], NaiveRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ambidex.attention.select.streaming_llm import StreamingLLM

    naive = runs("streaming_llm")
    monkeypatch.setattr(StreamingLLM, "positions", Positions.ORIGINAL)
    assert not is_faithful(naive, "streaming_llm")


def test_every_policy_is_broken_in_some_way() -> None:
    broken = {CASES[case][0]["policy"] for case, *_ in [*WRONG_SETTINGS, *WRONG_DEEDS]}
    assert broken == {name for name in PolicyName if not name.attends_all}


def test_weights_alone_are_compared_too(runs: Callable[[str], NaiveRun]) -> None:
    """The same keys with other weights: the check must not be one of masks alone."""
    naive = runs("bounded nothing")
    assert is_faithful(naive, "bounded nothing")
    place = next(iter(naive.weights))
    kept = naive.weights[place][0]
    key = max(kept, key=kept.__getitem__)
    before = kept[key]
    kept[key] = before + 1e-3
    try:
        assert not is_faithful(naive, "bounded nothing")
    finally:
        kept[key] = before
    assert torch.isfinite(naive.hidden).all()
