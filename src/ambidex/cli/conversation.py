"""A conversation: its messages, and what a line of the user does to them. A text is a turn, `/word` a command."""

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Final

from ambidex.cli.config_file import closest
from ambidex.cli.interrupt import Interrupt
from ambidex.cli.services import LLMService
from ambidex.cli.settings import as_flags
from ambidex.cli.show import explain_end, print_table, print_text, say, stats_rows
from ambidex.cli.source import check_text
from ambidex.core.errors import AmbidexError, CallerError, ContextLengthError, RequestError, RequestFailedError
from ambidex.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from ambidex.engine.outputs import RequestOutput

HELP: Final = (
    ("/help", "this list"),
    ("/reset", "forget the conversation (the system message stays)"),
    ("/undo", "forget the last turn"),
    ("/system TEXT", "set the system message; without TEXT: show it"),
    ("/stats", "what the engine did so far"),
    ("/exit", "leave (also Ctrl-D)"),
    ("//TEXT", "say TEXT with one / before it"),
    ("Ctrl-C", "stop the answer; what has come stays in the conversation"),
)


class Conversation:
    """Talks with an engine. `exit_code` is that of the last turn that failed, 0 if none did."""

    def __init__(self, llm: LLMService, params: SamplingParams, system: str | None) -> None:
        self.exit_code = 0
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._num_tokens = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._show_help,
            "/reset": self._reset,
            "/undo": self._undo,
            "/system": self._set_system,
            "/stats": self._show_stats,
        }

    def take(self, line: str) -> bool:
        """Do what a line says; False: leave."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._turn(line)
        elif line.startswith("//"):
            self._turn(line[1:])
        else:
            return self._command(*line.strip().partition(" ")[::2])
        return True

    def _command(self, word: str, rest: str) -> bool:
        if word == "/exit":
            return False
        if word in self._commands:
            self._commands[word](rest.strip())
        else:
            say(f"error: unknown command {word}{closest(word, [*self._commands, '/exit'])}: /help lists them")
        return True

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            check_text(text, name="the line")
            output = self._answer()
        except (RequestError, RequestFailedError) as error:
            self._messages.pop()
            self._fail(error)
            return
        if output.text:
            self._messages.append({"role": "assistant", "content": output.text})
        else:
            self._messages.pop()

    def _answer(self) -> "RequestOutput":
        """Show the answer to the messages as it comes, until its end or Ctrl-C."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        output = None
        with Interrupt() as interrupt, closing(self._llm.chat_stream(system + self._messages, self._params)) as stream:
            for output in stream:
                print_text(output.delta, newline=False)
                if interrupt.is_set:
                    break
        print_text("")
        if output is None or output.finish_reason is FinishReason.ERROR:
            raise RequestFailedError(output.error or "no reason given" if output else "the engine gave no answer")
        if output.is_finished:
            explain_end(output, self._params)
        else:
            say("stopped")
        self._num_tokens = len(output.prompt_token_ids) + len(output.token_ids)
        return output

    def _fail(self, error: AmbidexError) -> None:
        self.exit_code = 2 if isinstance(error, CallerError) else 1
        if isinstance(error, ContextLengthError):
            say(
                f"error: the conversation has {error.num_prompt_tokens} tokens, the context limit is {error.limit}: "
                f"/undo or /reset makes room, or start with a larger --max-context-len"
            )
        else:
            say(f"error: {as_flags(str(error))}")

    def _show_help(self, _: str) -> None:
        print_table(("command", ""), HELP, err=True)

    def _reset(self, _: str) -> None:
        self._messages.clear()
        self._num_tokens = 0
        say("the conversation is empty")

    def _undo(self, _: str) -> None:
        if not self._messages:
            say("there is nothing to undo")
            return
        del self._messages[-2:]
        say(f"{len(self._messages) // 2} turns left")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        say(f"system message: {self._system or 'none'}")

    def _show_stats(self, _: str) -> None:
        rows = [("conversation", f"{len(self._messages) // 2} turns, {self._num_tokens} tokens at the last answer")]
        print_table(("statistics", ""), rows + stats_rows(self._llm.stats()), err=True)
