"""Many prompts: each line of one JSONL file is a prompt, each line of another its answer. A killed run can go on."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ambidex.cli.jsonl_in import BadLine, Line, read_lines
from ambidex.cli.jsonl_out import ResultFile, open_results
from ambidex.cli.services import LLMService, Services
from ambidex.cli.session import open_llm
from ambidex.cli.settings import ChosenSettings, as_flags
from ambidex.cli.show import answer_json, counting_bar, say
from ambidex.core.errors import ConfigError, InternalError, RequestError
from ambidex.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from ambidex.engine.outputs import RequestOutput

EXIT_SOME_LINES_FAILED: Final = 3
"""The run ended, but some lines of its output have an `error`."""


def answer_file(
    services: Services, chosen: ChosenSettings, source: str, target: str, *, verbose: bool, shows_plan: bool
) -> int:
    """Answer the lines of `source` that `target` does not have yet; returns the exit code.

    Args:
        verbose, shows_plan: as in `open_llm`.

    Raises:
        ConfigError: a file cannot be used. MachineError: `target` takes no more. Others as when an engine is built.
    """
    if source != "-" and target != "-" and Path(target).is_file() and Path(source).is_file():
        _refuse_same_file(Path(source), Path(target))
    lines = read_lines(source, defaults=chosen.sampling, seed=chosen.engine.seed)
    with open_results(target, lines) as results:
        num_done = len(lines) - len(results.todo)
        if results.todo:
            try:
                _answer_lines(services, chosen, results, verbose=verbose, shows_plan=shows_plan, num_done=num_done)
            except KeyboardInterrupt:
                say(f"stopped after {results.num_answered} answers: the same command goes on from here")
                raise
        failed_before = f" ({results.num_failed_before} of them failed)" if results.num_failed_before else ""
        say(
            f"{len(lines)} lines: {results.num_answered} answered, {results.num_failed} failed, "
            f"{num_done} done before{failed_before}"
        )
        return EXIT_SOME_LINES_FAILED if results.num_failed + results.num_failed_before else 0


def _answer_lines(
    services: Services,
    chosen: ChosenSettings,
    results: ResultFile,
    *,
    verbose: bool,
    shows_plan: bool,
    num_done: int,
) -> None:
    lines = results.todo
    good = [line for line in lines if isinstance(line, Line)]
    with (
        open_llm(services, chosen, verbose=verbose, shows_plan=shows_plan) as llm,
        counting_bar("answering", done=num_done, total=num_done + len(lines)) as advance,
    ):
        for line in lines:
            if isinstance(line, BadLine):
                results.write_error(line, line.error)
                advance()
        for line, answer in _ask(llm, good):
            if isinstance(answer, str):
                results.write_error(line, answer)
            else:
                results.write_answer(line, answer_json(answer, llm.token_text))
            advance()
    num_left_out = len(lines) - results.num_answered - results.num_failed
    if num_left_out:
        raise InternalError(f"the engine left out {num_left_out} of {len(good)} prompts")


def _ask(llm: LLMService, lines: Sequence[Line]) -> "Iterator[tuple[Line, RequestOutput | str]]":
    """Each line with its answer, or with the reason why there is none, as they come."""
    asked: list[Line] = []
    refused: list[tuple[Line, str]] = []

    def prompts() -> Iterator[tuple[str | list[int], SamplingParams]]:
        for line in lines:
            try:
                prompt = line.prompt if isinstance(line.prompt, str) else llm.render_chat(line.prompt)
            except RequestError as error:
                refused.append((line, as_flags(str(error))))
            else:
                asked.append(line)
                yield prompt, line.params

    with closing(llm.generate_each(prompts())) as answers:
        for place, output in answers:
            yield from refused
            refused.clear()
            if output.finish_reason is FinishReason.ERROR:
                yield asked[place], as_flags(output.error or "the engine gives no reason")
            else:
                yield asked[place], output
    yield from refused


def _refuse_same_file(source: Path, target: Path) -> None:
    if source.samefile(target):
        raise ConfigError(f"--output {target} is the file of prompts: name another file")
