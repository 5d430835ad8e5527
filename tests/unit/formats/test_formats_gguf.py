"""The GGUF parser: what it reads, and that it refuses every kind of damage by name."""

import struct
import tracemalloc
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.formats.gguf import SUPPORTED_TYPES, GGUFFile
from gguf_writer import ARRAY, BOOL, STRING, U32, Raw, Tensor, make_gguf, make_random_tensor, pack_string, quantize

ONES = quantize(np.ones((2, 32), np.float32))


def parse(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_parse_when_written_by_gguf_package_gives_same_metadata_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int64("a.i64", -5)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "ärger")
    writer.add_array("a.texts", ["", "Ġthe", "▁"])
    writer.add_array("a.numbers", [3, -1, 2])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("w", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.metadata == {
        "general.architecture": "llama", "a.u32": 2**32 - 1, "a.i64": -5, "a.f32": 0.5, "a.bool": True,
        "a.text": "ärger", "a.texts": ["", "Ġthe", "▁"], "a.numbers": array("i", [3, -1, 2]),
    }  # fmt: skip
    assert file.tensors["w"].shape == (3, 4)
    np.testing.assert_array_equal(file.dequantize("w"), values)


@pytest.mark.parametrize("version", [2, 3])
def test_parse_when_version_is_known_reads_it(tmp_path: Path, version: int) -> None:
    assert parse(tmp_path, make_gguf({"a": 1}, version=version)).metadata == {"a": 1}


@pytest.mark.parametrize("letter", list("BbHhIiQqfd"))
def test_parse_when_array_of_numbers_keeps_their_type(tmp_path: Path, letter: str) -> None:
    values = array(letter, [1, 2, 100])
    assert parse(tmp_path, make_gguf({"a": values})).metadata["a"] == values


def test_parse_when_array_of_arrays_gives_list(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2I", U32, 2, 7, 8)
    value = Raw(ARRAY, struct.pack("<IQ", ARRAY, 2) + inner + inner)
    assert parse(tmp_path, make_gguf({"a": value})).metadata["a"] == [array("I", [7, 8])] * 2


def test_parse_when_array_of_bools_gives_zeros_and_ones(tmp_path: Path) -> None:
    value = Raw(ARRAY, struct.pack("<IQ3B", BOOL, 3, 1, 0, 1))
    assert parse(tmp_path, make_gguf({"a": value})).metadata["a"] == array("B", [1, 0, 1])


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_parse_when_alignment_is_set_finds_data_there(tmp_path: Path, alignment: int) -> None:
    values = np.arange(5, dtype=np.float32)
    content = make_gguf(
        {"general.alignment": alignment}, {"a": quantize(values), "b": quantize(values + 1)}, alignment=alignment
    )
    file = parse(tmp_path, content)
    assert file.tensors["b"].offset % alignment == 0
    np.testing.assert_array_equal(file.dequantize("b"), values + 1)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_dequantize_when_type_is_supported_equals_gguf_package(tmp_path: Path, type_name: str) -> None:
    tensor = make_random_tensor((3, 512), type_name, seed=1)
    file = parse(tmp_path, make_gguf({}, {"w": tensor}))
    kind = gguf.GGMLQuantizationType[type_name]
    raw = np.frombuffer(tensor.payload, np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(file.dequantize("w"), gguf.quants.dequantize(raw, kind))
    assert file.tensors["w"].dtype == type_name


def test_dequantize_rows_when_order_is_given_reads_those_rows(tmp_path: Path) -> None:
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    file = parse(tmp_path, make_gguf({}, {"w": quantize(values)}))
    np.testing.assert_array_equal(file.dequantize_rows("w", np.array([3, 1])), values[[3, 1]])


def test_dequantize_when_called_gives_writable_copy(tmp_path: Path) -> None:
    file = parse(tmp_path, make_gguf({}, {"w": ONES}))
    file.dequantize("w")[:] = 7
    assert file.dequantize("w").max() == 1


def test_dequantize_when_scales_are_infinite_does_not_warn(tmp_path: Path) -> None:
    infinite_scale_and_zeros = b"\x00\x7c" + bytes(32)
    file = parse(tmp_path, make_gguf({}, {"w": Tensor((32,), 8, infinite_scale_and_zeros)}))
    assert np.isnan(file.dequantize("w")).all()


def test_read_when_called_gives_bytes_of_file(tmp_path: Path) -> None:
    assert bytes(parse(tmp_path, make_gguf({}, {"w": ONES})).read("w")) == ONES.payload


def test_release_when_called_leaves_tensor_readable(tmp_path: Path) -> None:
    file = parse(tmp_path, make_gguf({}, {"w": ONES}))
    file.release("w")
    assert bytes(file.read("w")) == ONES.payload


def count_bytes(tmp_path: Path, content: bytes) -> int:
    """Most memory that a parse holds, mapped pages not counted."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_parse_when_array_of_numbers_is_long_takes_about_its_bytes(tmp_path: Path) -> None:
    content = make_gguf({"a": array("h", range(-1000, 1000)) * 100})
    assert count_bytes(tmp_path, content) < 1.1 * len(content)


def test_parse_when_strings_are_short_takes_at_most_seven_times_their_bytes(tmp_path: Path) -> None:
    content = make_gguf({"a": [f"{number:02x}" for number in range(256)] * 50})
    assert count_bytes(tmp_path, content) < 7 * len(content)


def set_u64(content: bytes, position: int, value: int) -> bytes:
    return content[:position] + struct.pack("<Q", value) + content[position + 8 :]


NESTED = Raw(ARRAY, struct.pack("<IQ", ARRAY, 1) * 5 + struct.pack("<IQ", U32, 0))
HUGE = 2**63
NUM_TENSORS_AT, NUM_KEYS_AT = 8, 16

DAMAGED = {
    "empty": (b"", "is empty"),
    "other magic": (b"GGML" + bytes(20), "is not a GGUF file"),
    "shorter than its magic": (b"GG", "is not a GGUF file"),
    "cut in the counts": (make_gguf({})[:12], "takes 8 bytes, 4 are left"),
    "more tensors than bytes": (set_u64(make_gguf({}), NUM_TENSORS_AT, HUGE), f"{HUGE} tensors cannot lie in"),
    "more keys than bytes": (set_u64(make_gguf({}), NUM_KEYS_AT, HUGE), f"{HUGE} metadata keys cannot lie in"),
    "too many keys": (set_u64(make_gguf({}) + bytes(10**6), NUM_KEYS_AT, 70_000), "at most 65536"),
    "cut in a key": (make_gguf({}, num_keys=1, alignment=1) + struct.pack("<Q", 50) + bytes(20), "takes 50 bytes, 20"),
    "key twice": (make_gguf([("a", 1), ("a", 2)]), "'a' is there twice"),
    "empty key": (make_gguf({"": 1}), "key is empty"),
    "key not UTF-8": (make_gguf({"a": 1}).replace(pack_string("a"), pack_string(b"\xff")), "not valid UTF-8"),
    "string longer than file": (make_gguf({"a": Raw(STRING, struct.pack("<Q", HUGE))}), f"takes {HUGE} bytes"),
    "text not UTF-8": (make_gguf({"a": Raw(STRING, pack_string(b"\xc3"))}), "not valid UTF-8"),
    "token not UTF-8": (
        make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", STRING, 1) + pack_string(b"\xed\xa0\x80"))}),
        "not valid UTF-8",
    ),
    "array longer than file": (make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", U32, HUGE))}), "numbers of the value"),
    "too many strings": (
        make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", STRING, 5_000_000) + bytes(40_000_000))}),
        "at most 4194304",
    ),
    "strings longer than file": (make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", STRING, 2**40))}), "cannot lie in"),
    "strings cut off": (
        make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", STRING, 2) + pack_string("12345678") + bytes(3))}, alignment=1),
        "is cut off",
    ),
    "array too deep": (make_gguf({"a": NESTED}), "nested deeper than 4"),
    "unknown value type": (make_gguf({"a": Raw(13, bytes(8))}), "unknown type 13"),
    "array of unknown type": (make_gguf({"a": Raw(ARRAY, struct.pack("<IQ", 99, 0))}), "unknown type 99"),
    "bool of 2": (make_gguf({"a": Raw(BOOL, b"\2")}), "bool of value 2"),
    "alignment no power of two": (make_gguf({"general.alignment": 24}), "must be a power of two"),
    "alignment 0": (make_gguf({"general.alignment": 0}), "must be a power of two"),
    "alignment a bool": (make_gguf({"general.alignment": True}), "must be a power of two"),
    "no dimensions": (make_gguf({}, {"w": Tensor((), 0, bytes(4))}), "0 dimensions"),
    "five dimensions": (make_gguf({}, {"w": Tensor((1,) * 5, 0, bytes(4))}), "5 dimensions"),
    "dimension 0": (make_gguf({}, {"w": Tensor((4, 0), 0, b"")}), "above 0"),
    "product overflows": (make_gguf({}, {"w": Tensor((2**62, 4), 0, bytes(4))}), "below 2^63"),
    "row no multiple of a block": (make_gguf({}, {"w": Tensor((33,), 8, bytes(68))}), "no multiple of Q8_0's 32"),
    "data beyond the end": (make_gguf({}, {"w": Tensor((64,), 0, bytes(128))}), "beyond the end"),
    "offset beyond the end": (make_gguf({}, {"w": Tensor((1,), 0, bytes(4), offset=2**62)}), "beyond the end"),
    "offset unaligned": (make_gguf({}, {"w": Tensor((1,), 0, bytes(64), offset=4)}), "not a multiple of 32"),
    "tensors overlap": (make_gguf({}, [("a", ONES), ("b", Tensor((8,), 0, bytes(32), offset=32))]), "overlaps"),
    "tensor twice": (make_gguf({}, [("a", ONES), ("a", ONES)]), "'a' is there twice"),
    "tensor without name": (make_gguf({}, {"": ONES}), "has no name"),
}


@pytest.mark.parametrize(("content", "fault"), DAMAGED.values(), ids=DAMAGED)
def test_parse_when_damaged_names_file_and_fault(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        parse(tmp_path, content)
    assert fault in str(caught.value)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (make_gguf({}, version=1), "GGUF version 1"),
        (make_gguf({}, version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF (version 3)"),
        (make_gguf({}, {"w": make_random_tensor((1, 32), "Q5_0", seed=0)}), "the type Q5_0"),
        (make_gguf({}, {"w": Tensor((32,), 4, bytes(32))}), "the type number 4"),
    ],
)
def test_parse_when_not_supported_names_what(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(tmp_path, content)
    assert fault in str(caught.value)


def test_parse_when_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = make_gguf({"a": "text", "b": ["x", "yz"], "c": [1, 2]}, {"w": ONES})
    for length in range(len(content)):
        with pytest.raises(ModelFileError):
            parse(tmp_path, content[:length])


def test_parse_when_file_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")
