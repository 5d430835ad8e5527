"""Files from outside are read whole, but never without a limit: a device or a pipe may have no end."""

import errno
import os
from pathlib import Path
from typing import BinaryIO, Final

from ambidex.core.units import MIB, format_size

MAX_TEXT_BYTES: Final = 256 * MIB
"""Of a text to measure with: some 60 million tokens."""


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it cannot be read, or has more than `max_bytes` bytes; `strerror` says so.
        ValueError: the name has a null byte.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(max_bytes)
        return read_stream(file, max_bytes=max_bytes)  # what is no regular file has no size


def read_stream(stream: BinaryIO, *, max_bytes: int) -> bytes:
    """All bytes up to the end of a stream.

    Raises:
        OSError: as `read_file`.
    """
    data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def read_text_file(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """A file of UTF-8 text, its lines ended by a newline alone, whoever wrote it.

    Raises:
        OSError: as `read_file`.
        ValueError: it is no UTF-8, or the name has a null byte.
    """
    text = read_file(path, max_bytes=max_bytes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {format_size(max_bytes)}, the most that is read")
