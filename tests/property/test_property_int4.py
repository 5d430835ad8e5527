"""An int4 row is never further from what it was than its definition says, whatever the row."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ambidex.kernels.reference import int4
from ambidex.kernels.reference.quantize import quantize_rows

KINDS = ("normal", "outliers", "one number", "shifted", "tiny", "huge", "zeros", "extremes")


def make_row(kind: str, head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(head_dim, generator=generator)
    match kind:
        case "outliers":
            row[torch.randint(head_dim, (3,), generator=generator)] *= 1e3
        case "one number":
            row = torch.full((head_dim,), float(row[0]))
        case "shifted":
            row += 20.0
        case "tiny":
            row *= 1e-30
        case "huge":
            row *= 1e30
        case "zeros":
            row *= 0.0
        case "extremes":
            row = row.sign()
    return row


@given(kind=st.sampled_from(KINDS), head_dim=st.integers(1, 160), seed=st.integers(0, 10**6))
def test_error_is_at_most_half_a_step_of_the_group_and_half_a_scale(kind: str, head_dim: int, seed: int) -> None:
    row = make_row(kind, head_dim, seed)
    packed, words = int4.pack_rows(row[None])
    found = int4.unpack_rows(packed, words, head_dim)[0]
    steps = words[:, 1:].contiguous().view(torch.uint8).view(-1, 2)[:, 0].repeat_interleave(16)[:head_dim]
    scale = words[0, 0].double()
    allowed = scale * (steps.double() + 1) / 2 * (1 + 1e-5)
    assert ((found.double() - row.double()).abs() <= allowed).all()
    # The step is the least whole one with which 16 numbers reach from the least to the largest of the group.
    whole = quantize_rows(row[None])[0][0].int()
    for group, part in enumerate(whole.split(16)):
        numbers = torch.cat((part, part.new_zeros(min(16 - len(part), 1))))
        span = int(numbers.max() - numbers.min())
        assert int(steps[16 * group]) == max(1, -(-span // 15))


@given(kind=st.sampled_from(KINDS), head_dim=st.integers(1, 160), seed=st.integers(0, 10**6))
def test_unpacked_numbers_are_those_of_an_int8_row(kind: str, head_dim: int, seed: int) -> None:
    packed, words = int4.pack_rows(make_row(kind, head_dim, seed)[None])
    whole = int4.unpack_whole(packed, words)
    assert whole.dtype == torch.int8
    assert torch.equal(int4.unpack_rows(packed, words, head_dim), whole[:, :head_dim] * words[:, :1])
