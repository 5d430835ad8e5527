import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from click.testing import Result
from fake_llm import CHILD_ENV, FakeLLM, run_ambidex

from ambidex.core.errors import InternalError

ANSWER = "Hello wörld!\n"
CTRL_C, CTRL_D = "\x03", "\x04"


def talk(*lines: str, llm: FakeLLM | None = None, args: tuple[str, ...] = ("m",)) -> Result:
    """Give lines to `chat` through a pipe."""
    return run_ambidex("chat", *args, llm=llm, stdin="".join(line + "\n" for line in lines))


def turns(llm: FakeLLM) -> list[list[str]]:
    """What each answer was asked for, as `role:content`."""
    return [[f"{message['role']}:{message['content']}" for message in messages] for messages in llm.conversations]


def test_piped_line_is_a_turn_and_its_answer_goes_to_stdout() -> None:
    llm = FakeLLM()
    result = talk("Hi", llm=llm)
    assert (result.exit_code, result.stdout, result.stderr) == (0, ANSWER, "")
    assert (turns(llm), llm.is_closed) == ([["user:Hi"]], True)


def test_conversation_carries_its_history() -> None:
    llm = FakeLLM()
    talk("Hi", "And?", llm=llm)
    assert turns(llm)[1] == ["user:Hi", "assistant:Hello wörld!", "user:And?"]


def test_system_message_comes_first() -> None:
    llm = FakeLLM()
    talk("Hi", "/system Be brief.", "And?", llm=llm, args=("m", "--system", "Be kind."))
    assert [messages[0] for messages in turns(llm)] == ["system:Be kind.", "system:Be brief."]


def test_empty_line_is_no_turn() -> None:
    llm = FakeLLM()
    assert talk("", "  ", llm=llm).exit_code == 0
    assert llm.conversations == []


def test_reset_forgets_the_conversation() -> None:
    llm = FakeLLM()
    talk("Hi", "/reset", "Again", llm=llm)
    assert turns(llm)[1] == ["user:Again"]


def test_undo_forgets_the_last_turn() -> None:
    llm = FakeLLM()
    result = talk("One", "Two", "/undo", "Three", "/undo", "/undo", "/undo", llm=llm)
    assert turns(llm)[2] == ["user:One", "assistant:Hello wörld!", "user:Three"]
    assert result.stderr == "1 turns left\n1 turns left\n0 turns left\nthere is nothing to undo\n"


def test_exit_leaves_without_reading_on() -> None:
    llm = FakeLLM()
    assert talk("/exit", "Hi", llm=llm).exit_code == 0
    assert llm.conversations == []


def test_help_lists_the_commands() -> None:
    result = talk("/help")
    assert result.stdout == ""
    for word in ("/help", "/reset", "/undo", "/system TEXT", "/stats", "/exit", "Ctrl-C"):
        assert word in result.stderr


def test_stats_show_turns_tokens_and_bytes() -> None:
    rows = [" ".join(line.split()) for line in talk("Hi", "/stats").stderr.splitlines()]
    assert "conversation 1 turns, 4 tokens at the last answer" in rows
    assert "KV on gpu 2.0 KiB now, 0 B at most" in rows


def test_unknown_command_is_no_turn() -> None:
    llm = FakeLLM()
    result = talk("/rest", llm=llm)
    assert result.stderr == "error: unknown command /rest (did you mean /reset?): /help lists them\n"
    assert llm.conversations == []


def test_two_slashes_say_a_text_with_one() -> None:
    llm = FakeLLM()
    talk("//etc/hosts is?", llm=llm)
    assert turns(llm) == [["user:/etc/hosts is?"]]


def test_conversation_longer_than_the_limit_names_both_counts_and_goes_on() -> None:
    llm = FakeLLM(context_limit=5)
    result = talk("a b", "c d e", "/reset", "f", llm=llm)
    assert result.stdout == ANSWER * 2
    assert result.stderr.splitlines()[0] == (
        "error: the conversation has 7 tokens, the context limit is 5: /undo or /reset makes room, "
        "or start with a larger --max-context-len"
    )
    assert (result.exit_code, turns(llm)[2]) == (2, ["user:f"])


def test_turn_that_fails_in_the_engine_is_forgotten_and_others_go_on() -> None:
    llm = FakeLLM()
    result = talk("NAN", "Hi", llm=llm)
    assert (result.exit_code, result.stderr) == (1, "error: logits are not numbers\n")
    assert turns(llm)[1] == ["user:Hi"]


