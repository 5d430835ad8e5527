"""A short name for the content of large files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ambidex.core.errors import ModelFileError
from ambidex.core.units import KIB, MIB

WHOLE_BYTES: Final = 32 * MIB
"""Files up to this size are read whole."""
NUM_PIECES: Final = 256
PIECE_BYTES: Final = 64 * KIB
"""Of a larger one: pieces at equal distances, the first and the last among them; 16 MiB of each file in all."""


def fingerprint(files: Sequence[Path]) -> str:
    """64 hex digits that differ when the files do: their names, sizes and times of change, and their bytes, of large
    files in samples.

    Raises:
        ModelFileError: one cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path in files:
        try:
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            with open(path, "rb") as file:
                if stat.st_size <= WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                for piece in range(NUM_PIECES):
                    file.seek((stat.st_size - PIECE_BYTES) * piece // (NUM_PIECES - 1))
                    digest.update(file.read(PIECE_BYTES))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
