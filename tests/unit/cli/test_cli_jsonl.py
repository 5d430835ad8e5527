import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_llm import CHILD_ENV, FakeLLM, Prompt, run_ambidex

from ambidex.core.request import SamplingParams
from ambidex.engine.outputs import RequestOutput


class Files:
    """IN and OUT of a run, under one folder."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "in.jsonl"
        self.target = folder / "out.jsonl"

    def run(self, *args: str, llm: FakeLLM | None = None) -> Result:
        """Answer IN into OUT."""
        return run_ambidex("generate", "m", "--jsonl", str(self.source), "--output", str(self.target), *args, llm=llm)

    def write(self, *lines: object) -> None:
        """Write IN: an object as JSON, a text as it is."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(text + "\n" for text in texts))

    def records(self) -> list[dict[str, Any]]:
        """What OUT holds."""
        return [json.loads(line) for line in self.target.read_text().splitlines()]

    def errors(self) -> list[str]:
        """The errors in OUT."""
        return [record["error"] for record in self.records() if "error" in record]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_answers_come_as_they_finish_with_id_and_index(files: Files) -> None:
    files.write({"id": "a", "prompt": "one"}, {"prompt": "two"}, {"id": 7, "prompt": "three"})
    result = files.run()
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "3 lines: 3 answered, 0 failed, 0 done before\n"
    assert [(record["id"], record["index"]) for record in files.records()] == [(None, 1), ("a", 0), (7, 2)]
    record = files.records()[1]
    assert len(record.pop("hash")) == 16
    assert record == {
        "id": "a", "index": 0, "text": "Hello wörld!", "finish_reason": "stop",
        "num_prompt_tokens": 1, "num_output_tokens": 3, "token_ids": [0, 1, 2],
    }  # fmt: skip


def test_sampling_fields_of_a_line_beat_flags(files: Files) -> None:
    files.write(
        {"prompt": "p", "temperature": 0, "stop": ["x"], "max_output_tokens": None, "logit_bias": {"3": 1}},
        {"prompt": "q"},
    )
    llm = FakeLLM()
    assert files.run("--temperature", "0.5", "--top-k", "4", llm=llm).exit_code == 0
    assert llm.asked[0][1] == SamplingParams(
        max_output_tokens=None, temperature=0.0, top_k=4, stop=("x",), logit_bias=((3, 1.0),), seed=0
    )
    assert llm.asked[1][1] == SamplingParams(max_output_tokens=256, temperature=0.5, top_k=4, seed=1)


def test_line_without_a_seed_gets_one_from_its_index(files: Files) -> None:
    files.write({"prompt": "p"}, {"prompt": "p"}, {"prompt": "p", "seed": 3})
    llm = FakeLLM()
    files.run("--seed", str(2**63 - 1), llm=llm)
    assert [params.seed for _, params in llm.asked] == [2**63 - 1, 0, 3]


def test_messages_are_rendered_by_the_engine(files: Files) -> None:
    files.write({"messages": [{"role": "user", "content": "Hi!"}]})
    llm = FakeLLM()
    assert files.run(llm=llm).exit_code == 0
    assert llm.asked[0][0] == [3]


