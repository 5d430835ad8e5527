"""`GGUFFile`: a bounded parser of GGUF files, versions 2 and 3, little endian.

    "GGUF" | version u32 | tensors u64 | keys u64 | key, type, value … | name, dims, type, offset … | padding | data

Every count and length is compared with the bytes that the file still has before anything is allocated for it. Arrays of
numbers become `array.array`s and take about the bytes that they take in the file; strings become Python strings, of
which a short one takes up to seven times its bytes.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from array import array
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.formats.json_file import show
from ambidex.formats.mapped_file import MappedFile
from ambidex.formats.tensor_info import TensorInfo

SUPPORTED_TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
"""Tensor types that can be turned into fp32."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4  # ggml's limit
_MAX_NESTING: Final = 4  # arrays within arrays; no known writer uses more than one
_MAX_ENTRIES: Final = 65_536  # of tensors or keys, whose Python objects outweigh the file; the largest files have 2,000
_MAX_STRINGS: Final = 4_194_304  # in all: 50 bytes of Python object each; the largest vocabularies have 260,000 tokens
_DEFAULT_ALIGNMENT: Final = 32
_MIN_KEY_BYTES: Final = 8 + 4 + 1  # length of an empty name, type, a one-byte value
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8  # length of an empty name, number of dims, type, offset
_MIN_STRING_BYTES: Final = 8
_MIN_ARRAY_BYTES: Final = 4 + 8


class _ValueType(IntEnum):
    BOOL = 7
    STRING = 8
    ARRAY = 9


_NUMBERS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""GGUF's number types as letters of `struct` and `array`."""


