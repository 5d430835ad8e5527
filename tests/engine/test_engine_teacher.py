"""`Teacher` under the bounded policy in its native form: known tokens go through the steps that answers are made in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ambidex import LLM, SamplingParams
from ambidex.attention import bounded_scan
from ambidex.core.config import EngineConfig
from ambidex.core.errors import BoundError, ConfigError, RequestFailedError
from ambidex.eval.teacher import Teacher
from ambidex.runner.watched_steps import WatchedSteps
from tiny_engine import ids_of, make_engine_folder

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 127, "max_tokens_per_step": 48,
                            "block_size": 16, "policy": "bounded"}  # fmt: skip
WORDS = "the keeper of the lighthouse wrote every evening what the sea had brought, and what it had taken away. "
SPLIT: dict[str, Any] = {"kv_gpu_tokens": 96, "num_sink_tokens": 0, "recent_window": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(autouse=True)
def scans_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.engine.compose.parts.MIN_SCANNED_BLOCKS", 1)
    assert bounded_scan.MIN_SCANNED_BLOCKS > 1


def make_teacher(folder: Path, **settings: Any) -> Teacher:
    return Teacher(EngineConfig(model=str(folder), **SETTINGS | settings), as_answered=True)


@pytest.mark.parametrize("settings", [{}, SPLIT], ids=["one tier", "two tiers"])
def test_its_own_answer_is_the_likeliest_when_it_is_told_again(folder: Path, settings: dict[str, Any]) -> None:
    ids = ids_of(WORDS)[:80]
    options = {**SETTINGS, "max_dropped_mass": 0.3, **settings}
    with LLM(str(folder), **options) as llm:
        params = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1)
        answer = llm.generate([ids], params)[0]
    teacher = make_teacher(folder, **options)
    assert teacher.form == "native"
    logprobs, chosen = teacher.with_policy([*ids, *answer.token_ids[:-1]], num_prompt=80)
    assert logprobs.argmax(1).tolist() == list(answer.token_ids[1:])
    assert answer.logprobs is not None
    for row, told in zip(logprobs, answer.logprobs[1:], strict=True):
        assert abs(float(row.max()) - told.logprob) < 1e-4
    assert chosen is not None
    assert chosen.num_bounded == chosen.num_choices > 0
    assert 0.05 < chosen.max_dropped_mass <= 0.3
    assert sum(teacher.engine.stats.kv_bytes.values()) == 0, "blocks were lost"


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, SPLIT], ids=["one tier", "two tiers"])
def test_told_answers_go_through_captured_steps_on_a_gpu(folder: Path, settings: dict[str, Any]) -> None:
    """So few keys are attended exactly there; what counts is that the steps are the captured ones."""
    ids = ids_of(WORDS)[:80]
    options = {**SETTINGS, "device": "cuda", "dram_memory": 2**22, **settings}
    with LLM(str(folder), **options) as llm:
        params = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
        answer = llm.generate([ids], params)[0]
    teacher = make_teacher(folder, **options)
    assert teacher.form == "native"
    logprobs, chosen = teacher.with_policy([*ids, *answer.token_ids[:-1]], num_prompt=80)
    assert logprobs.argmax(1).tolist() == list(answer.token_ids[1:])
    assert chosen is not None
    assert chosen.num_choices > 0
    assert teacher.engine.stats.num_graph_failures == 0


def test_tokens_that_it_would_not_have_said_are_known_all_the_same(folder: Path) -> None:
    ids = ids_of(WORDS)[:100]
    teacher = make_teacher(folder, max_dropped_mass=0.0)
    logprobs, _ = teacher.with_policy(ids, num_prompt=70)
    exact = teacher.exact(ids, first=70)
    assert logprobs.shape == exact.shape == (30, 131)
    assert logprobs.argmax(1).tolist()[:-1] != ids[71:], "a tiny random model does not say this text"
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-3)


def test_predictions_within_the_prompt_come_first(folder: Path) -> None:
    ids = ids_of(WORDS)[:90]
    teacher = make_teacher(folder, max_dropped_mass=0.3)
    whole, _ = teacher.with_policy(ids, num_prompt=70, first=60)
    behind, _ = teacher.with_policy(ids, num_prompt=70)
    late, _ = teacher.with_policy(ids, num_prompt=70, first=80)
    assert len(whole) == 30
    torch.testing.assert_close(whole[10:], behind, rtol=0, atol=0)
    torch.testing.assert_close(whole[20:], late, rtol=0, atol=0)
    torch.testing.assert_close(whole[:10], teacher.exact(ids, first=60)[:10], rtol=0, atol=1e-5)


def test_native_and_reference_form_leave_out_about_as_much(folder: Path) -> None:
    """Both keep what they promise; they do not leave out the same keys, since the scan knows scores less well."""
    ids = ids_of(WORDS)[:100]
    native = make_teacher(folder, max_dropped_mass=0.2)
    reference = make_teacher(folder, max_dropped_mass=0.2, bounded_scores="exact")
    assert reference.form == "op by op"
    (got, of_native), (wanted, of_reference) = (
        teacher.with_policy(ids, num_prompt=70) for teacher in (native, reference)
    )
    assert of_native is not None
    assert of_reference is not None
    assert max(of_native.max_dropped_mass, of_reference.max_dropped_mass) <= 0.2
    assert of_reference.attended_share < of_native.attended_share < 1
    assert float((got - wanted).abs().max()) > 0, "they are not the same computation"


def test_choices_are_verified_as_often_as_asked(folder: Path) -> None:
    ids = ids_of(WORDS)[:100]
    config = EngineConfig(model=str(folder), **SETTINGS, verify=True, max_dropped_mass=0.2)
    teacher = Teacher(config, as_answered=True, verify_every=7)
    _, chosen = teacher.with_policy(ids, num_prompt=70)
    assert chosen is not None
    assert chosen.num_verified == -(-chosen.num_bounded // 7)
    assert 0 < chosen.max_error < chosen.max_error_bound


def test_bound_that_does_not_hold_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.runner.programs.find_bounds", lambda figures: 0 * bounded_scan.find_bounds(figures))
    config = EngineConfig(model=str(folder), **SETTINGS, verify=True, max_dropped_mass=0.3)
    with pytest.raises(BoundError):
        Teacher(config, as_answered=True, verify_every=1).with_policy(ids_of(WORDS)[:100], num_prompt=70)


def test_step_that_would_attend_all_keys_fails_instead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = make_teacher(folder)
    monkeypatch.setattr(WatchedSteps, "try_run", lambda *_: None)
    with pytest.raises(RequestFailedError, match="took the ordinary path, where all keys are attended"):
        teacher.with_policy(ids_of(WORDS)[:90], num_prompt=70)
    monkeypatch.undo()
    assert sum(teacher.engine.stats.kv_bytes.values()) == 0, "blocks were lost"


def test_a_prompt_whose_last_chunk_has_one_token_shifts_nothing(folder: Path) -> None:
    """That chunk has the form of an answer's step, whose row was read as if it had been asked for."""
    ids = ids_of(WORDS)[:100]
    assert 49 % SETTINGS["max_tokens_per_step"] == 1
    teacher = make_teacher(folder, max_dropped_mass=0.0)
    told, _ = teacher.with_policy(ids, num_prompt=49)
    assert len(told) == 51
    torch.testing.assert_close(told, teacher.exact(ids, first=49), rtol=0, atol=1e-3)
    with pytest.raises(ConfigError, match="a text of 97 tokens leaves one token to the last chunk"):
        teacher.exact(ids[:97], first=90)


def test_exact_is_measured_in_its_own_steps_too(folder: Path) -> None:
    ids = ids_of(WORDS)[:100]
    config = EngineConfig(model=str(folder), **{**SETTINGS, "policy": "exact"})
    teacher = Teacher(config, as_answered=True)
    assert teacher.form == "native"
    told, chosen = teacher.with_policy(ids, num_prompt=70)
    assert chosen is None
    torch.testing.assert_close(told, teacher.exact(ids, first=70), rtol=0, atol=1e-3)
    assert Teacher(config).form == "op by op"
