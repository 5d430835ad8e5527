"""Blocks of KV as files: one file holds one block, whose tokens it names, and is either whole or not used.

    magic, 8 bytes | length of the head, u32 | head, msgpack | K, V, scales as they lie in the pool | digest, 32 bytes

The digest is BLAKE2b over all before it. Nothing in a file can name code. A file appears under its name when it is
whole (written beside it and renamed), so a process that is killed leaves none that is cut.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ambidex.core.errors import ConfigError, IntegrityError
from ambidex.core.kv_spec import KVSpec

MAGIC: Final = b"AmbiKV1\n"
"""Another layout of files gets another number."""
DIGEST_BYTES: Final = 32
MAX_HEAD_BYTES: Final = 1 << 20
"""A head holds the tokens of one block: at most 1024 of 8 bytes, and some hundred bytes more."""
TEMPORARY: Final = ".part"
_LENGTH: Final = struct.Struct("<I")


class BlockHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of its block.

    `identity` names all that K and V depend on beside the tokens; `key`, `parent` and `tokens` are those of the block's
    name, `owner` names whose it is. `spec` says how the numbers stand.
    """

    identity: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    block_idx: int
    owner: bytes
    spec: KVSpec


_head_decoder: Final = msgspec.msgpack.Decoder(BlockHead)


def write_block_file(path: Path, head: BlockHead, parts: Sequence[bytes | memoryview]) -> int:
    """Write a block; returns the bytes of the file, which only this user may read.

    Args:
        parts: K, V and scales of all layers, one after the other.
    Raises:
        OSError: the disk is full, the folder is gone; then there is no file of that name.
    """
    encoded = msgspec.msgpack.encode(head)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_bytes = 0
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            for part in (MAGIC, _LENGTH.pack(len(encoded)), encoded, *parts):
                digest.update(part)
                num_bytes += file.write(part)
            num_bytes += file.write(digest.digest())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return num_bytes


def read_block_head(path: Path) -> BlockHead:
    """What a file says of its block, unchecked but for its form.

    Raises:
        IntegrityError: it is no such file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC) + _LENGTH.size)
        return _read_head(path, start, file.read(_head_size(path, start)))


def read_block_file(path: Path) -> tuple[BlockHead, memoryview]:
    """A block's head, and K, V and scales of all layers one after the other.

    Raises:
        IntegrityError: the file is not what was written.
        OSError: it cannot be read.
    Cost: reads the file, and hashes it.
    """
    data = memoryview(path.read_bytes())
    begin = len(MAGIC) + _LENGTH.size
    start = bytes(data[:begin])
    end = begin + _head_size(path, start)
    head = _read_head(path, start, bytes(data[begin:end]))
    payload = data[end:-DIGEST_BYTES] if len(data) >= end + DIGEST_BYTES else data[:0]
    if len(payload) != head.spec.bytes_per_block:
        raise IntegrityError(
            f"{path.name} holds {len(payload)} bytes of K and V, its block has {head.spec.bytes_per_block}: it is cut "
            f"or was written by something else"
        )
    if hashlib.blake2b(data[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest() != data[-DIGEST_BYTES:]:
        raise IntegrityError(f"{path.name} has changed since it was written: its digest does not fit")
    return head, payload


def _head_size(path: Path, start: bytes) -> int:
    if len(start) < len(MAGIC) + _LENGTH.size or start[: len(MAGIC)] != MAGIC:
        raise IntegrityError(f"{path.name} does not begin as a block of KV does")
    size = int(_LENGTH.unpack(start[len(MAGIC) :])[0])
    if size > MAX_HEAD_BYTES:
        raise IntegrityError(f"{path.name} announces a head of {size} bytes: at most {MAX_HEAD_BYTES} are read")
    return size


def _read_head(path: Path, start: bytes, encoded: bytes) -> BlockHead:
    if len(encoded) < _head_size(path, start):
        raise IntegrityError(f"{path.name} ends within its head")
    try:
        return _head_decoder.decode(encoded)
    except (msgspec.MsgspecError, ValueError, ConfigError) as error:
        raise IntegrityError(f"the head of {path.name} cannot be read: {error}") from error
