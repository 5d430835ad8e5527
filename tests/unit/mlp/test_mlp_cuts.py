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
    split=splits(), num_rows=st.integers(1, 400), chunk_size=st.integers(1, 20_000), num_out=st.sampled_from([0, 24])
)
def test_cuts_cover_every_row_once(split: WeightSplit, num_rows: int, chunk_size: int, num_out: int) -> None:
    shape = SiteShape(num_in=24, num_rows=num_rows, num_ins=2 if num_out else 1, num_out=num_out)
    cuts = Cuts.of(shape, split, chunk_size=chunk_size)
    parts = [cuts.on_gpu, *cuts.on_cpu, *cuts.streamed]
    assert [row for part in parts for row in part] == list(range(num_rows))
    assert len(cuts.on_gpu) <= split.on_gpu * num_rows + 1e-3
    assert all(part.start % GRANULE == 0 for part in parts if len(part))
    for chunk in cuts.on_cpu + cuts.streamed:
        assert 0 < len(chunk) * shape.numbers_per_row <= max(chunk_size, GRANULE * shape.numbers_per_row)
    streamed, on_cpu = (sum(map(len, chunks)) for chunks in (cuts.streamed, cuts.on_cpu))
    if split.streamed and split.on_cpu:
        wanted = (num_rows - len(cuts.on_gpu)) * split.on_cpu / (split.on_cpu + split.streamed)
        assert abs(on_cpu - wanted) <= GRANULE
    assert split.streamed or not streamed
    assert split.on_cpu or not on_cpu


def test_cuts_of_a_real_mlp_are_what_was_asked() -> None:
    shape = SiteShape(num_in=4096, num_rows=14336, num_ins=2, num_out=4096)
    cuts = Cuts.of(shape, WeightSplit(on_gpu=0.5, on_cpu=0.25, streamed=0.25), chunk_size=8 * 2**20)
    assert cuts.on_gpu == range(7168)
    assert [len(chunk) for chunk in cuts.on_cpu] == [608, 608, 608, 608, 608, 544]
    assert cuts.streamed[0] == range(10752, 11360)
    assert cuts.streamed[-1].stop == 14336