def test_failure_of_the_engine_itself_ends_the_program() -> None:
    def fail(_: int) -> None:
        raise InternalError("odd")

    result = talk("Hi", "Hi", llm=FakeLLM(before_piece=fail))
    assert (result.exit_code, result.stderr.count("error")) == (1, 1)


def test_invalid_utf8_on_stdin_names_line_and_offset() -> None:
    result = run_ambidex("chat", "m", stdin=b"Hi\nab\xff\n")
    assert (result.exit_code, result.stdout) == (2, ANSWER)
    assert result.stderr.startswith("error: line 2 of stdin is not valid UTF-8: byte 0xff at offset 2")


def test_answer_that_was_cut_is_explained() -> None:
    result = talk("Hi", args=("m", "--max-output-tokens", "1"))
    assert (result.stdout, result.stderr) == (
        "Hello\n", "note: the answer ends after 1 token (--max-output-tokens)\n",
    )  # fmt: skip


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    def interrupt(number: int) -> None:
        if number == 2 and len(llm.conversations) == 1:
            signal.raise_signal(signal.SIGINT)

    llm = FakeLLM(before_piece=interrupt)
    before = signal.getsignal(signal.SIGINT)
    result = talk("Hi", "And?", llm=llm)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello wörld\n" + ANSWER, "stopped\n")
    assert turns(llm)[1] == ["user:Hi", "assistant:Hello wörld", "user:And?"]
    assert llm.num_ended_streams == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_ends_the_program() -> None:
    def interrupt(_: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert talk("Hi", llm=FakeLLM(before_piece=interrupt)).exit_code == 130


def test_no_model_is_refused() -> None:
    result = talk(args=())
    assert (result.exit_code, result.stderr.startswith("error: no model is named")) == (2, True)


TERMINAL_CHAT = """
import fcntl, os, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from fake_llm import FakeLLM

wake_reader, wake_writer = os.pipe()
os.set_blocking(wake_writer, False)

def wait_for_ctrl_c(number):
    if number == 2 and len(llm.conversations) == 2:
        signal.set_wakeup_fd(wake_writer)
        os.write(1, b"(waiting)")
        os.read(wake_reader, 1)
        signal.set_wakeup_fd(-1)

llm = FakeLLM(before_piece=wait_for_ctrl_c)
AmbidexCommand().main(["chat", "m"], obj=Services(make_llm=llm.make))
"""


class Screen:
    """The other end of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = b""

    def expect(self, text: str, *, press: str = "") -> None:
        """Wait until the text has come, and forget all up to its end; press a key each second until then."""
        for _ in range(60):
            self.type(press)
            second_end = time.monotonic() + 1
            while text.encode() not in self._seen and self._has_more(second_end - time.monotonic()):
                self._seen += os.read(self._descriptor, 1000)
            if text.encode() in self._seen:
                self._seen = self._seen.partition(text.encode())[2]
                return
        raise AssertionError(f"waited for {text!r}, saw {self._seen!r}")

    def _has_more(self, seconds: float) -> bool:
        return bool(select.select([self._descriptor], [], [], max(0, seconds))[0])

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._descriptor, text.encode())


@contextmanager
def chat_at_terminal() -> Iterator[tuple[Screen, "subprocess.Popen[bytes]"]]:
    """Run `chat` at a terminal of its own."""
    ours, theirs = pty.openpty()
    env = {**CHILD_ENV, "TERM": "dumb"}
    command = [sys.executable, "-c", TERMINAL_CHAT]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=env)
    try:
        yield Screen(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def test_terminal_ctrl_c_stops_the_answer_or_hints_and_ctrl_d_leaves() -> None:
    with chat_at_terminal() as (screen, process):
        screen.expect("m is ready. /help lists the commands, Ctrl-D leaves.")
        screen.expect("> ")
        screen.type("Hi\n")
        screen.expect("Hello wörld!")
        screen.expect("> ")
        # Python loses a Ctrl-C that comes between its prompt and its wait for a key: a person presses it again.
        screen.expect("Ctrl-D or /exit leaves", press=CTRL_C)
        screen.expect("> ")
        screen.type("Again\n")
        screen.expect("Hello(waiting)")
        screen.type(CTRL_C)
        screen.expect("stopped")
        screen.expect("> ")
        screen.type(CTRL_D)
        assert process.wait(timeout=60) == 0
