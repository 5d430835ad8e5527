"""The algebra of partial attention: merge is commutative, associative, has a neutral element, and splits are exact."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.attention.state import AttentionState, empty, merge
from ambidex.kernels import api
from truth import naive_attend

HEADS, HEAD_DIM = 3, 8
TOLERANCE = 1e-5
"""fp32: an lse up to 100 in size is rounded by 100 · 2⁻²⁴ = 6e-6, and exp makes that a relative error of a weight."""

lse_values = st.just(-torch.inf) | st.floats(-100, 100, width=32)


@st.composite
def states(draw: st.DrawFn) -> AttentionState:
    """Two tokens, three heads; some rows have seen no key."""
    lse = torch.tensor(draw(st.lists(lse_values, min_size=2 * HEADS, max_size=2 * HEADS))).view(2, HEADS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    out = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
    return AttentionState(out.masked_fill((lse == -torch.inf)[..., None], 0.0), lse)


def assert_equal(a: AttentionState, b: AttentionState) -> None:
    torch.testing.assert_close(a.out, b.out, rtol=TOLERANCE, atol=10 * TOLERANCE)
    torch.testing.assert_close(a.lse, b.lse, rtol=TOLERANCE, atol=TOLERANCE)


@given(a=states(), b=states())
@settings(deadline=None)
def test_merge_of_two_states_is_commutative(a: AttentionState, b: AttentionState) -> None:
    assert_equal(merge(a, b), merge(b, a))


@given(a=states(), b=states(), c=states())
@settings(deadline=None)
def test_merge_of_three_states_is_associative(a: AttentionState, b: AttentionState, c: AttentionState) -> None:
    assert_equal(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(a=states())
@settings(deadline=None)
def test_merge_with_the_empty_state_changes_nothing(a: AttentionState) -> None:
    nothing = empty(2, HEADS, HEAD_DIM, device=torch.device("cpu"))
    for merged in (merge(a, nothing), merge(nothing, a)):
        assert torch.equal(merged.out, a.out)
        assert torch.equal(merged.lse, a.lse)


@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_merge_over_random_parts_of_the_keys_equals_unsplit_attention(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    num_keys, num_parts = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    owners = torch.tensor(data.draw(st.lists(st.integers(0, num_parts - 1), min_size=num_keys, max_size=num_keys)))
    q, k, v = torch.randn(2, HEADS, HEAD_DIM), torch.randn(1, num_keys, HEAD_DIM), torch.randn(1, num_keys, HEAD_DIM)
    state = empty(2, HEADS, HEAD_DIM, device=torch.device("cpu"))
    for part in range(num_parts):
        keys = owners == part
        state = merge(state, AttentionState(*api.attend(q, k[:, keys], v[:, keys], scale=1.0)))
    out, lse = naive_attend(q.double(), k.double(), v.double(), 1.0, torch.ones(2, num_keys, dtype=torch.bool))
    assert_equal(state, AttentionState(out.float(), lse.float()))
