"""`bounded` never drops more than it may, and its error never exceeds its bound, over thousands of random cases."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.attention.select.bounded import Bounded, LowBitKeys, ValueBox, dropped_mass, keep_likely
from ambidex.attention.select.policy import DecodeRow, PolicyRequest, RowMeasure, group_scores
from ambidex.attention.selection_log import ROUNDING, SelectionLog
from ambidex.core.errors import BoundError
from selective_world import policy_settings
from unit_specs import make_spec

NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 2, 3, 8
KINDS = ("normal", "equal scores", "huge norms", "one giant row", "tiny", "clusters", "zeros", "huge values")
masses = st.sampled_from([0.0, 1e-9, 1e-4, 0.01, 0.1, 0.5, 0.999])


def make_rows(kind: str, num_keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A query [Hq, D], and K and V [Hkv, S, D], fp32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
    k, v = normal(NUM_KV_HEADS, num_keys, HEAD_DIM), normal(NUM_KV_HEADS, num_keys, HEAD_DIM)
    match kind:
        case "equal scores":
            k = k[:, :1].expand_as(k).clone()
        case "huge norms":
            q, k = q * 1e4, k * 1e6
        case "one giant row":
            k[:, num_keys // 2] *= 1e5
            v[:, num_keys // 2] *= 1e5
        case "tiny":
            q, k, v = q * 1e-20, k * 1e-20, v * 1e-20
        case "clusters":
            k = k[:, torch.randint(0, min(3, num_keys), (num_keys,), generator=generator)] * 3
        case "zeros":
            k, v = torch.zeros_like(k), torch.zeros_like(v)
        case "huge values":
            v = v * 1e8
        case _:
            k *= 2
    return q, k.contiguous(), v


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Output [Hq, D] and lse [Hq] over the kept rows, by the definition, in fp64."""
    scores = group_scores(q.double()[None], k.double(), HEAD_DIM**-0.5)[:, 0].masked_fill(~keep, -torch.inf)
    values = v.double().repeat_interleave(GROUP_SIZE, 0)
    return (scores.softmax(1)[:, None] @ values)[:, 0], scores.logsumexp(1)


@given(
    kind=st.sampled_from(KINDS), num_keys=st.integers(1, 80), mass=masses, seed=st.integers(0, 10**6),
    scores=st.sampled_from(["exact", "int8"]),
)  # fmt: skip
@settings(max_examples=1500)
def test_measured_error_never_exceeds_the_bound(kind: str, num_keys: int, mass: float, seed: int, scores: str) -> None:
    q, k, v = make_rows(kind, num_keys, seed)
    policy = Bounded(policy_settings("bounded", max_dropped_mass=mass, bounded_scores=scores), make_spec())
    selector = policy.open(PolicyRequest(num_prompt_tokens=1, max_output_tokens=None), 0)
    cut = num_keys // 2
    for part in (slice(0, cut), slice(cut, num_keys)):
        if part.start < part.stop:
            selector.add_rows(k[:, part], v[:, part])
    selection = selector.select(
        DecodeRow(
            q=q.double(), stale_q=None, num_keys=num_keys, scale=HEAD_DIM**-0.5,
            read_keys=lambda count: k.double()[:, :count],
            take_keys=lambda _: k,
            note_bytes=lambda _: None,
        )
    )  # fmt: skip
    out, lse = attend(q, k, v, selection.mask)
    truth, total = attend(q, k, v, torch.ones_like(selection.mask))
    measure = selector.measure(out, lse)
    assert measure is not None
    true_mass = 1 - (lse - total).exp()
    assert (true_mass <= mass + 1e-12).all(), "more than the asked mass was dropped"
    assert (true_mass <= measure.dropped_mass + 1e-12).all()
    assert (measure.dropped_mass <= mass).all()
    errors = (out - truth).norm(dim=1)
    assert (errors <= measure.error_bound + ROUNDING * (1 + truth.norm(dim=1))).all()
    if scores == "exact":
        torch.testing.assert_close(measure.dropped_mass, true_mass, rtol=1e-6, atol=1e-12)


