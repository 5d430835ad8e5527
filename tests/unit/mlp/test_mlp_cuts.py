"""`Cuts`: every row has one place, granules stay whole, and no more lies on the GPU than was said."""

from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.placement import WeightSplit
from ambidex.mlp.cuts import GRANULE, Cuts, SiteShape


@st.composite
def splits(draw: st.DrawFn) -> WeightSplit:
    first, second = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    return WeightSplit(on_gpu=first, on_cpu=second - first, streamed=1.0 - second)


@given(
    split=splits(), num_rows=st.integers(1, 400), chunk_bytes=st.integers(1, 40_000), num_out=st.sampled_from([0, 24])
)
def test_cuts_cover_every_row_once(split: WeightSplit, num_rows: int, chunk_bytes: int, num_out: int) -> None:
    shape = SiteShape(num_in=24, num_rows=num_rows, num_ins=2 if num_out else 1, num_out=num_out)
    cuts = Cuts.of(shape, split, chunk_bytes=chunk_bytes, number_bytes=2)
    parts = [cuts.on_gpu, *cuts.on_cpu, *cuts.streamed]
    assert [row for part in parts for row in part] == list(range(num_rows))
    assert len(cuts.on_gpu) <= split.on_gpu * num_rows + 1e-3
    assert all(part.start % GRANULE == 0 for part in parts if len(part))
    for chunk in cuts.on_cpu + cuts.streamed:
        assert 0 < shape.num_bytes(len(chunk), 2) <= max(chunk_bytes, shape.num_bytes(GRANULE, 2))
    streamed, on_cpu = (sum(map(len, chunks)) for chunks in (cuts.streamed, cuts.on_cpu))
    if split.streamed and split.on_cpu:
        wanted = (num_rows - len(cuts.on_gpu)) * split.on_cpu / (split.on_cpu + split.streamed)
        assert abs(on_cpu - wanted) <= GRANULE
    assert split.streamed or not streamed
    assert split.on_cpu or not on_cpu


def test_cuts_of_a_real_mlp_are_what_was_asked() -> None:
    shape = SiteShape(num_in=4096, num_rows=14336, num_ins=2, num_out=4096)
    cuts = Cuts.of(shape, WeightSplit(on_gpu=0.5, on_cpu=0.25, streamed=0.25), chunk_bytes=2**24, number_bytes=2)
    assert cuts.on_gpu == range(7168)
    assert [len(chunk) for chunk in cuts.on_cpu] == [608, 608, 608, 608, 608, 544]
    assert cuts.streamed[0] == range(10752, 11360)
    assert cuts.streamed[-1].stop == 14336


def test_chunks_of_quantised_rows_have_as_many_bytes_as_plain_ones() -> None:
    """Four-bit rows were cut by numbers: chunks of a quarter, with as many calls and copies again."""
    split, sizes = WeightSplit(on_gpu=0.0, on_cpu=1.0), []
    for kind in (None, "Q4_0"):
        shape = SiteShape(num_in=8192, num_rows=28672, num_ins=2, num_out=8192, kind=kind)
        cuts = Cuts.of(shape, split, chunk_bytes=2**26, number_bytes=2)
        sizes.append(max(shape.num_bytes(len(chunk), 2) for chunk in cuts.on_cpu))
    assert all(0.8 * 2**26 < size <= 2**26 for size in sizes)
