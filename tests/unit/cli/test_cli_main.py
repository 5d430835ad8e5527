import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_llm import CHILD_ENV, FakeLLM, run_ambidex

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.errors import InternalError, TierFullError

RUN = "from ambidex.cli.main import run; run()"


def run_process(
    *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *args],
        input=stdin, capture_output=True, env={**CHILD_ENV, **(env or {})}, check=False, timeout=120,
    )  # fmt: skip


def test_version_prints_name_and_version() -> None:
    result = run_ambidex("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "ambidex")


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "ambidex", "--version"]
    result = subprocess.run(command, capture_output=True, env=CHILD_ENV, check=True, timeout=120)
    assert result.stdout.split()[0] == b"ambidex"
    assert result.stderr == b""


def test_no_verb_prints_help() -> None:
    result = run_ambidex()
    assert result.exit_code == 0
    for verb in ("generate", "chat", "models", "doctor"):
        assert f"\n  {verb} " in result.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("generate", "--blok-size", "3"), "error: No such option '--blok-size'. Did you mean '--block-size'?"),
        (("genrate",), "error: No such command 'genrate'. Did you mean 'generate'?"),
        (("generate", "--block-size"), "error: Option '--block-size' requires an argument"),
        (("doctor", "now"), "error: Got unexpected extra argument (now)"),
    ],
)
def test_wrong_command_line_is_one_line_and_exit_2(args: tuple[str, ...], line: str) -> None:
    result = run_ambidex(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_wrong_command_line_names_the_help_of_its_verb() -> None:
    result = CliRunner().invoke(AmbidexCommand(), ["generate", "--nope"], prog_name="ambidex")
    assert "(ambidex generate --help lists what there is)" in result.stderr


def test_unknown_variable_is_refused_with_the_closest_name() -> None:
    result = run_ambidex("models", env={"AMBIDEX_BLOK_SIZE": "3"})
    assert result.exit_code == 2
    assert result.stderr == (
        "error: unknown environment variable AMBIDEX_BLOK_SIZE (did you mean AMBIDEX_BLOCK_SIZE?): "
        "unset or correct it\n"
    )


def test_limit_that_is_no_instruction_set_is_refused_with_what_there_is() -> None:
    result = run_ambidex("models", env={"AMBIDEX_MAX_ISA": "AVX512_BF16"})
    assert result.exit_code == 2
    assert result.stderr == (
        "error: AMBIDEX_MAX_ISA is 'AVX512_BF16' (did you mean avx512bf16?): it limits the instruction set of native "
        "ops and must be one of generic, avx2, avx512, avx512bf16, amx: correct or unset it\n"
    )
    assert run_ambidex("--version", env={"AMBIDEX_MAX_ISA": "generic"}).exit_code == 0


def test_variable_of_tests_is_left_alone() -> None:
    assert run_ambidex("--version", env={"AMBIDEX_TEST_ANY": "1"}).exit_code == 0
    assert run_ambidex(env={"AMBIDEX_TEST_ANY": "1"}).exit_code == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TierFullError("tier gpu is\nfull"), "error: tier gpu is full\n"),
        (ValueError("odd"), "error: ValueError: odd (ambidex --traceback shows where)\n"),
        (InternalError("odd"), "error: InternalError: odd (ambidex --traceback shows where)\n"),
        (MemoryError(), "error: MemoryError (ambidex --traceback shows where)\n"),
    ],
)
def test_failure_that_is_not_the_users_is_one_line_and_exit_1(error: Exception, line: str) -> None:
    def fail(*_: object) -> FakeLLM:
        raise error

    result = CliRunner().invoke(AmbidexCommand(), ["generate", "m", "p"], obj=Services(make_llm=fail))
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.parametrize(("args", "env"), [(["--traceback"], {}), ([], {"AMBIDEX_TRACEBACK": "1"})])
def test_traceback_is_shown_when_asked_for(args: list[str], env: dict[str, str]) -> None:
    def fail(*_: object) -> FakeLLM:
        raise ValueError("odd")

    command = [*args, "generate", "m", "p"]
    result = CliRunner(env=env).invoke(AmbidexCommand(), command, obj=Services(make_llm=fail))
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("error: ValueError: odd (ambidex --traceback shows where)\n")


def test_ctrl_c_in_generate_keeps_what_was_printed_and_exits_130() -> None:
    def interrupt(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    result = run_ambidex("generate", "m", "p", llm=FakeLLM(before_piece=interrupt))
    assert (result.exit_code, result.stdout) == (130, "Hello")
    assert "error" not in result.stderr


def test_failure_on_the_way_out_of_ctrl_c_still_exits_130() -> None:
    def fail(*_: object) -> FakeLLM:
        try:
            raise KeyboardInterrupt
        finally:
            raise InternalError("cannot close")

    result = CliRunner().invoke(AmbidexCommand(), ["generate", "m", "p"], obj=Services(make_llm=fail))
    assert (result.exit_code, result.stderr) == (130, "")


def test_script_shows_errors_without_traceback() -> None:
    result = run_process("generate", "/no/such/model", "p")
    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.startswith(b"error: ")
    assert result.stderr.count(b"\n") == 1


def test_reader_that_goes_away_ends_the_program_without_words() -> None:
    code = (
        "from ambidex.cli.main import AmbidexCommand; from ambidex.cli.services import Services;"
        "from fake_llm import FakeLLM; llm = FakeLLM(pieces=('x' * 1000,) * 1000);"
        "AmbidexCommand().main(['generate', 'm', 'p', '--max-output-tokens', 'none'], obj=Services(make_llm=llm.make))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=CHILD_ENV,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=120), errors) == (141, b"")


def test_full_disk_under_stdout_is_one_line_and_exit_1() -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", RUN, "--help"], stdout=full, stderr=subprocess.PIPE, check=False, timeout=120
        )
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: OSError")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "args", [("generate", "m", "p"), ("generate", "m", "--jsonl", "-", "--output", "-"), ("models",)]
)
def test_verb_with_a_full_disk_under_stdout_names_it_in_one_line(args: tuple[str, ...], unbuffered: str) -> None:
    code = (
        "import sys; from ambidex.cli.main import AmbidexCommand; from ambidex.cli.services import Services;"
        "from fake_llm import FakeLLM; AmbidexCommand().main(sys.argv[1:], obj=Services(make_llm=FakeLLM().make))"
    )
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code, *args], stdout=full, stderr=subprocess.PIPE, input=b'{"prompt": "p"}',
            env={**CHILD_ENV, "PYTHONUNBUFFERED": unbuffered}, check=False, timeout=120,
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: standard output cannot be written: No space left on device")
    assert result.stderr.count(b"\n") == 1


def test_help_does_not_wait_for_torch() -> None:
    code = f"import sys\ntry:\n    {RUN}\nexcept SystemExit:\n    print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, "generate", "--help"], env=CHILD_ENV, capture_output=True, check=True, timeout=120
    )
    assert result.stdout.endswith(b"False\n")


def test_completion_lists_verbs_and_choices() -> None:
    env = {"_AMBIDEX_COMPLETE": "bash_complete", "COMP_WORDS": "ambidex gen", "COMP_CWORD": "1"}
    assert run_process(env=env).stdout == b"plain,generate\n"
    env |= {"COMP_WORDS": "ambidex generate --device c", "COMP_CWORD": "3"}
    assert run_process(env=env).stdout == b"plain,cpu\nplain,cuda\n"
