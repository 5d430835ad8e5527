"""`ambidex generate`: one prompt to stdout, or many from JSONL to JSONL."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ambidex.cli.batch import answer_file
from ambidex.cli.services import LLMService, Services
from ambidex.cli.session import SettingsCommand, open_llm, quiet_option
from ambidex.cli.settings import ChosenSettings, VerbOption
from ambidex.cli.show import answer_json, explain_end, print_json, print_text, stats_json
from ambidex.cli.source import check_text, is_stdin_terminal, read_prompt_file, read_prompt_stdin
from ambidex.core.errors import RequestError, RequestFailedError
from ambidex.core.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The positional arguments, told apart: MODEL (None: given otherwise) and PROMPT (None: from stdin or a file)."""

    model: str | None
    prompt: str | None


class GenerateCommand(SettingsCommand):
    """Options of `generate`."""

    def __init__(self) -> None:
        super().__init__(
            "generate",
            callback=generate,
            short_help="Answer a prompt, or many from a JSONL file.",
            help="Continue PROMPT with MODEL and stream the answer to stdout.\n\n"
            "MODEL is a folder, a .gguf file, a Hub id, or smollm2; it may be given by -m, AMBIDEX_MODEL or the file "
            "instead. Without PROMPT, or with -, the prompt is read from stdin.",
            params=[
                click.Argument(["words"], nargs=-1, metavar="[MODEL] [PROMPT]"),
                VerbOption(["-f", "--file"], type=click.Path(path_type=Path), help="read the prompt from this file"),
                VerbOption(["--jsonl"], metavar="IN", help='many prompts: each line {"prompt": …} or {"messages": …}'),
                VerbOption(["-o", "--output"], metavar="OUT", help="answers to --jsonl; the next run takes them up"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print one JSON object instead of text"),
                quiet_option(),
            ],
        )


@click.pass_context
def generate(
    ctx: click.Context,
    /,
    *,
    words: tuple[str, ...],
    model: str | None,
    file: Path | None,
    jsonl: str | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **_settings: Any,
) -> int:
    """Run the verb; the settings are read from the context."""
    check_options(ctx, file=file, jsonl=jsonl, output=output, as_json=as_json)
    command = ctx.command
    assert isinstance(command, GenerateCommand), "the callback belongs to this command"
    split = split_words(ctx, words, has_model=model is not None, has_prompt=file is not None or jsonl is not None)
    chosen = command.choose(ctx, split.model)
    if chosen.sampling.logprobs is not None and not as_json and jsonl is None:
        raise click.UsageError("--logprobs shows itself only with --json or --jsonl", ctx)
    services: Services = ctx.obj
    if jsonl is not None and output is not None:
        return answer_file(services, chosen, jsonl, output, verbose=verbose, shows_plan=not quiet)
    prompt = read_prompt(file, split.prompt)
    with open_llm(services, chosen, verbose=verbose, shows_plan=not quiet and not as_json) as llm:
        return print_answer(llm, chosen, prompt) if not as_json else print_answer_json(llm, chosen, prompt)


def check_options(
    ctx: click.Context, *, file: Path | None, jsonl: str | None, output: str | None, as_json: bool
) -> None:
    """Refuse options that do not fit together.

    Raises:
        click.UsageError: two of them do not.
    """
    if jsonl is not None and file is not None:
        raise click.UsageError("--file and --jsonl exclude each other", ctx)
    if jsonl is not None and as_json:
        raise click.UsageError("--json and --jsonl exclude each other: OUT is JSON anyway", ctx)
    if (jsonl is None) != (output is None):
        raise click.UsageError("--jsonl IN and --output OUT belong together", ctx)


def split_words(ctx: click.Context, words: tuple[str, ...], *, has_model: bool, has_prompt: bool) -> Words:
    """Tell MODEL and PROMPT apart: a single word is the one that is not given otherwise, and the model if both may be.

    Raises:
        click.UsageError: too many words.
    """
    limit = 1 if has_prompt else 2
    is_model_named = has_model and ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if len(words) > limit - is_model_named:
        extra = words[limit - is_model_named]
        raise click.UsageError(f"unexpected argument {extra!r}: quote a prompt of several words", ctx)
    match words:
        case ():
            return Words(model=None, prompt=None)
        case (word,) if has_model and not has_prompt:
            return Words(model=None, prompt=word)
        case (word,):
            return Words(model=word, prompt=None)
        case _:
            return Words(model=words[0], prompt=words[1])


def read_prompt(file: Path | None, word: str | None) -> str:
    """The prompt from where it is.

    Raises:
        RequestError: there is none, it is empty or no valid text.
    """
    if file is not None:
        prompt = read_prompt_file(file)
    elif word is not None and word != "-":
        prompt = check_text(word, name="PROMPT")
    elif word is None and is_stdin_terminal():
        raise RequestError("no prompt: give PROMPT, --file FILE, or pipe it into stdin")
    else:
        prompt = read_prompt_stdin()
    if not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    return prompt


def print_answer(llm: LLMService, chosen: ChosenSettings, prompt: str) -> int:
    """Stream the answer's text."""
    output = None
    for output in llm.stream(prompt, chosen.sampling):
        print_text(output.delta, newline=False)
    print_text("")
    if output is None or output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or "no reason given" if output else "the engine gave no answer")
    explain_end(output, chosen.sampling)
    return 0


def print_answer_json(llm: LLMService, chosen: ChosenSettings, prompt: str) -> int:
    """Print the whole answer, with counts and the engine's statistics."""
    *_, output = llm.stream(prompt, chosen.sampling)
    if output.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(output.error or "no reason given")
    print_json({"model": chosen.engine.model, **answer_json(output, llm.token_text), "stats": stats_json(llm.stats())})
    return 0
