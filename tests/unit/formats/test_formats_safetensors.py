"""The safetensors reader and the index over several files."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.formats.safetensors import MAX_HEADER_BYTES, SafetensorsFile, read_index


def build(header: object, data: bytes = b"", *, num_header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if num_header_bytes is None else num_header_bytes) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(tmp_path: Path, content: bytes) -> SafetensorsFile:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return SafetensorsFile(path)


def test_parse_when_written_by_safetensors_package_gives_same_tensors(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.arange(5, dtype=np.float32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert {name: (info.dtype, info.shape) for name, info in file.tensors.items()} == {
        "a": ("F32", (5,)), "b": ("F16", (2, 3)),
    }  # fmt: skip
    assert bytes(file.read("a")) == tensors["a"].tobytes()
    assert bytes(file.read("b")) == tensors["b"].tobytes()


def test_parse_when_tensor_has_no_elements_keeps_it(tmp_path: Path) -> None:
    file = parse(tmp_path, build({"b": entry(), "a": entry(shape=[0], offsets=[0, 0])}, bytes(8)))
    assert file.tensors["a"].num_bytes == 0


def test_tensors_when_header_is_unordered_are_in_order_of_data(tmp_path: Path) -> None:
    file = parse(tmp_path, build({"a": entry(offsets=[8, 16]), "b": entry()}, bytes(16)))
    assert list(file.tensors) == ["b", "a"]


def test_release_when_called_leaves_tensor_readable(tmp_path: Path) -> None:
    file = parse(tmp_path, build({"a": entry()}, b"12345678"))
    file.release("a")
    assert bytes(file.read("a")) == b"12345678"


DAMAGED = {
    "empty": (b"", "is empty"),
    "shorter than a length": (b"1234567", "7 bytes are too few"),
    "header longer than file": (build({}, num_header_bytes=2**63), f"take {2**63} bytes, at most 2 are possible"),
    "header not JSON": (build(b"{]"), "not valid JSON"),
    "header not UTF-8": (build(b'{"\xff": 1}'), "not valid JSON"),
    "header no object": (build([1]), "must be a JSON object"),
    "header too deep": (build(b"[" * 100_000), "not valid JSON"),
    "number of 5000 digits": (build(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "tensor twice": (build(b'{"a": 1, "a": 2}'), "'a' is there twice"),
    "entry no object": (build({"a": 1}), "is described by 1"),
    "entry without shape": (build({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "is described by"),
    "entry with more": (build({"a": {**entry(), "x": 1}}, bytes(8)), "is described by"),
    "dtype a number": (build({"a": entry(dtype=4)}, bytes(8)), "has the dtype 4"),
    "dtype a list": (build({"a": entry(dtype=[])}, bytes(8)), "has the dtype []"),
    "shape a string": (build({"a": entry(shape="2")}, bytes(8)), "has the shape '2'"),
    "shape negative": (build({"a": entry(shape=[-2])}, bytes(8)), "has the shape [-2]"),
    "shape of floats": (build({"a": entry(shape=[2.0])}, bytes(8)), "has the shape [2.0]"),
    "shape of bools": (build({"a": entry(shape=[True])}, bytes(8)), "has the shape [True]"),
    "shape of 9 axes": (build({"a": entry(shape=[1] * 9)}, bytes(8)), "has the shape"),
    "size beyond 63 bits": (build({"a": entry(shape=[2**63])}, bytes(8)), "has the shape"),
    "product larger than bytes": (build({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "by its shape"),
    "offsets not two": (build({"a": entry(offsets=[0])}, bytes(8)), "has the data_offsets [0]"),
    "offsets backwards": (build({"a": entry(offsets=[8, 0])}, bytes(8)), "has the data_offsets [8, 0]"),
    "shape and offsets differ": (build({"a": entry(offsets=[0, 4])}, bytes(4)), "8 bytes by its shape, 4"),
    "overlap": (build({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "begins at byte"),
    "hole": (build({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "begins at byte"),
    "does not begin at 0": (build({"a": entry(offsets=[4, 12])}, bytes(12)), "begins at byte"),
    "data too short": (build({"a": entry()}, bytes(7)), "the tensors end at byte"),
    "data too long": (build({"a": entry()}, bytes(9)), "the tensors end at byte"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "fault"), DAMAGED.values(), ids=DAMAGED)
def test_parse_when_damaged_names_file_and_fault(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        parse(tmp_path, content)
    assert fault in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_parse_when_header_is_above_the_formats_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse
    with pytest.raises(ModelFileError, match=f"at most {MAX_HEADER_BYTES} are possible"):
        SafetensorsFile(path)


def test_parse_when_dtype_is_unknown_names_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'F4'"):
        parse(tmp_path, build({"a": entry(dtype="F4")}, bytes(8)))


def write_index(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    return path


def test_read_index_when_right_gives_file_of_each_tensor(tmp_path: Path) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    path = write_index(tmp_path, {"metadata": {"total_size": 8}, "weight_map": weight_map})
    assert read_index(path) == weight_map


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "a\\b.safetensors", "model.bin", "",
     ".safetensors", "a\0.safetensors", 3, None],
)  # fmt: skip
def test_read_index_when_shard_is_not_beside_it_is_refused(tmp_path: Path, shard: object) -> None:
    with pytest.raises(ModelFileError, match="beside the index"):
        read_index(write_index(tmp_path, {"weight_map": {"a": shard}}))


@pytest.mark.parametrize("weight_map", [None, {}, [], "a.safetensors"])
def test_read_index_when_it_maps_nothing_is_refused(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(ModelFileError, match="must map tensors to files"):
        read_index(write_index(tmp_path, {"weight_map": weight_map}))