def test_empty_lines_are_left_out_but_counted(files: Files) -> None:
    files.write("", {"prompt": "p"}, "  ")
    assert files.run().exit_code == 0
    assert [record["index"] for record in files.records()] == [1]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "no JSON: it is nested too deeply"),
        ("[1]", 'no JSON object: write it like {"prompt": "…"}'),
        ({"prompt": "p", "temprature": 1}, "unknown field 'temprature' (did you mean temperature?)"),
        ({"prompt": "p", "model": "m"}, "unknown field 'model'"),
        ({}, "one of prompt and messages is needed, and not both"),
        ({"prompt": "p", "messages": []}, "one of prompt and messages is needed, and not both"),
        ({"prompt": ""}, "the prompt is empty: give at least one character"),
        ({"prompt": 3}, "prompt is 3: it must be a text"),
        ({"prompt": "\ud800"}, "prompt is not valid Unicode: half a character at offset 0"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": ["Hi"]}, """a message is 'Hi': write it like {"role": "user", "content": "…"}"""),
        ({"prompt": "p", "id": [1]}, "id is [1]: it must be a text or a whole number"),
        ({"prompt": "p", "temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"prompt": "p", "top_k": 1.5}, "top_k is 1.5: it must be a whole number"),
        ({"prompt": "p", "top_p": 2}, "top_p is 2.0: it must be in [0, 1]"),
        ({"prompt": "p", "stop": "x"}, "stop is 'x': it must be a list"),
        ('{"prompt": "p", "prompt": "q"}', "key 'prompt' comes twice: leave one out"),
        ('{"prompt": "p", "logit_bias": {"3": 1, "3": 2}}', "key '3' comes twice: leave one out"),
        (
            {"prompt": "p", "logit_bias": [[3, 1], [3, 2]]},
            "logit_bias is [[3, 1], [3, 2]]: id 3 comes twice: leave one out",
        ),
    ],
)
def test_wrong_line_gets_an_error_and_others_go_on(files: Files, line: object, error: str) -> None:
    files.write(line, {"id": "b", "prompt": "q"})
    result = files.run()
    assert (result.exit_code, result.stderr) == (3, "2 lines: 1 answered, 1 failed, 0 done before\n")
    first, second = files.records()
    assert (first["index"], second["index"], second["text"]) == (0, 1, "Hello wörld!")
    assert first["error"] == error


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", 10**400, "it is too large for a number of 64 bits"),
        ("top_k", 10**400, "it must lie in [-2^63, 2^63)"),
        ("stop_token_ids", [2**63], "it must lie in [-2^63, 2^63)"),
        ("logit_bias", {"3": -(10**400)}, "it is too large for a number of 64 bits"),
    ],
)
def test_number_that_overflows_is_an_error_of_its_line_not_of_the_run(
    files: Files, name: str, value: object, error: str
) -> None:
    files.write({"prompt": "p", name: value}, {"prompt": "q"})
    assert files.run().exit_code == 3
    first, second = files.records()
    assert first["error"].startswith(f"{name} is ")
    assert first["error"].endswith(f": {error}")
    assert second["text"] == "Hello wörld!"


def test_byte_order_mark_is_no_part_of_the_first_line(files: Files) -> None:
    files.source.write_bytes(b'\xef\xbb\xbf{"prompt": "p"}\n')
    llm = FakeLLM()
    assert files.run(llm=llm).exit_code == 0
    assert llm.asked[0][0] == "p"


def test_line_that_is_no_utf8_gets_an_error(files: Files) -> None:
    files.source.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "q"}\n')
    assert files.run().exit_code == 3
    assert files.records()[0]["error"].startswith("the line is not valid UTF-8: byte 0xff at offset 12")


def test_id_that_was_seen_before_gets_an_error_without_it(files: Files) -> None:
    files.write({"id": "a", "prompt": "p"}, {"id": "a", "prompt": "q"})
    assert files.run().exit_code == 3
    first, second = files.records()
    assert (first["id"], first["index"], first["error"]) == (None, 1, "id 'a' is also that of line 1")
    assert second["id"] == "a"


def test_error_of_a_line_keeps_its_id(files: Files) -> None:
    files.write({"id": "a", "prompt": "p", "top_p": 2})
    files.run()
    assert files.records()[0]["id"] == "a"


def test_lines_that_the_engine_refuses_or_fails_get_an_error(files: Files) -> None:
    files.write(
        {"prompt": "a b c"}, {"prompt": "NAN"}, {"messages": [{"role": "tool", "content": "x"}]}, {"prompt": "p"}
    )
    assert files.run(llm=FakeLLM(context_limit=3)).exit_code == 3
    errors = {record["index"]: record.get("error") for record in files.records()}
    assert errors[0].startswith("prompt of 3 tokens does not fit into the context limit of 3 tokens")
    assert (errors[1], errors[2], errors[3]) == ("logits are not numbers", "role tool is not known", None)


def test_last_line_that_the_engine_refuses_gets_an_error(files: Files) -> None:
    files.write({"messages": [{"role": "tool", "content": "x"}]})
    assert files.run().exit_code == 3
    assert files.errors() == ["role tool is not known"]


def test_second_run_asks_only_what_is_missing(files: Files) -> None:
    files.write({"prompt": "p"}, {"id": "b", "prompt": "q"}, {"prompt": "r", "top_p": 2})
    files.run()
    files.write({"prompt": "p"}, {"prompt": "new"}, {"prompt": "r", "top_p": 2}, {"id": "b", "prompt": "q"})
    llm = FakeLLM()
    result = files.run(llm=llm)
    assert (result.exit_code, result.stderr) == (
        3, "4 lines: 1 answered, 0 failed, 3 done before (1 of them failed)\n",
    )  # fmt: skip
    assert [prompt for prompt, _ in llm.asked] == ["new"]


def test_second_run_over_old_errors_alone_exits_3_like_the_first(files: Files) -> None:
    files.write({"prompt": "p", "top_p": 2})
    assert (files.run().exit_code, files.run().exit_code) == (3, 3)


OLD = {"id": "a", "prompt": "p", "top_k": 3}


@pytest.mark.parametrize(
    ("new", "args"),
    [
        ({**OLD, "prompt": "q"}, ()),
        ({"id": "a", "messages": [{"role": "user", "content": "p"}], "top_k": 3}, ()),
        ({**OLD, "top_k": 4}, ()),
        ({**OLD, "seed": 0}, ()),
        ({**OLD, "top_k": -1}, ()),
        (OLD, ("--temperature", "0.5")),
        (OLD, ("--seed", "1")),
    ],
)
def test_changed_line_is_refused_not_taken_for_answered(files: Files, new: object, args: tuple[str, ...]) -> None:
    files.write(OLD)
    files.run()
    with files.target.open("ab") as target:
        target.write(b'{"id": null, "ind')  # torn: not even that is mended
    before = files.target.read_bytes()
    files.write(new)
    llm = FakeLLM()
    result = files.run(*args, llm=llm)
    assert (result.exit_code, llm.configs, files.target.read_bytes()) == (2, [], before)
    assert "the line of id 'a' has changed since an earlier run dealt with it" in result.stderr
    assert "name another --output, go back to the old input and settings" in result.stderr


def test_changed_line_without_id_is_refused_with_its_index(files: Files) -> None:
    files.write({"prompt": "p"}, {"prompt": "q"})
    files.run()
    files.write({"prompt": "p"}, {"prompt": "r"})
    result = files.run()
    assert (result.exit_code, "the line of index 1 has changed" in result.stderr) == (2, True)


def test_line_with_an_error_that_was_mended_is_refused_until_its_record_is_deleted(files: Files) -> None:
    files.write({"prompt": "p", "top_p": 2})
    files.run()
    files.write({"prompt": "p", "top_p": 1})
    assert files.run().exit_code == 2
    files.target.write_bytes(b"")
    assert (files.run().exit_code, files.errors()) == (0, [])


def test_line_that_shared_an_id_and_lost_it_is_not_taken_for_dealt_with(files: Files) -> None:
    files.write({"id": "a", "prompt": "p"}, {"id": "a", "prompt": "q"})
    files.run()
    files.write({"id": "a", "prompt": "p"}, {"prompt": "q"})
    assert files.run().exit_code == 2


def test_run_with_nothing_to_do_loads_no_model(files: Files) -> None:
    files.write({"prompt": "p"})
    files.run()
    llm = FakeLLM()
    assert files.run(llm=llm).exit_code == 0
    assert llm.configs == []


@pytest.mark.parametrize("size", [1, 8, 20, -2])
def test_torn_last_line_is_cut_off_and_asked_again(files: Files, size: int) -> None:
    files.write({"prompt": "p"}, {"prompt": "q"})
    files.run()
    first, second = files.target.read_bytes().splitlines(keepends=True)
    files.target.write_bytes(first + second[:size])
    assert files.run().exit_code == 0
    assert files.target.read_bytes() == first + second


def test_last_line_without_its_newline_is_kept(files: Files) -> None:
    files.write({"prompt": "p"}, {"prompt": "q"})
    files.run()
    data = files.target.read_bytes()
    files.target.write_bytes(data.removesuffix(b"\n"))
    assert files.run().stderr == "2 lines: 0 answered, 0 failed, 2 done before\n"
    assert files.target.read_bytes() == data


@pytest.mark.parametrize(
    "data", [b"my thesis\n", b"my thesis", b'{"id": 1}\n', b"[1]\n", b'{"id": null, "index": "0", "hash": ""}\n']
)
def test_output_that_holds_something_else_is_refused_unchanged(files: Files, data: bytes) -> None:
    files.write({"prompt": "p"})
    files.target.write_bytes(data)
    result = files.run()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is no answer of this program: name another file" in result.stderr
    assert files.target.read_bytes() == data


@pytest.mark.parametrize("line_id", ["[1]", "{}", "1.5", "true"])
def test_record_with_an_odd_id_is_refused_without_type_error(files: Files, line_id: str) -> None:
    files.write({"prompt": "p"})
    files.target.write_text(f'{{"id": {line_id}, "index": 0, "hash": ""}}\n')
    result = files.run()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "line 1 is no answer of this program" in result.stderr


def test_output_that_another_run_writes_is_refused(files: Files) -> None:
    files.write({"prompt": "p"})
    with files.target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = files.run()
    assert (result.exit_code, "is being written by another run" in result.stderr) == (2, True)


def test_output_that_is_the_input_is_refused(files: Files) -> None:
    files.write({"prompt": "p"})
    files.target.symlink_to(files.source)
    result = files.run()
    assert (result.exit_code, "is the file of prompts" in result.stderr) == (2, True)


@pytest.mark.parametrize("name", ["source", "target"])
def test_file_that_cannot_be_opened_is_refused(files: Files, name: str) -> None:
    files.write({"prompt": "p"})
    setattr(files, name, Path("/no/such/folder/x.jsonl"))
    result = files.run()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "No such file or directory" in result.stderr


def test_stdin_and_stdout_may_be_used() -> None:
    args = ("generate", "m", "--jsonl", "-", "--output", "-")
    result = run_ambidex(*args, stdin='{"prompt": "p"}\n')
    assert (result.exit_code, json.loads(result.stdout)["text"]) == (0, "Hello wörld!")


def test_output_that_is_an_endless_device_is_written_and_never_read(files: Files) -> None:
    files.write({"prompt": "p"})
    files.target = Path("/dev/full")
    result = files.run()
    assert (result.exit_code, result.stderr) == (
        1, "error: --output /dev/full cannot be written: No space left on device: "
        "mend that and run the same command again\n",
    )  # fmt: skip


def test_output_that_is_a_pipe_is_written_without_being_taken_up(files: Files) -> None:
    files.write({"prompt": "p"})
    os.mkfifo(files.target)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(files.target.read_bytes()))
    reader.start()
    result = files.run()
    reader.join()
    assert (result.exit_code, json.loads(read[0])["text"]) == (0, "Hello wörld!")


def test_output_that_is_a_folder_is_refused_with_the_reason(files: Files) -> None:
    files.write({"prompt": "p"})
    files.target = files.target.parent
    result = files.run()
    assert (result.exit_code, result.stderr) == (
        2, f"error: --output {files.target} cannot be written: Is a directory\n",
    )  # fmt: skip


def test_full_disk_names_the_output_and_the_next_run_goes_on(files: Files) -> None:
    """A limit on the size of files stands for the disk; it tears the second answer."""
    files.write({"prompt": "p"}, {"prompt": "q"})
    files.run()
    answers = files.target.read_bytes()
    files.target.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(answers) - 10, limits[1]))
    try:
        result = files.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (result.exit_code, files.target.read_bytes()) == (1, answers[:-10])
    assert result.stderr.startswith(f"error: --output {files.target} cannot be written: File too large")
    assert files.run().stderr == "2 lines: 1 answered, 0 failed, 1 done before\n"
    assert files.target.read_bytes() == answers


def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on(files: Files) -> None:
    files.write(*({"prompt": f"{i}"} for i in range(4)))
    pieces = 0

    def interrupt(_: int) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 8:  # three pieces an answer: in the third
            signal.raise_signal(signal.SIGINT)

    result = files.run(llm=FakeLLM(before_piece=interrupt))
    assert (result.exit_code, len(files.records())) == (130, 2)
    assert "stopped after 2 answers: the same command goes on from here" in result.stderr


def test_killed_run_goes_on_where_it_stopped(files: Files) -> None:
    """The process is killed while it holds two answers and computes the third."""
    files.write(*({"prompt": f"{i}"} for i in range(5)))
    code = f"""
import os, signal
from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from fake_llm import FakeLLM
pieces = 0
def kill(_):
    global pieces
    pieces += 1
    if pieces == 8:
        os.kill(os.getpid(), signal.SIGKILL)
args = ["generate", "m", "--jsonl", {str(files.source)!r}, "--output", {str(files.target)!r}]
AmbidexCommand().main(args, obj=Services(make_llm=FakeLLM(before_piece=kill).make))
"""
    killed = subprocess.run([sys.executable, "-c", code], env=CHILD_ENV, check=False, timeout=120)
    assert (killed.returncode, len(files.records())) == (-signal.SIGKILL, 2)
    llm = FakeLLM()
    result = files.run(llm=llm)
    assert (result.exit_code, result.stderr) == (0, "5 lines: 3 answered, 0 failed, 2 done before\n")
    assert sorted(record["index"] for record in files.records()) == [0, 1, 2, 3, 4]


class ForgetfulLLM(FakeLLM):
    """Answers nothing."""

    def generate_each(
        self, prompts: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        del prompts
        yield from ()


def test_engine_that_leaves_out_prompts_is_noticed(files: Files) -> None:
    files.write({"prompt": "p"})
    result = files.run(llm=ForgetfulLLM())
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "the engine left out 1 of 1 prompts" in result.stderr
