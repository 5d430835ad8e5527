"""`SafetensorsFile`: a bounded reader of one safetensors file, and the index over several.

    header length u64 | header JSON {name: {dtype, shape, data_offsets}, …} | data, without holes

Source: https://github.com/huggingface/safetensors#format
"""

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.core.units import format_size
from ambidex.formats.json_file import parse_json_object, read_json_object, show
from ambidex.formats.mapped_file import MappedFile
from ambidex.formats.tensor_info import TensorInfo

MAX_HEADER_BYTES: Final = 16_777_216  # 130,000 tensors; as Python objects a header takes up to 25 times its bytes
_SHARD_NAME: Final = re.compile(r"\w[\w. ()+-]*\.safetensors")  # no folder, nothing hidden
_METADATA_KEY: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_MAX_DIMS: Final = 8  # no tensor of a language model has more; keeps the product of sizes small
_DTYPE_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class SafetensorsFile:
    """Tensors of one safetensors file; `tensors` is in the order of the data.

    Raises:
        ModelFileError: the file is not safetensors, is truncated or corrupt; names the file and the fault.
        UnsupportedModelError: a tensor has a dtype that is not known.
    """

    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        header_bytes = _read_header_length(path, self._file)
        data_start = _LENGTH_BYTES + header_bytes
        header = parse_json_object(bytes(self._file.view[_LENGTH_BYTES:data_start]), where=f"{path}: the header")
        header.pop(_METADATA_KEY, None)
        infos = [_read_info(path, name, entry) for name, entry in header.items()]
        self.tensors = _place_tensors(path, infos, data_start, len(self._file))

    def read(self, name: str) -> memoryview:
        """The bytes of a tensor as they lie in the file."""
        info = self.tensors[name]
        return self._file.view[info.offset : info.offset + info.num_bytes]

    def release(self, name: str) -> None:
        """Drop a tensor's bytes from this process's memory."""
        info = self.tensors[name]
        self._file.release(info.offset, info.num_bytes)


def read_index(path: Path) -> dict[str, str]:
    """`model.safetensors.index.json`: name of a tensor → name of the file beside it that holds the tensor.

    Raises:
        ModelFileError: it is no such index, or names a file outside its folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: weight_map is {show(weight_map)}: it must map tensors to files")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelFileError(
                f"{path} names the file {show(shard)}: it must be a .safetensors file beside the index"
            )
    return weight_map


def _error(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path}: {what}: the file is truncated or corrupt, download it again")


def _read_header_length(path: Path, file: MappedFile) -> int:
    if len(file) < _LENGTH_BYTES:
        raise _error(path, f"{len(file)} bytes are too few for a safetensors file")
    num_bytes: int = struct.unpack_from("<Q", file.view)[0]
    limit = min(MAX_HEADER_BYTES, len(file) - _LENGTH_BYTES)
    if num_bytes > limit:
        raise _error(
            path, f"the header is said to take {num_bytes} bytes, at most {limit} are possible (not safetensors?)"
        )
    return num_bytes


def _read_info(path: Path, name: str, entry: object) -> TensorInfo:
    """One entry of the header; its offset is still the one within the data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _error(path, f"tensor {show(name)} is described by {show(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _error(path, f"tensor {show(name)} has the dtype {show(dtype)}")
    if dtype not in _DTYPE_BYTES:
        raise UnsupportedModelError(
            f"{path}: tensor {show(name)} has the dtype {show(dtype)}: known are {', '.join(_DTYPE_BYTES)}"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise _error(path, f"tensor {show(name)} has the shape {show(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"tensor {show(name)} has the data_offsets {show(offsets)}")
    num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if num_bytes != offsets[1] - offsets[0]:
        raise _error(
            path, f"tensor {show(name)} takes {num_bytes} bytes by its shape, {offsets[1] - offsets[0]} by its offsets"
        )
    return TensorInfo(name, dtype, tuple(shape), offsets[0], num_bytes)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _place_tensors(path: Path, infos: list[TensorInfo], data_start: int, file_size: int) -> dict[str, TensorInfo]:
    """Offsets within the data → offsets within the file, after checking that the tensors fill it side by side."""
    tensors: dict[str, TensorInfo] = {}
    end = data_start
    for info in sorted(infos, key=lambda info: (info.offset, info.num_bytes)):
        start = data_start + info.offset
        if start != end:
            raise _error(path, f"tensor {show(info.name)} begins at byte {start}, the one before it ends at {end}")
        end += info.num_bytes
        tensors[info.name] = TensorInfo(info.name, info.dtype, info.shape, start, info.num_bytes)
    if end != file_size:
        raise _error(path, f"the tensors end at byte {end}, the file at {file_size} ({format_size(file_size)})")
    return tensors
