"""`BlockFolder`: which blocks of KV lie as files in a folder, and which of them go when it holds too much.

    FOLDER / lock                                    held by the engine that uses it
    FOLDER / IDENTITY, 32 hex digits / KEY.PLACE.kv  KEY: 64 hex digits; PLACE of the block in its context

Blocks of other models, formats or versions have another identity: they are not looked at, but count and go by their age
like the others. What else lies in the folder is left alone. The oldest use goes first, of one context the last block
first, since blocks behind a missing one cannot be found.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.formats.folder_lock import FolderLock
from ambidex.storage.block_files import TEMPORARY

_IDENTITY: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(r"([0-9a-f]{64})\.(\d{1,9})\.kv")
_LEFT_OVER: Final = re.compile(_NAME.pattern + re.escape(TEMPORARY))
_SPARE: Final = 20
"""One in so many bytes of the quota is cleared beyond what must go, so that not every block has to look for victims."""


@dataclass(slots=True)
class _File:
    """One block. `used_s` is the file's time of change, which a use renews."""

    path: Path
    num_bytes: int
    used_s: float
    block_idx: int


@dataclass(slots=True, kw_only=True)
class FolderCounts:
    """What lies there: `num_bytes` and `num_blocks` of this identity, `num_foreign_bytes` of others, and the entries
    that are none of ours."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_foreign_bytes: int = 0
    unknown: list[str] = field(default_factory=list)


class BlockFolder:
    """Safe to use from several threads; one engine at a time.

    Args:
        folder: made if it is not there, for this user alone.
        identity: names all that K and V depend on beside the tokens; at least 16 bytes.
        quota: bytes of all files together.
    Raises:
        ConfigError: the folder cannot be used, or another engine uses it.
    """

    def __init__(self, folder: Path, identity: bytes, quota: int) -> None:
        self._folder = folder
        self._own = folder / identity[:16].hex()
        self._quota = quota
        self._guard = threading.Lock()
        self._files: dict[bytes, _File] = {}
        self._foreign: list[_File] = []
        self._num_own_bytes = 0
        self._num_foreign_bytes = 0
        self.unknown: list[str] = []
        """Names of entries that are none of ours, at the start."""
        self._lock = FolderLock(folder, setting="session_dir")
        try:
            self._own.mkdir(mode=0o700, exist_ok=True)
            self._look()
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"`session_dir` {folder} cannot be used ({error.strerror or error}): name a folder that can be written"
            ) from error

    def counts(self) -> FolderCounts:
        """What lies there now."""
        with self._guard:
            return FolderCounts(
                num_blocks=len(self._files),
                num_bytes=self._num_own_bytes,
                num_foreign_bytes=self._num_foreign_bytes,
                unknown=list(self.unknown),
            )

    def __contains__(self, key: bytes) -> bool:
        """Whether a block of that name lies there."""
        return key in self._files

    def list_keys(self) -> list[bytes]:
        """Names of all blocks."""
        with self._guard:
            return list(self._files)

    def size_of(self, key: bytes) -> int:
        """Bytes of a block's file; 0 if there is none."""
        file = self._files.get(key)
        return 0 if file is None else file.num_bytes

    def path_of(self, key: bytes, block_idx: int) -> Path:
        """Where a block lies, or would lie."""
        file = self._files.get(key)
        return self._own / f"{key.hex()}.{block_idx}.kv" if file is None else file.path

    def note(self, key: bytes, block_idx: int, num_bytes: int) -> None:
        """A block has been written; older ones go if the folder holds too much now."""
        with self._guard:
            self._forget(key)
            self._files[key] = _File(self.path_of(key, block_idx), num_bytes, time.time(), block_idx)
            self._num_own_bytes += num_bytes
            self._shrink()

    def touch(self, key: bytes, used_s: float) -> None:
        """A block was of use; blocks of one context get the same time."""
        file = self._files.get(key)
        if file is not None:
            file.used_s = used_s
            with contextlib.suppress(OSError):
                os.utime(file.path, (used_s, used_s))

    def remove(self, key: bytes) -> bool:
        """Delete a block; False if there is none."""
        with self._guard:
            file = self._forget(key)
            if file is not None:
                _delete(file.path)
            return file is not None

    def close(self) -> None:
        """Let another engine use the folder."""
        self._lock.close()

    def _look(self) -> None:
        """Note what is there, and delete what a killed process left half written."""
        for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
            if entry.name == "lock":
                continue
            if not entry.is_dir(follow_symlinks=False) or not _IDENTITY.fullmatch(entry.name):
                self.unknown.append(entry.name)
                continue
            for key, file in self._look_into(Path(entry.path)):
                if file.path.parent == self._own:
                    self._files[key] = file
                    self._num_own_bytes += file.num_bytes
                else:
                    self._foreign.append(file)
                    self._num_foreign_bytes += file.num_bytes
        self._shrink()

    def _look_into(self, folder: Path) -> Iterator[tuple[bytes, _File]]:
        for entry in os.scandir(folder):
            match = _NAME.fullmatch(entry.name)
            if match is not None and entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                yield bytes.fromhex(match[1]), _File(Path(entry.path), stat.st_size, stat.st_mtime, int(match[2]))
            elif _LEFT_OVER.fullmatch(entry.name):
                _delete(Path(entry.path))
            else:
                self.unknown.append(f"{folder.name}/{entry.name}")

    def _forget(self, key: bytes) -> _File | None:
        file = self._files.pop(key, None)
        if file is not None:
            self._num_own_bytes -= file.num_bytes
        return file

    def _shrink(self) -> None:
        """Delete the oldest, a little more than must go."""
        if self._num_own_bytes + self._num_foreign_bytes <= self._quota:
            return
        most = self._quota - self._quota // _SPARE
        own: list[tuple[bytes | None, _File]] = list(self._files.items())
        old = sorted(
            [*own, *((None, file) for file in self._foreign)], key=lambda item: (item[1].used_s, -item[1].block_idx)
        )
        for key, file in old:
            if self._num_own_bytes + self._num_foreign_bytes <= most:
                break
            _delete(file.path)
            if key is not None:
                self._forget(key)
            else:
                self._foreign.remove(file)
                self._num_foreign_bytes -= file.num_bytes


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
