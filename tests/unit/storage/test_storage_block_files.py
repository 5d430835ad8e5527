"""Blocks as files: whole or refused, bounded, of one engine."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError, IntegrityError
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.block_files import BlockHead, read_block_file, read_block_head, write_block_file
from ambidex.storage.block_folder import BlockFolder

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP32, block_size=4)
PAYLOAD = random.Random(3).randbytes(SPEC.bytes_per_block)
IDENTITY = bytes(range(32))


def head_of(number: int = 0, *, identity: bytes = IDENTITY, owner: bytes = b"me") -> BlockHead:
    names = {"key": key_of(number), "parent": b"p" * 32, "tokens": b"t" * 32}
    return BlockHead(identity=identity, block_idx=number, owner=owner, spec=SPEC, **names)


def key_of(number: int) -> bytes:
    return number.to_bytes(32)


def put(folder: BlockFolder, number: int) -> int:
    path = folder.path_of(key_of(number), number)
    num_bytes = write_block_file(path, head_of(number), [PAYLOAD])
    folder.note(key_of(number), number, num_bytes)
    return num_bytes


def test_block_comes_back_as_it_was_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "block"
    num_bytes = write_block_file(path, head_of(), [PAYLOAD[:100], memoryview(PAYLOAD)[100:]])
    head, payload = read_block_file(path)
    assert (head, bytes(payload), path.stat().st_size) == (head_of(), PAYLOAD, num_bytes)
    assert read_block_head(path) == head
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == ["block"]


@given(data=st.data())
def test_any_change_of_any_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("changed") / "block"
    write_block_file(path, head_of(), [PAYLOAD])
    whole = path.read_bytes()
    match data.draw(st.sampled_from(["flip", "cut", "grow", "overwrite"])):
        case "flip":
            place = data.draw(st.integers(0, len(whole) - 1))
            changed = bytearray(whole)
            changed[place] ^= data.draw(st.integers(1, 255))
            path.write_bytes(changed)
        case "cut":
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        case "grow":
            path.write_bytes(whole + data.draw(st.binary(min_size=1, max_size=40)))
        case _:
            start = data.draw(st.integers(0, 120))
            noises = st.binary(min_size=1, max_size=80)
            noise = data.draw(noises.filter(lambda noise: not whole[start:].startswith(noise)))
            path.write_bytes(whole[:start] + noise + whole[start + len(noise) :])
    with pytest.raises(IntegrityError):
        read_block_file(path)


@given(noise=st.binary(max_size=300))
def test_whatever_else_is_no_block(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "block"
    for text in (noise, b"AmbiKV1\n" + noise):
        path.write_bytes(text)
        with pytest.raises(IntegrityError):
            read_block_file(path)
        with pytest.raises(IntegrityError):
            read_block_head(path)


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "block.part").mkdir()
    with pytest.raises(OSError, match="block"):
        write_block_file(tmp_path / "block", head_of(), [PAYLOAD])
    assert not (tmp_path / "block").exists()


def test_folder_finds_again_what_was_written_and_clears_what_was_not_finished(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "made" / "anew", IDENTITY, 10**6)
    num_bytes = put(folder, 1)
    path = folder.path_of(key_of(1), 1)
    folder.close()
    left = path.with_name(f"{key_of(2).hex()}.7.kv.part")
    left.write_bytes(b"half")
    again = BlockFolder(tmp_path / "made" / "anew", IDENTITY, 10**6)
    assert key_of(1) in again
    assert key_of(2) not in again
    assert again.size_of(key_of(1)) == num_bytes
    assert not left.exists()
    assert again.remove(key_of(1))
    assert not path.exists()


def test_oldest_use_goes_first_and_of_one_context_the_end(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, IDENTITY, 10**6)
    size = put(folder, 0)
    for number in range(1, 8):
        put(folder, number)
    for number in range(8):
        folder.touch(key_of(number), 1000.0 if number < 4 else 2000.0)
    folder.close()
    kept = BlockFolder(tmp_path, IDENTITY, 6 * size + size // 2)  # 5 % below: 6 blocks
    assert [number for number in range(8) if key_of(number) in kept] == [0, 1, 4, 5, 6, 7]
    put(kept, 8)
    assert [number for number in range(9) if key_of(number) in kept] == [0, 4, 5, 6, 7, 8]
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
    assert kept.counts().num_bytes == on_disk <= 6 * size + size // 2


def test_blocks_of_others_are_not_found_but_count(tmp_path: Path) -> None:
    other = BlockFolder(tmp_path, bytes(32), 10**6)
    size = put(other, 0)
    other.close()
    (tmp_path / "notes.txt").write_text("mine")
    folder = BlockFolder(tmp_path, IDENTITY, 2 * size + size // 2)
    assert key_of(0) not in folder
    assert folder.unknown == ["notes.txt"]
    assert folder.counts().num_foreign_bytes == size
    put(folder, 1)
    put(folder, 2)
    assert folder.counts().num_foreign_bytes == 0
    assert key_of(2) in folder
    assert (tmp_path / "notes.txt").exists()


def test_one_engine_at_a_time_and_folders_that_cannot_be_used(tmp_path: Path) -> None:
    first = BlockFolder(tmp_path / "a", IDENTITY, 10)
    with pytest.raises(ConfigError, match="in use by another engine"):
        BlockFolder(tmp_path / "a", IDENTITY, 10)
    first.close()
    BlockFolder(tmp_path / "a", IDENTITY, 10).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        BlockFolder(tmp_path / "file", IDENTITY, 10)


WRITES_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_storage_block_files import IDENTITY, put
from ambidex.storage.block_folder import BlockFolder
folder = BlockFolder(Path(sys.argv[1]), IDENTITY, 10**8)
print("begun", flush=True)
for number in range(10**9):
    put(folder, number)
"""


def test_process_that_is_killed_while_it_writes_leaves_whole_blocks_only(tmp_path: Path) -> None:
    for delay_s in (0.05, 0.11, 0.2):
        command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        end = time.monotonic() + 60
        while not list(tmp_path.glob("*/*.kv")):
            assert time.monotonic() < end, "it writes nothing"
            time.sleep(0.001)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        folder = BlockFolder(tmp_path, IDENTITY, 10**8)
        keys = folder.list_keys()
        assert keys, "nothing was written: the test would prove nothing"
        for key in keys:
            assert bytes(read_block_file(folder.path_of(key, 0))[1]) == PAYLOAD
        assert not list(tmp_path.glob("*/*.part"))
        folder.close()
