"""Is a file of a model there? What merely has its name is told apart from what is missing."""

import stat
from pathlib import Path

from ambidex.core.errors import ModelFileError


def has_file(path: Path) -> bool:
    """Whether there is a regular file of that name, itself or behind symbolic links.

    Raises:
        ModelFileError: something else is there (a folder, a pipe, a link that leads nowhere or in a circle), or it
            cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ModelFileError(f"{path} is a symbolic link that leads nowhere: it must be a file") from error
        return False
    except OSError as error:  # also a circle of symbolic links
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ModelFileError(f"{path} is {kind}: it must be a file")
    return True
