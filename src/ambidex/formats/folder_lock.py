"""`FolderLock`: one engine at a time uses a folder."""

import fcntl
import os
from pathlib import Path

from ambidex.core.errors import ConfigError


class FolderLock:
    """Held from the start until `close`, or until the process ends, however that ends.

    Args:
        folder: made if it is not there, for this user alone.
        setting: how a message calls it.
    Raises:
        ConfigError: the folder cannot be used, or another engine uses it.
    """

    def __init__(self, folder: Path, *, setting: str) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._take(folder, setting)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"`{setting}` {folder} cannot be used ({why}): name a folder that can be written"
            ) from error

    def close(self) -> None:
        """Let another engine use the folder."""
        os.close(self._file)

    def _take(self, folder: Path, setting: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"`{setting}` {folder} is in use by another engine: give each its own folder") from None
