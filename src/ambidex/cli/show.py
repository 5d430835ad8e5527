"""How results, reports and progress look. Answers go to stdout, all else to stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ambidex.core.errors import MachineError
from ambidex.core.request import FinishReason, SamplingParams
from ambidex.core.step import SampledToken
from ambidex.core.units import format_size

if TYPE_CHECKING:
    from ambidex.engine.outputs import RequestOutput
    from ambidex.engine.stats import EngineStats

_PIPE_WIDTH: Final = 240
"""Columns of a table that goes into a file or pipe: wide enough that no row is broken."""


def say(text: str) -> None:
    """A line that is no part of an answer."""
    click.echo(text, err=True)


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Writing to stdout may fail.

    Raises:
        BrokenPipeError: nobody reads any more.
        MachineError: stdout takes no more for another reason, such as a full disk.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MachineError(
            f"standard output cannot be written: {error.strerror or error}: mend that or send it elsewhere"
        ) from error


def print_text(text: str, *, newline: bool = True) -> None:
    """A text on stdout, at once."""
    with naming_stdout():
        click.echo(text, nl=newline)


def print_json(value: object) -> None:
    """One JSON text on stdout."""
    print_text(json.dumps(value, ensure_ascii=False, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", err: bool = False) -> None:
    """A table without lines; in a pipe its rows are never broken."""
    console = Console(stderr=err)
    if not console.is_terminal:
        console = Console(stderr=err, width=_PIPE_WIDTH)
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    with naming_stdout(), console.capture() as capture:  # a capture writes too: nothing, which a full disk refuses
        console.print(table, highlight=False)
    show = say if err else print_text
    show("\n".join(line.rstrip() for line in capture.get().splitlines()))


def stats_rows(stats: "EngineStats") -> list[tuple[str, str]]:
    """What an engine did, for people."""
    rows = [
        ("steps", str(stats.num_steps)),
        ("tokens computed", str(stats.num_computed_tokens)),
        ("tokens answered", str(stats.num_output_tokens)),
        *((f"KV on {tier}", f"{format_size(size)} now, {format_size(stats.peak_kv_bytes.get(tier, 0))} at most")
          for tier, size in stats.kv_bytes.items()),
        *((f"KV read by {lane} lane", format_size(size)) for lane, size in stats.lane_bytes.items()),
        ("block moves", f"{stats.num_moves}, {stats.num_failed_moves} failed"),
        *([("blocks verified", f"{stats.num_verified_blocks}, {stats.num_corrupt_blocks} had changed")]
          if stats.num_verified_blocks else []),
        ("preemptions", str(stats.num_preemptions)),
        ("tokens from the prefix cache", str(stats.num_cached_tokens)),
        *((f"fallback {kind}", str(num)) for kind, num in stats.fallbacks.items()),
        *selection_rows(stats),
        *hot_rows(stats),
        *neuron_rows(stats),
    ]  # fmt: skip
    for name, num_tokens, seconds in (
        ("prefill", stats.num_prefill_tokens, stats.prefill_seconds),
        ("decode", stats.num_decode_tokens, stats.decode_seconds),
    ):
        if seconds:
            rows.append((f"{name} speed", f"{num_tokens / seconds:.1f} tokens/s over {seconds:.1f} s of steps"))
    return rows


def selection_rows(stats: "EngineStats") -> list[tuple[str, str]]:
    """What the policy chose, if there is one."""
    figures = stats.selection
    if figures is None:
        return []
    rows = [("keys attended", f"{100 * figures.attended_share:.1f} % of those that decode steps could see")]
    if figures.num_bounded:
        rows += [
            ("mass dropped", f"{figures.mean_dropped_mass:.2e}, at most {figures.max_dropped_mass:.2e}"),
            ("error bound", f"at most {figures.max_error_bound:.3g} in an attention output"),
        ]
    if figures.num_verified:
        rows.append(("bounds verified", f"{figures.num_verified}, largest error {figures.max_error:.3g}"))
    return rows


def hot_rows(stats: "EngineStats") -> list[tuple[str, str]]:
    """What came of copies of hot blocks, if there can be any."""
    figures = stats.hot
    if figures is None:
        return []
    return [
        (
            "hot blocks copied",
            f"{figures.num_promoted}, {figures.num_dropped} of them given up, {figures.num_blocks} there now",
        ),
        (
            "kept keys of blocks in DRAM",
            f"{100 * figures.hit_rate:.1f} % in blocks with a copy, in {figures.num_looks} looks",
        ),
    ]


def neuron_rows(stats: "EngineStats") -> list[tuple[str, str]]:
    """What was left out of MLPs, if anything can be."""
    figures = stats.neurons
    if figures is None:
        return []
    rows = [
        (
            "neurons in DRAM",
            f"{100 * figures.active_share:.1f} % active for a token, {100 * figures.read_share:.1f} % of columns read",
        )
    ]
    if figures.num_screened:
        rows.append(("rows that a screen let through", f"{100 * figures.candidate_share:.1f} %"))
    if figures.num_checked:
        rows.append(("active neurons that the predictor found", f"{100 * figures.recall:.1f} %, where it was checked"))
    if (cache := figures.cache) is not None:
        rows += [
            ("active neurons on the accelerator", f"{100 * cache.hit_rate:.1f} %"),
            (
                "neurons moved",
                f"{cache.num_moved} pairs in {cache.num_moves} moves, {format_size(cache.moved_bytes)}, "
                f"{cache.num_failed_moves} moves failed",
            ),
        ]
    return rows


def stats_json(stats: "EngineStats") -> dict[str, Any]:
    """The same for a script; bytes and seconds."""
    return {
        "num_steps": stats.num_steps,
        "num_computed_tokens": stats.num_computed_tokens,
        "num_output_tokens": stats.num_output_tokens,
        "num_preemptions": stats.num_preemptions,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_prefill_tokens": stats.num_prefill_tokens,
        "num_decode_tokens": stats.num_decode_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "num_moves": stats.num_moves,
        "num_failed_moves": stats.num_failed_moves,
        "fallbacks": dict(stats.fallbacks),
        "num_verified_blocks": stats.num_verified_blocks,
        "num_corrupt_blocks": stats.num_corrupt_blocks,
        "kv_bytes": dict(stats.kv_bytes),
        "peak_kv_bytes": dict(stats.peak_kv_bytes),
        "lane_bytes": dict(stats.lane_bytes),
        "seconds": dict(stats.seconds),
        "selection": None if stats.selection is None else asdict(stats.selection),
        "hot": None if stats.hot is None else asdict(stats.hot),
        "neurons": None if stats.neurons is None else asdict(stats.neurons),
    }


def answer_json(output: "RequestOutput", token_text: Callable[[int], str]) -> dict[str, Any]:
    """An answer for a script.

    Args:
        token_text: text of a token id, for log-probabilities.
    """
    answer: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(output.token_ids),
        "token_ids": list(output.token_ids),
    }
    if output.logprobs is not None:
        answer["logprobs"] = [_logprob_json(token, token_text) for token in output.logprobs]
    return answer


def explain_end(output: "RequestOutput", params: SamplingParams) -> None:
    """Say so if the answer was cut."""
    if output.finish_reason is not FinishReason.LENGTH:
        return
    num_tokens = len(output.token_ids)
    is_own_limit = num_tokens == params.max_output_tokens
    limit = "--max-output-tokens" if is_own_limit else "the context limit, --max-context-len"
    say(f"note: the answer ends after {num_tokens} token{'s' * (num_tokens != 1)} ({limit})")


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Progress of loading a model, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with _progress(TaskProgressColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(f"loading {escape(name)}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting_bar(title: str, *, done: int, total: int) -> Iterator[Callable[[], None]]:
    """Progress of counted things, on a terminal only; call the result once for each."""
    with _progress(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, completed=done, total=total)
        yield lambda: bar.advance(task)


def _progress(*columns: Any) -> Progress:
    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal)


def _logprob_json(token: SampledToken, token_text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "token": token_text(token.token_id),
        "logprob": token.logprob,
        "top_logprobs": [
            {"token_id": token_id, "token": token_text(token_id), "logprob": logprob}
            for token_id, logprob in token.top_logprobs
        ],
    }
