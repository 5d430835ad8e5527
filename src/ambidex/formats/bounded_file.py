"""Files from outside are read whole, but never without a limit: a device or a pipe may have no end."""

import errno
from pathlib import Path
from typing import BinaryIO

from ambidex.core.units import format_size


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it cannot be read, or has more than `max_bytes` bytes; `strerror` says so.
        ValueError: the name has a null byte.
    """
    with path.open("rb") as file:
        return read_stream(file, max_bytes=max_bytes)


def read_stream(stream: BinaryIO, *, max_bytes: int) -> bytes:
    """All bytes up to the end of a stream.

    Raises:
        OSError: as `read_file`.
    """
    data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_size(max_bytes)}, the most that is read")
    return data
