import pytest

from ambidex.core.regions import Region, Regions

LETTER = {Region.SINK: "s", Region.MIDDLE: "m", Region.RECENT: "r"}


def cut(context_len: int, *, sink: int, recent: int | None, block_size: int = 4) -> str:
    """One letter a block: s(ink), m(iddle), r(ecent)."""
    regions = Regions(block_size=block_size, num_sink_tokens=sink, recent_window=recent)
    num_blocks = -(-context_len // block_size)
    text = "".join(LETTER[regions.region_of(block_idx, context_len)] for block_idx in range(num_blocks))
    assert text.count("s") == regions.num_sink_blocks(context_len)
    assert text.count("r") == regions.num_recent_blocks(context_len)
    return text


@pytest.mark.parametrize(
    ("context_len", "text"), [(1, "s"), (4, "s"), (5, "sr"), (12, "srr"), (16, "smrr"), (17, "smrrr"), (18, "smmrr")]
)
def test_regions_with_window_cut_sink_middle_and_recent(context_len: int, text: str) -> None:
    assert cut(context_len, sink=4, recent=6) == text


def test_regions_round_the_sink_up_to_blocks() -> None:
    assert cut(24, sink=5, recent=1) == "ssmmmr"


def test_regions_without_window_have_no_middle() -> None:
    assert cut(24, sink=4, recent=None) == "srrrrr"


def test_regions_without_sink_start_with_the_middle() -> None:
    assert cut(16, sink=0, recent=1) == "mmmr"


def test_regions_with_window_of_zero_keep_the_newest_block_recent() -> None:
    assert cut(13, sink=0, recent=0) == "mmmr"


def test_regions_inside_the_sink_are_all_sink() -> None:
    assert cut(10, sink=64, recent=4) == "sss"


def test_regions_of_empty_context_have_no_blocks() -> None:
    assert cut(0, sink=4, recent=4) == ""


def test_regions_with_blocks_of_one_token_cut_at_tokens() -> None:
    assert cut(8, sink=2, recent=3, block_size=1) == "ssmmmrrr"