@given(num_keys=st.integers(2, 60), mass=masses, seed=st.integers(0, 10**6), hidden=st.floats(0, 1))
@settings(max_examples=500)
@example(num_keys=2, mass=0.5, seed=0, hidden=1.0)
def test_rows_that_cannot_be_seen_are_left_out_and_count_nothing(
    num_keys: int, mass: float, seed: int, hidden: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, num_keys, generator=generator, dtype=torch.float64) * 5
    unseen = torch.rand(4, num_keys, generator=generator) < hidden
    unseen[:, -1] = False
    scores = scores.masked_fill(unseen, -torch.inf)
    keep = keep_likely(scores, scores, mass)
    assert not (keep & unseen).any()
    assert keep[:, -1].all()
    dropped = (scores.softmax(1) * ~keep).sum(1)
    assert (dropped <= mass + 1e-12).all()


def test_rows_are_dropped_as_long_as_the_mass_allows() -> None:
    """A choice that keeps too much would pass the other tests."""
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    assert keep_likely(scores, scores, 0.11).tolist() == [[False, True, True, True]]
    assert keep_likely(scores, scores, 0.31).tolist() == [[False, False, True, True]]
    assert keep_likely(scores, scores, 0.99).tolist() == [[False, False, False, True]]
    assert keep_likely(scores, scores, 0.09).all()


@given(kind=st.sampled_from(KINDS), num_keys=st.integers(1, 40), seed=st.integers(0, 10**6))
@settings(max_examples=500)
def test_low_bit_scores_are_off_by_no_more_than_they_say(kind: str, num_keys: int, seed: int) -> None:
    q, k, _ = make_rows(kind, num_keys, seed)
    near, error = LowBitKeys.of(k).scores(q.double(), HEAD_DIM**-0.5)
    true = group_scores(q.double()[None], k.double(), HEAD_DIM**-0.5)[:, 0]
    size = true.abs().max() + 1e-300
    assert ((near - true).abs() <= error + 1e-12 * size).all()


@given(kind=st.sampled_from(KINDS), num_keys=st.integers(1, 40), seed=st.integers(0, 10**6))
@settings(max_examples=300)
def test_value_box_holds_every_value(kind: str, num_keys: int, seed: int) -> None:
    q, _, v = make_rows(kind, num_keys, seed)
    cut = num_keys // 2
    box = ValueBox.of(v) if cut == 0 else ValueBox.of(v[:, :cut]).join(ValueBox.of(v[:, cut:]))
    distances = (v.double().repeat_interleave(GROUP_SIZE, 0) - q.double()[:, None]).norm(dim=2).amax(1)
    assert (distances <= box.farthest(q.double()) * (1 + 1e-12)).all()


def test_dropped_mass_of_nothing_is_nothing() -> None:
    nothing = torch.tensor([-torch.inf], dtype=torch.float64)
    assert dropped_mass(nothing, torch.tensor([3.0], dtype=torch.float64)).tolist() == [0.0]
    assert dropped_mass(nothing, nothing).tolist() == [0.0]


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_verification_raises_when_a_bound_is_broken(error: float) -> None:
    log = SelectionLog(torch.device("cpu"), verify_every=1)
    out = torch.zeros(2, 3, dtype=torch.float64)
    measure = RowMeasure(
        dropped_mass=torch.full((2,), 0.1, dtype=torch.float64), error_bound=torch.full((2,), 0.1, dtype=torch.float64)
    )
    log.add(torch.ones(1, 2, 4, dtype=torch.bool), measure)
    assert log.is_verified()
    log.verify(out, out + 0.05, measure, place="here")
    wrong = out.clone()
    wrong[1, 0] = error
    with pytest.raises(BoundError, match=r"here, head 1: the output differs .* the stated bound is 0\.1"):
        log.verify(out, wrong, measure, place="here")
    assert log.figures().num_verified == 4
