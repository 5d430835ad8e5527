"""What one engine has computed, another one finds on disk: the same tokens, or computed anew."""

import logging
import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from test_engine_prefix_cache import PARAMS, config_of, make_prompts
from test_engine_splits import DEVICES, SPLITS

from ambidex import LLM
from ambidex.core.config import DeviceKind
from ambidex.core.errors import ConfigError
from ambidex.engine.compose import build_engine
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.sessions import is_load_faster
from ambidex.storage.block_files import read_block_file
from tiny_engine import make_engine_folder

PROMPT = make_prompts()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_engine_folder(tmp_path / "model")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture(autouse=True)
def reads_what_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes its prompts faster than a busy machine reads them: measured, they may be computed."""
    monkeypatch.setattr("ambidex.engine.sessions.is_load_faster", lambda **_: True)


def open_llm(folder: Path, saved: Path, device: DeviceKind = DeviceKind.CPU, **settings: object) -> LLM:
    own = {"block_size": 4, "prefix_cache_percent": 100, "session_dir": str(saved)} | settings
    return LLM(config_of(folder, device, **own))


def ask(llm: LLM, prompt: list[int] = PROMPT) -> RequestOutput:
    return llm.generate([prompt], PARAMS)[0]


def files_of(saved: Path) -> list[Path]:
    return sorted(saved.glob("*/*.kv"))


@pytest.fixture
def first(folder: Path, saved: Path) -> RequestOutput:
    """Answered by an engine that has ended."""
    with open_llm(folder, saved) as llm:
        return ask(llm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [4, 16])  # 16 divides: tiles, where the native kernels read
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_first_request_of_the_next_engine_begins_behind_what_was_saved(
    split: dict[str, object], block_size: int, device: DeviceKind, folder: Path, saved: Path
) -> None:
    prompts = make_prompts()
    with LLM(config_of(folder, device)) as llm:
        wanted = [ask(llm, prompt).token_ids for prompt in prompts]
    for turn in range(2):
        with open_llm(folder, saved, device, block_size=block_size, **split) as llm:
            outputs = llm.generate(prompts, PARAMS)
            assert [output.token_ids for output in outputs] == wanted
            assert (llm.stats().num_restored_tokens > 0) == (turn == 1)
            assert llm.stats().num_refused_files == 0
            if turn == 1:
                longest = max(range(len(prompts)), key=lambda idx: len(prompts[idx]))
                assert outputs[longest].num_cached_tokens == (len(prompts[longest]) - 1) // block_size * block_size


def test_next_turn_of_a_conversation_begins_behind_the_saved_answer(
    folder: Path, saved: Path, first: RequestOutput
) -> None:
    whole = [*PROMPT, *first.token_ids]
    with LLM(config_of(folder, DeviceKind.CPU)) as llm:
        wanted = ask(llm, [*whole, 5, 6, 7]).token_ids
    with open_llm(folder, saved) as llm:
        second = ask(llm, [*whole, 5, 6, 7])
    assert second.token_ids == wanted
    assert second.num_cached_tokens == (len(whole) - 1) // 4 * 4


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
def test_formats_with_scales_come_back_bit_by_bit(kv_dtype: str, folder: Path, saved: Path) -> None:
    settings = {"block_size": 16, "kv_dtype": kv_dtype}
    with open_llm(folder, saved, **settings) as llm:
        wanted = ask(llm).token_ids
    assert kv_dtype in {str(read_block_file(path)[0].spec.dtypes) for path in files_of(saved)}
    with open_llm(folder, saved, **settings) as llm:
        output = ask(llm)
        assert llm.stats().num_restored_tokens == output.num_cached_tokens == (len(PROMPT) - 1) // 16 * 16
    assert output.token_ids == wanted


def test_blocks_of_another_format_are_not_taken(folder: Path, saved: Path) -> None:
    """The format is part of a block's name, and stands in its file."""
    with open_llm(folder, saved, block_size=16, kv_dtype="k=int8,v=int4") as llm:
        ask(llm)
    with LLM(config_of(folder, DeviceKind.CPU, block_size=16, kv_dtype="int4")) as llm:
        wanted = ask(llm).token_ids
    with open_llm(folder, saved, block_size=16, kv_dtype="int4") as llm:
        output = ask(llm)
        assert (llm.stats().num_restored_tokens, output.num_cached_tokens) == (0, 0)
    assert output.token_ids == wanted
    formats = {str(read_block_file(path)[0].spec.dtypes) for path in files_of(saved)}
    assert formats == {"k=int8,v=int4", "int4"}


