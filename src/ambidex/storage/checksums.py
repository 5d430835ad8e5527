"""Checks of `--verify`: blocks in host memory have a checksum from when they are complete, copies are read back."""

import zlib
from typing import Final

import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import CopyError, IntegrityError
from ambidex.core.ids import KVPart
from ambidex.storage.copy import CopyBlock
from ambidex.storage.kv_pool import KVPool


class BlockChecksums:
    """CRC-32 of complete blocks of a pool in host memory, over K, V and scales of all layers as they lie there.

    It finds every change of up to 32 bits in a row, and all but one of 4 billion others.
    Source: ISO 3309, as zlib computes it.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._sums: dict[int, int] = {}

    def __contains__(self, block_id: int) -> bool:
        """Whether the block has a checksum."""
        return block_id in self._sums

    def note(self, block_id: int) -> None:
        """The block is complete, and is as it should be. Cost: reads it twice."""
        self._sums[block_id] = self._sum(block_id)

    def forget(self, block_id: int) -> None:
        """The block is about to be written."""
        self._sums.pop(block_id, None)

    def check(self, block_id: int) -> None:
        """See that a block is what it was; one that has no checksum is.

        Raises:
            IntegrityError: it is not; its checksum is forgotten.
        Cost: reads the block twice.
        """
        expected = self._sums.get(block_id)
        if expected is None:
            return
        found = self._sum(block_id)
        if found != expected:
            self.forget(block_id)
            raise IntegrityError(
                f"KV block {block_id} on tier {self.pool.tier} has changed since it was written (checksum {found:08x}, "
                f"expected {expected:08x}): something else wrote there, or the memory is faulty; ask again, and test "
                f"the memory if it comes back"
            )

    def _sum(self, block_id: int) -> int:
        found = 0
        for part in self.pool.tensors:
            found = zlib.crc32(part[:, :, block_id].contiguous().view(torch.uint8).numpy().data, found)
        return found


class VerifiedCopy:
    """Another way of copying, whose blocks are read back and compared when they have arrived.

    Compared are rows, since their order and format differ between pools: what a reader of the target finds, and the
    source's rows rounded to the target's format. Where that has scales, a number may differ by one step of it: devices
    round ties differently.

    Args:
        checksums: of the pool whose complete blocks are known.
    """

    def __init__(self, copy: CopyBlock, checksums: BlockChecksums) -> None:
        self._copy = copy
        self._checksums = checksums

    def __call__(self, source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        """Copy and compare.

        Raises:
            CopyError: the copy failed, the block arrived changed, or it was changed before.
        Cost: that of the copy; waits for it and reads both blocks.
        """
        if source is self._checksums.pool:
            try:
                self._checksums.check(source_id)
            except IntegrityError as error:
                raise CopyError(str(error)) from error
        if target is self._checksums.pool:
            self._checksums.forget(target_id)
        self._copy(source, source_id, target, target_id)
        for pool in (source, target):
            if pool.device.type == "cuda":
                torch.cuda.current_stream(pool.device).synchronize()
        for part, sent, found in zip(KVPart, source.read_block(source_id), target.read_block(target_id), strict=True):
            rounded = target.round(part, sent.to(target.device))
            num_wrong = _count_wrong(rounded, found, num_steps=_MOST_STEPS.get(target.spec.dtypes.of(part), 0))
            if num_wrong:
                raise CopyError(
                    f"{num_wrong} of {found.numel()} numbers of {part.upper()} arrived changed in block {target_id} on "
                    f"tier {target.tier}: the copy is thrown away"
                )
        if target is self._checksums.pool:
            self._checksums.note(target_id)


_MOST_STEPS: Final = {DType.INT8: 1, DType.INT4: 18}
"""Steps of an int8 row by which rounding may differ. Of int4 one of its own, which are up to 17 of them
(`reference/int4.py`), and one by which its grid may begin elsewhere."""


def _count_wrong(sent: Tensor, found: Tensor, *, num_steps: int) -> int:
    """Numbers of rows [..., D] that differ by more than some steps of an int8 row; a NaN is like another."""
    sent, found = sent.float(), found.float()
    is_equal = (sent == found) | (sent.isnan() & found.isnan())
    if num_steps:
        step = sent.abs().amax(dim=-1, keepdim=True) / 127
        is_equal |= (sent - found).abs() <= (num_steps + 0.01) * step
    return int((~is_equal).sum())