class GGUFFile:
    """Metadata and tensors of one GGUF file; `tensors` is in the order of the data.

    `metadata` values are int, float, bool, str, `list[str]`, `array.array` of numbers (bools as 0 and 1), or lists of
    those for arrays of arrays.

    Raises:
        ModelFileError: the file is not GGUF, is truncated or corrupt; names the file, the fault and the byte.
        UnsupportedModelError: it is GGUF of another version or byte order, or holds a tensor type that is not known.
    """

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        cursor = _Cursor(path, self._file.view)
        num_tensors, num_keys = _read_counts(cursor)
        self.metadata = _read_metadata(cursor, num_keys)
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        self.tensors = _place_tensors(cursor, infos, _alignment(cursor, self.metadata))

    def read(self, name: str) -> memoryview:
        """The bytes of a tensor as they lie in the file."""
        info = self.tensors[name]
        return self._file.view[info.offset : info.offset + info.num_bytes]

    def release(self, name: str) -> None:
        """Drop a tensor's bytes from this process's memory."""
        info = self.tensors[name]
        self._file.release(info.offset, info.num_bytes)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """A tensor as fp32, in a new array."""
        info = self.tensors[name]
        return self.dequantize_rows(name, slice(None)).reshape(info.shape)

    def raw_rows(self, name: str, rows: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Some rows (all axes but the last are rows) of a tensor as they lie in the file, [rows, bytes of a row]: a
        view for a slice, else a new array."""
        num_rows = math.prod(self.tensors[name].shape[:-1])
        return np.frombuffer(self.read(name), np.uint8).reshape(num_rows, -1)[rows]

    def dequantize_rows(self, name: str, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows (all axes but the last are rows) of a tensor as fp32, in a new array [rows, last axis]."""
        kind = GGMLQuantizationType[self.tensors[name].dtype]
        with np.errstate(all="ignore"):  # damaged scales give infinities, which are found where logits are
            values: NDArray[np.float32] = quants.dequantize(self.raw_rows(name, rows), kind)
        return values if values.flags.writeable else values.copy()


class _Cursor:
    """Reads values one after the other and never beyond the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.position, self.num_strings = path, data, 0, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def error(self, what: str, *, at: int | None = None) -> ModelFileError:
        place = self.position if at is None else at
        return ModelFileError(
            f"{self.path}: {what} (at byte {place} of {len(self.data)}): the file is truncated or corrupt, "
            "download it again"
        )

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.left:
            raise self.error(f"{what} takes {num_bytes} bytes, {self.left} are left")
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def number(self, letter: str, what: str) -> int | float:
        layout = "<" + letter
        value: int | float = struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]
        return value

    def integer(self, letter: str, what: str) -> int:
        return int(self.number(letter, what))

    def count(self, what: str, *, min_bytes: int) -> int:
        """A u64 count of things that take at least `min_bytes` bytes each."""
        start = self.position
        count = self.integer("Q", f"number of {what}")
        if count > self.left // min_bytes:
            raise self.error(f"{count} {what} cannot lie in the {self.left} bytes that are left", at=start)
        return count

    def count_entries(self, what: str, *, min_bytes: int) -> int:
        """The same for what becomes a Python object each."""
        start = self.position
        count = self.count(what, min_bytes=min_bytes)
        if count > _MAX_ENTRIES:
            raise self.error(f"{count} {what}: at most {_MAX_ENTRIES} are read", at=start)
        return count

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Strings in a row; a vocabulary has 10^5 of them, so this loop is spelt out."""
        self.num_strings += count
        if self.num_strings > _MAX_STRINGS:
            raise self.error(f"{self.num_strings} strings with {what}: at most {_MAX_STRINGS} are read")
        data, end, position = self.data, len(self.data), self.position
        unpack_length = struct.Struct("<Q").unpack_from
        values = []
        for _ in range(count):
            if position + 8 > end:
                raise self.error(f"{what} is cut off", at=position)
            start = position + 8
            position = start + unpack_length(data, position)[0]
            if position > end:
                raise self.error(f"{what} takes {position - start} bytes, {end - start} are left", at=start - 8)
            try:
                values.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.error(f"{what} is not valid UTF-8", at=start) from error
        self.position = position
        return values


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version → numbers of tensors and of metadata keys."""
    if cursor.left < len(_MAGIC) or bytes(cursor.take(len(_MAGIC), "the magic")) != _MAGIC:
        raise ModelFileError(f"{cursor.path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    version = cursor.integer("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"big-endian GGUF (version {swapped})" if swapped in (1, *_VERSIONS) else f"GGUF version {version}"
        raise UnsupportedModelError(
            f"{cursor.path} is {found}: little-endian versions 2 and 3 are supported, convert the model again"
        )
    num_tensors = cursor.count_entries("tensors", min_bytes=_MIN_TENSOR_BYTES)
    return num_tensors, cursor.count_entries("metadata keys", min_bytes=_MIN_KEY_BYTES)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        start = cursor.position
        key = cursor.string("a metadata key")
        if not key or key in metadata:
            raise cursor.error(
                f"metadata key {show(key)} is there twice" if key else "a metadata key is empty", at=start
            )
        metadata[key] = _read_value(
            cursor, cursor.integer("I", f"the type of {show(key)}"), f"the value of {show(key)}"
        )
    return metadata


def _read_value(cursor: _Cursor, value_type: int, what: str, *, nesting: int = 0) -> object:
    if value_type in _NUMBERS:
        return cursor.number(_NUMBERS[value_type], what)
    match value_type:
        case _ValueType.BOOL:
            return bool(_read_bools(cursor, 1, what)[0])
        case _ValueType.STRING:
            return cursor.string(what)
        case _ValueType.ARRAY:
            return _read_array(cursor, what, nesting=nesting + 1)
        case _:
            raise cursor.error(f"{what} has the unknown type {value_type}", at=cursor.position - 4)


def _read_array(cursor: _Cursor, what: str, *, nesting: int) -> object:
    if nesting > _MAX_NESTING:
        raise cursor.error(f"{what} is an array nested deeper than {_MAX_NESTING}")
    item_type = cursor.integer("I", f"the type of {what}")
    if item_type in _NUMBERS:
        values = array(_NUMBERS[item_type])
        count = cursor.count(f"numbers of {what}", min_bytes=values.itemsize)
        values.frombytes(cursor.take(count * values.itemsize, what))
        return values
    match item_type:
        case _ValueType.BOOL:
            return _read_bools(cursor, cursor.count(f"bools of {what}", min_bytes=1), what)
        case _ValueType.STRING:
            return cursor.strings(cursor.count(f"strings of {what}", min_bytes=_MIN_STRING_BYTES), what)
        case _ValueType.ARRAY:
            count = cursor.count(f"arrays of {what}", min_bytes=_MIN_ARRAY_BYTES)
            return [_read_array(cursor, what, nesting=nesting + 1) for _ in range(count)]
        case _:
            raise cursor.error(f"{what} is an array of the unknown type {item_type}", at=cursor.position - 4)


def _read_bools(cursor: _Cursor, count: int, what: str) -> "array[int]":
    start = cursor.position
    values = array("B", cursor.take(count, what))
    if count and max(values) > 1:
        raise cursor.error(f"{what} is a bool of value {max(values)}: it must be 0 or 1", at=start)
    return values


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    """One entry of the table; its offset is still the one within the data."""
    name = cursor.string("a tensor name")
    start = cursor.position
    num_dims = cursor.integer("I", f"the number of dimensions of {show(name)}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"tensor {show(name)} has {num_dims} dimensions: 1 to {_MAX_DIMS} are possible", at=start)
    dims = tuple(cursor.integer("Q", f"a dimension of {show(name)}") for _ in range(num_dims))
    dtype = _name_type(cursor, name, cursor.integer("I", f"the type of {show(name)}"))
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    num_elements = math.prod(dims)
    if not 0 < num_elements < 2**63:
        raise cursor.error(
            f"tensor {show(name)} has the dimensions {dims}: their product must be above 0 and below 2^63", at=start
        )
    if dims[0] % block_len:
        raise cursor.error(f"tensor {show(name)} has rows of {dims[0]}, no multiple of {dtype}'s {block_len}", at=start)
    offset = cursor.integer("Q", f"the offset of {show(name)}")
    return TensorInfo(name, dtype, dims[::-1], offset, num_elements // block_len * block_bytes)


def _name_type(cursor: _Cursor, tensor_name: str, type_id: int) -> str:
    try:
        type_name = GGMLQuantizationType(type_id).name
    except ValueError:
        type_name = f"number {type_id}"
    if type_name not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {show(tensor_name)} has the type {type_name}: "
            f"supported are {', '.join(SUPPORTED_TYPES)}"
        )
    return type_name


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {show(alignment)}: it must be a power of two")
    return alignment


def _place_tensors(cursor: _Cursor, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Offsets within the data → offsets within the file, after checking that the tensors lie side by side in it."""
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    free_from = data_start
    for info in sorted(infos, key=lambda info: info.offset):
        start, name = data_start + info.offset, info.name
        if not name or name in tensors:
            raise cursor.error(f"tensor {show(name)} is there twice" if name else "a tensor has no name")
        if info.offset % alignment:
            raise cursor.error(f"the offset {info.offset} of tensor {show(name)} is not a multiple of {alignment}")
        if start < free_from:
            raise cursor.error(f"tensor {show(name)} overlaps with another", at=start)
        free_from = start + info.num_bytes
        if free_from > len(cursor.data):
            raise cursor.error(f"tensor {show(name)} ends at byte {free_from}, beyond the end of the file", at=start)
        tensors[name] = TensorInfo(name, info.dtype, info.shape, start, info.num_bytes)
    return tensors