def test_changed_files_are_computed_anew_counted_and_deleted(
    folder: Path, saved: Path, first: RequestOutput, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(5)
    by_place = {int(path.name.split(".")[1]): path for path in files_of(saved)}
    for trial in range(12):
        place = rng.randrange(len(PROMPT) // 4)
        whole = by_place[place].read_bytes()
        changed = bytearray(whole)
        if trial % 3:
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        else:
            del changed[rng.randrange(len(whole)) :]
        by_place[place].write_bytes(changed)
        caplog.clear()
        with open_llm(folder, saved) as llm, caplog.at_level(logging.WARNING):
            output = ask(llm)
            assert llm.stats().num_refused_files == 1
            assert output.num_cached_tokens == place * 4
        assert output.token_ids == first.token_ids
        assert caplog.text.count("is not used and deleted") == 1
        assert read_block_file(by_place[place])[0].block_idx == place, "the block was not saved again"


def test_swapped_files_are_refused(folder: Path, saved: Path, first: RequestOutput) -> None:
    a, b = files_of(saved)[:2]
    first_bytes = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(first_bytes)
    with open_llm(folder, saved) as llm:
        assert ask(llm).token_ids == first.token_ids
        assert llm.stats().num_refused_files >= 1


def test_other_weights_of_the_same_shape_find_nothing(tmp_path: Path, saved: Path, first: RequestOutput) -> None:
    num_files = len(files_of(saved))
    assert num_files
    other = make_engine_folder(tmp_path / "other", seed=7)
    with LLM(config_of(other, DeviceKind.CPU)) as llm:
        wanted = ask(llm).token_ids
    assert wanted != first.token_ids, "both models answer alike: the test would prove nothing"
    with open_llm(other, saved) as llm:
        output = ask(llm)
        assert (output.num_cached_tokens, llm.stats().num_restored_tokens) == (0, 0)
    assert output.token_ids == wanted
    stolen = files_of(saved)[0]  # the same names in the other's folder: its head tells
    folders = {path.parent for path in files_of(saved)}
    assert len(folders) == 2
    for target in folders - {stolen.parent}:
        (target / stolen.name).write_bytes(stolen.read_bytes())


def test_other_tenants_and_salts_find_nothing(folder: Path, saved: Path) -> None:
    with open_llm(folder, saved) as llm:
        engine = llm._engine
        engine.submit(engine.make_request(PROMPT, PARAMS, tenant="a", cache_salt="s"))
        while engine.has_work:
            engine.step()
    for tenant, salt, is_found in (("b", "s", False), ("a", "", False), ("a", "s", True)):
        with open_llm(folder, saved) as llm:
            engine = llm._engine
            engine.submit(engine.make_request(PROMPT, PARAMS, tenant=tenant, cache_salt=salt))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            assert (outputs[-1].num_cached_tokens > 0) == is_found
            assert engine.drop_cached("nobody") == 0
            if is_found:
                assert engine.drop_cached("a") > 0
                assert engine.stats.num_saved_blocks > 0, "blocks of others are gone"


def test_quota_holds(folder: Path, saved: Path) -> None:
    with open_llm(folder, saved) as llm:
        ask(llm)
    size = max(path.stat().st_size for path in files_of(saved))
    quota = 5 * size
    with open_llm(folder, saved, session_quota=quota) as llm:
        for prompt in make_prompts():
            ask(llm, prompt)
            assert llm.stats().saved_bytes <= quota
    assert 0 < sum(path.stat().st_size for path in files_of(saved)) <= quota


def test_quota_that_holds_no_block_is_refused_instead_of_saving_nothing(folder: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"session_quota.* is 1000 B: a block of 4 tokens takes"):
        open_llm(folder, saved, session_quota=1000)


def test_a_write_that_fails_unforeseen_does_not_keep_the_engine_from_ending(
    folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError("none left")

    monkeypatch.setattr("ambidex.storage.saved_blocks.write_block_file", fail)
    with open_llm(folder, saved) as llm:
        ask(llm)
        while llm._engine.do_chore():
            pass
        sessions = llm._engine._sessions
        assert sessions is not None
        end = time.monotonic() + 60
        while sessions.has_unsaved and time.monotonic() < end:  # for ever, once its thread has ended
            time.sleep(0.01)
        assert not sessions.has_unsaved
        sessions.record(llm.stats())
        assert llm.stats().num_failed_saves > 1
    assert files_of(saved) == []


def test_dropped_blocks_are_gone_from_disk_too(folder: Path, saved: Path) -> None:
    with open_llm(folder, saved) as llm:
        ask(llm)
        while llm._engine.do_chore():
            pass
        num_blocks = llm._engine.drop_cached()
        assert num_blocks >= len(PROMPT) // 4
        assert files_of(saved) == []
        assert llm.stats().num_saved_blocks == 0


def test_full_disk_costs_no_request(
    folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ambidex.storage.saved_blocks.write_block_file", fail)
    with open_llm(folder, saved) as llm:
        assert ask(llm).finish_reason == "length"
        assert ask(llm).num_cached_tokens > 0
    assert files_of(saved) == []
    assert caplog.text.count("was not saved") == 1


def test_verified_engine_reads_what_was_saved(folder: Path, saved: Path, first: RequestOutput) -> None:
    with open_llm(folder, saved, verify=True, kv_gpu_tokens=16, dram_memory=2**22, num_sink_tokens=4) as llm:
        outputs = [ask(llm) for _ in range(3)]
        assert llm.stats().num_corrupt_blocks == 0
    assert {output.token_ids for output in outputs} == {first.token_ids}


def test_sessions_need_a_prefix_cache_and_a_folder_of_their_own(folder: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_percent"):
        open_llm(folder, saved, prefix_cache_percent=0)
    with pytest.raises(ConfigError, match="prefix_cache_percent"):
        LLM(config_of(folder, DeviceKind.CPU, session_dir=str(saved)))
    with pytest.raises(ConfigError, match="policy"):
        open_llm(folder, saved, prefix_cache_percent=None, policy="h2o")
    with open_llm(folder, saved), pytest.raises(ConfigError, match="in use by another engine"):
        open_llm(folder, saved)


def test_folder_that_is_in_use_is_refused_before_weights_are_read(folder: Path, saved: Path) -> None:
    read: list[tuple[int, int]] = []
    config = config_of(folder, DeviceKind.CPU, prefix_cache_percent=100, session_dir=str(saved))
    with open_llm(folder, saved), pytest.raises(ConfigError, match="in use by another engine"):
        build_engine(config, progress=lambda done, total: read.append((done, total)))
    assert read == []
    build_engine(config, progress=lambda done, total: read.append((done, total))).close()
    assert read != []


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "/dev/null/x"])
def test_folder_that_cannot_be_used_is_the_users_mistake(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"`session_dir` .* cannot be used"):
        open_llm(folder, Path(name))


def test_an_end_without_time_names_what_it_does_not_save(
    folder: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_llm(folder, saved)._engine
    engine.submit(engine.make_request(PROMPT, PARAMS))
    while engine.has_work:
        engine.step()
    assert engine._sessions is not None
    engine._sessions._store.flush()  # type: ignore[attr-defined]  # what was copied beside the steps
    num_before = len(files_of(saved))
    engine.close(save_s=0.0)
    match = re.search(r"(\d+) blocks of the prefix cache were not saved, there were 0 s for it", caplog.text)
    assert match is not None
    num_left = int(match[1])
    assert num_left > len(PROMPT) // 4 // 2
    assert len(files_of(saved)) == num_before
    caplog.clear()
    engine = open_llm(folder, saved)._engine
    engine.submit(engine.make_request(PROMPT, PARAMS))
    while engine.has_work:
        engine.step()
    engine.close(save_s=60.0)
    assert "were not saved" not in caplog.text
    assert len(files_of(saved)) == num_before + num_left


def test_a_disk_that_hangs_does_not_keep_an_engine_from_ending(
    folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_back = threading.Event()

    def hang(*_: object) -> int:
        is_back.wait(60)
        return 0

    monkeypatch.setattr("ambidex.storage.saved_blocks.write_block_file", hang)
    monkeypatch.setattr("ambidex.storage.saved_blocks.LAST_FILE_S", 0.01)
    engine = open_llm(folder, saved)._engine
    engine.submit(engine.make_request(PROMPT, PARAMS))
    while engine.has_work:
        engine.step()
    num_copied = sum(engine.do_chore() for _ in range(3))
    engine.close(save_s=0.0)
    is_back.set()
    match = re.search(r"(\d+) blocks of the prefix cache were not saved", caplog.text)
    assert match is not None
    assert int(match[1]) > num_copied > 0


def test_load_or_compute_by_rates() -> None:
    assert is_load_faster(num_bytes=10, num_tokens=10, read_bytes_per_s=None, compute_tokens_per_s=1.0)
    assert is_load_faster(num_bytes=10, num_tokens=10, read_bytes_per_s=1.0, compute_tokens_per_s=None)
    assert is_load_faster(num_bytes=100, num_tokens=10, read_bytes_per_s=20.0, compute_tokens_per_s=1.0)
    assert not is_load_faster(num_bytes=100, num_tokens=10, read_bytes_per_s=5.0, compute_tokens_per_s=1.0)


def test_slow_disk_is_left_alone(
    folder: Path, saved: Path, first: RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder, saved) as llm:
        ask(llm, [5, *PROMPT])  # now it is known how fast prompts are computed
        monkeypatch.setattr("ambidex.engine.sessions.is_load_faster", is_load_faster)  # the real one
        monkeypatch.setattr("ambidex.storage.saved_blocks.SavedBlocks.read_bytes_per_s", 1.0)
        output = ask(llm)
        assert output.num_cached_tokens == 0
        assert llm.stats().num_recomputed_tokens > 0
    assert output.token_ids == first.token_ids


@pytest.mark.usefixtures("first")
def test_padding_of_rows_holds_no_old_memory(saved: Path) -> None:
    for path in files_of(saved):
        _, payload = read_block_file(path)
        values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        assert bool(values.isfinite().all())
