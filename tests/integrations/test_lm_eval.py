"""lm-evaluation-harness over the engine, with tasks of local files; skipped where the harness is not installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="pip install ambidex[lm-eval]")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it brings

from ambidex import LLM, SamplingParams  # noqa: E402
from ambidex.core.config import EngineConfig  # noqa: E402
from ambidex.core.errors import ConfigError, RequestError  # noqa: E402
from ambidex.eval.choice import measure_choice  # noqa: E402
from ambidex.eval.items import read_items  # noqa: E402
from ambidex.eval.teacher import Teacher  # noqa: E402
from tiny_engine import ids_of, make_engine_folder  # noqa: E402

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 127}
POLICY: dict[str, Any] = {"policy": "h2o", "policy_tokens": 6}
WORDS = ("boat", "stone", "lamp", "a long rope", "sand")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("harness"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice, a rolling and a generation task over one file."""
    path = tmp_path_factory.mktemp("tasks")
    lines = [
        {"question": f"What floats, number {number}?", "choices": list(WORDS[: 3 + number % 2]), "answer": number % 3}
        for number in range(5)
    ]
    (path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path / "items.jsonl"}
test_split: test
"""
    (path / "choice.yaml").write_text(f"""
task: local_choice
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_bytes}}]
{shared}""")
    (path / "rolling.yaml").write_text(f"""
task: local_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
{shared}""")
    (path / "answer.yaml").write_text(f"""
task: local_answer
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
{shared}""")
    return path


def make_model(folder: Path, **settings: Any) -> Any:
    from ambidex.integrations.lm_eval import AmbidexLM

    return AmbidexLM(str(folder), **{**SETTINGS, **settings})


def evaluate(model: Any, tasks: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(cache))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True)


@pytest.mark.parametrize("policy", [{}, POLICY])
def test_multiple_choice_gives_what_the_own_evaluation_gives(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    results = evaluate(make_model(folder, **policy), tasks, "local_choice", tmp_path, monkeypatch)
    teacher = Teacher(EngineConfig(model=str(folder), **SETTINGS, **policy))
    own = measure_choice(teacher, read_items(tasks / "items.jsonl"), shots=0, against_exact=False)
    assert results["results"]["local_choice"]["acc,none"] == own.right
    assert results["results"]["local_choice"]["acc_bytes,none"] == own.right_per_byte
    samples = results["samples"]["local_choice"]
    logprob = float(samples[0]["filtered_resps"][0][0])
    ids, prompt = ids_of("Question: What floats, number 0?\nAnswer: boat"), "Question: What floats, number 0?\nAnswer:"
    rows, _ = teacher.with_policy(ids[:-1], num_prompt=len(prompt) - 1)
    wanted = sum(float(row[token]) for row, token in zip(rows, ids[len(prompt) :], strict=True))
    assert logprob == pytest.approx(wanted, abs=1e-4)


def test_rolling_text_longer_than_the_limit_is_cut_into_windows(folder: Path) -> None:
    class Request:
        args = ("the keeper wrote every evening what the sea had brought. " * 4,)

    model = make_model(folder)
    (got,) = model.loglikelihood_rolling([Request()])
    ids = ids_of(Request.args[0])
    teacher = Teacher(EngineConfig(model=str(folder), **SETTINGS))
    limit = 125
    wanted = 0.0
    for start in range(0, len(ids), limit):
        end = min(start + limit, len(ids))
        first = max(0, end - limit)
        context = [1, *ids[first : end - 1]] if first == 0 else ids[first - 1 : end - 1]
        rows = teacher.exact(context, first=start - first)
        wanted += sum(float(row[token]) for row, token in zip(rows, ids[start:end], strict=True))
    assert len(ids) > 127
    assert got == pytest.approx(wanted, abs=1e-3)


def test_answers_are_greedy_and_end_before_the_stop_string(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = evaluate(make_model(folder), tasks, "local_answer", tmp_path, monkeypatch)
    with LLM(str(folder), **SETTINGS) as llm:
        params = SamplingParams(max_output_tokens=12, temperature=0.0, stop=("e",))
        wanted = [llm.generate([f"What floats, number {number}?"], params)[0].text for number in range(5)]
    got = {sample["doc"]["question"]: sample["resps"][0][0] for sample in results["samples"]["local_answer"]}
    assert [got[f"What floats, number {number}?"] for number in range(5)] == wanted


def test_unknown_settings_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="setting 'polici' is unknown: did you mean policy"):
        make_model(folder, polici="h2o")

    class Request:
        args = ("a", {"until": ["b"], "num_beams": 4})

    with pytest.raises(ConfigError, match="generation setting num_beams is unknown"):
        make_model(folder).generate_until([Request()])


def test_conversations_are_rendered_with_the_models_template(folder: Path) -> None:
    model = make_model(folder)
    assert model.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>u:hi;a:"
    with pytest.raises(RequestError, match="cannot be continued"):
        model.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=False)


def test_command_knows_the_model(
    folder: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ambidex.integrations.lm_eval import run

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    arguments = ",".join(["pretrained=" + str(folder), *(f"{name}={value}" for name, value in SETTINGS.items())])
    words = ["lm_eval", "--model", "ambidex", "--model_args", arguments, "--tasks", "local_choice", "--include_path",
             str(tasks)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    run()
    assert "local_choice" in capsys.readouterr().out
