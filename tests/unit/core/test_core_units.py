import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.units import GIB, KIB, MIB, TIB, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("2k", 2 * KIB),
        ("2KB", 2000),
        ("2KiB", 2 * KIB),
        ("512M", 512 * MIB),
        (" 8 GiB ", 8 * GIB),
        ("1.5gb", 1_500_000_000),
        ("1T", TIB),
    ],
)
def test_parse_size_of_number_with_unit_gives_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.G", "1 XB", "1GiB2", "1,5G", "nan"])
def test_parse_size_of_other_text_raises(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 8GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (GIB, "1.0 GiB"),
        (2 * TIB, "2.0 TiB"),
    ],
)
def test_format_size_uses_the_largest_binary_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [0, 512, KIB, 5 * MIB, 8 * GIB, 3 * TIB])
def test_parse_size_reads_what_format_size_writes(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes
