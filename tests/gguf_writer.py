"""Writes small GGUF files, right or wrong, byte by byte."""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

ALIGNMENT = 32

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", U64: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Raw:
    """A metadata value whose type and bytes are written as they are."""

    value_type: int
    payload: bytes


@dataclass(frozen=True)
class Tensor:
    """One tensor as it is written; `dims` are in GGUF's order, the fastest axis first."""

    dims: tuple[int, ...]
    type_id: int
    payload: bytes
    offset: int | None = None


def quantize(values: NDArray[np.float32], type_name: str = "F32") -> Tensor:
    """A tensor of one of GGUF's types."""
    kind = GGMLQuantizationType[type_name]
    return Tensor(values.shape[::-1], int(kind), quants.quantize(values, kind).tobytes())


def make_random_tensor(shape: tuple[int, ...], type_name: str, seed: int) -> Tensor:
    """Random bytes of a type that `gguf` cannot quantise to; scales are finite."""
    kind = GGMLQuantizationType[type_name]
    byte_shape = quants.quant_shape_to_byte_shape(shape, kind)
    payload = np.random.default_rng(seed).integers(0, 0x3C, byte_shape, dtype=np.uint8)
    return Tensor(shape[::-1], int(kind), payload.tobytes())


def make_gguf(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]],
    tensors: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]] = (),
    *,
    version: int = 3,
    alignment: int = ALIGNMENT,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A whole file. Pairs instead of a mapping allow names that are there twice; counts may lie."""
    keys = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(items) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head += b"".join(pack_string(key) + pack_value(value) for key, value in keys)
    data = b""
    for name, tensor in items:
        offset = len(data) if tensor.offset is None else tensor.offset
        head += pack_string(name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += struct.pack("<IQ", tensor.type_id, offset)
        data += _pad(tensor.payload, alignment)
    return _pad(head, alignment) + data


def pack_string(text: str | bytes) -> bytes:
    """Length and bytes."""
    payload = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(payload)) + payload


def pack_value(value: object) -> bytes:
    """Type and value; int becomes u32, float f32, arrays of numbers i32 or f32 (or what an `array` holds)."""
    match value:
        case Raw():
            return struct.pack("<I", value.value_type) + value.payload
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + pack_string(value)
        case array():
            return pack_array(next(key for key, letter in _NUMBERS.items() if letter == value.typecode), value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(pack_string(text) for text in value)
        case [float(), *_]:
            return pack_array(F32, value)
        case _:
            assert isinstance(value, Sequence), f"{value!r} cannot be written"
            return pack_array(I32, value)


def pack_array(item_type: int, values: Sequence[float]) -> bytes:
    """Type, item type, length and numbers."""
    numbers = struct.pack(f"<{len(values)}{_NUMBERS[item_type]}", *values)
    return struct.pack("<IIQ", ARRAY, item_type, len(values)) + numbers


def _pad(payload: bytes, alignment: int) -> bytes:
    return payload + bytes(-len(payload) % alignment)


def llama_metadata(**changes: object) -> dict[str, object]:
    """Metadata of a llama of 2 layers, 4 query and 2 KV heads of 8; `changes` overrides keys after `llama.`, with
    `__` for a dot, and None takes a key away."""
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.context_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for name, value in changes.items():
        metadata[f"llama.{name.replace('__', '.')}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def embedding(num_rows: int = 64, width: int = 32, type_name: str = "F32") -> Tensor:
    """A `token_embd.weight` of rising numbers."""
    values = np.arange(num_rows * width, dtype=np.float32).reshape(num_rows, width) / 100
    return quantize(values, type_name)
