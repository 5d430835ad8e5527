"""`BlockKeys`: names of the full blocks of a request, by which another request with the same beginning finds them.

    key of block i = blake2b(key of block i - 1 ‖ tokens of block i)
    key of block -1 = blake2b(what made the K and V: model and formats; whose they are: tenant and salt)

Keys are the same in every process, and nobody can make two different beginnings meet: 32 bytes of a cryptographic hash.
Who finds a block compares its tokens all the same.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

KEY_BYTES: Final = 32

TokenSource = Callable[[int, int], Sequence[int]]
"""Gives the tokens at positions start … end - 1 of a context."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Name of one full block. `tokens` are its ids as 64-bit numbers, `parent` is the name of the block before it."""

    key: bytes
    parent: bytes
    tokens: bytes


class BlockKeys:
    """Names of the full blocks of one context, made as they are asked for and kept.

    Args:
        root: name of what lies before the first block; see `root_key`.
        block_size: tokens of a block.
        tenant: whose context it is.
    """

    def __init__(self, root: bytes, block_size: int, tenant: str) -> None:
        self.tenant = tenant
        self._block_size = block_size
        self._root = root
        self._keys: list[BlockKey] = []

    def first(self, num_blocks: int, tokens: TokenSource) -> Sequence[BlockKey]:
        """Names of the first blocks. The tokens before `num_blocks` blocks never change.

        Cost: one hash for each block that was not asked for before.
        """
        size = self._block_size
        while len(self._keys) < num_blocks:
            start = len(self._keys) * size
            self._keys.append(_child(self._keys[-1].key if start else self._root, tokens(start, start + size)))
        return self._keys[:num_blocks]


def root_key(identity: str, tenant: str, salt: str) -> bytes:
    """Name of what lies before the first block: other model, formats, tenant or salt, other names of all blocks."""
    return hashlib.blake2b(json.dumps([identity, tenant, salt]).encode(), digest_size=KEY_BYTES).digest()


def _child(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    tokens = array("q", token_ids).tobytes()
    return BlockKey(hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest(), parent, tokens)
