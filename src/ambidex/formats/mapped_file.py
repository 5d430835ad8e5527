"""`MappedFile`: a file's bytes without reading them, and without keeping them."""

import mmap
from pathlib import Path
from typing import Final

from ambidex.core.errors import ModelFileError

_PAGE: Final = mmap.ALLOCATIONGRANULARITY


class MappedFile:
    """A read-only view of a whole file; it ends when nobody refers to it any more.

    Raises:
        ModelFileError: the file cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise ModelFileError(f"{path} is empty: download it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
        self.view: Final = memoryview(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def release(self, offset: int, num_bytes: int) -> None:
        """Drop a range from this process's memory; it is read from the file again when touched."""
        start = offset // _PAGE * _PAGE
        self._map.madvise(mmap.MADV_DONTNEED, start, offset + num_bytes - start)
