"""`ambidex cache`: what a running server keeps of earlier requests, and how to drop it. Talks to the server alone."""

import json
import urllib.error
import urllib.request
from typing import Any, Final

import click

from ambidex.cli.settings import VerbOption
from ambidex.cli.show import print_json, print_table, print_text
from ambidex.core.errors import ConfigError, MachineError
from ambidex.core.units import format_size

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 30.0
"""Longer than a step: the engine answers between two of them."""
MAX_ANSWER_BYTES: Final = 1 << 20


def _options() -> list[click.Parameter]:
    return [
        VerbOption(["--url"], metavar="URL", default=DEFAULT_URL, show_default=True, help="where the server listens"),
        VerbOption(["--api-key"], metavar="TEXT", help="key of the server; rather set the variable: others see flags"),
        VerbOption(["as_json", "--json"], is_flag=True, help="print the server's JSON instead of text"),
    ]


class CacheGroup(click.Group):
    """The verbs of `cache`."""

    def __init__(self) -> None:
        super().__init__(
            "cache",
            short_help="List or drop what a running server keeps.",
            help="Look at the prefix cache of a running server. It lies in the memory of that server, and on "
            "disk if the server keeps sessions (--session-dir).",
            commands=[
                click.Command(
                    "ls", callback=list_cached, params=_options(), short_help="Show what is kept on each tier."
                ),
                click.Command(
                    "rm",
                    callback=drop_cached,
                    params=_options(),
                    short_help="Drop what was kept.",
                    help="Drop what was kept of requests with this key; those of other keys stay, running ones go on.",
                ),
            ],
        )


def list_cached(*, url: str, api_key: str | None, as_json: bool) -> int:
    """Run `cache ls`."""
    found = ask(url, "GET", api_key)
    if as_json:
        print_json(found)
        return 0
    rows = [(tier, format_size(size)) for tier, size in found["cached_bytes"].items()]
    if found["num_saved_blocks"]:
        rows.append(("disk", format_size(found["saved_bytes"])))
    print_table(("tier", "kept"), rows)
    print_text(
        f"{found['num_cached_tokens']} tokens of prompts were found, {found['num_computed_tokens']} computed; "
        f"{found['num_evicted_blocks']} blocks had to leave, {found['num_cache_mismatches']} held other tokens"
    )
    if found["num_restored_tokens"] or found["num_refused_files"]:
        print_text(
            f"{found['num_restored_tokens']} tokens were read from disk, {found['num_refused_files']} files refused"
        )
    return 0


def drop_cached(*, url: str, api_key: str | None, as_json: bool) -> int:
    """Run `cache rm`."""
    dropped = ask(url, "DELETE", api_key)
    if as_json:
        print_json(dropped)
    else:
        print_text(f"{dropped['num_dropped_blocks']} blocks were dropped")
    return 0


def ask(url: str, method: str, api_key: str | None) -> dict[str, Any]:
    """What the server answers.

    Raises:
        ConfigError: the URL or the key is wrong.
        MachineError: nobody answers there, or it is no server of ours, or its engine is not ready.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}: it must begin with http:// or https://")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/ambidex/cache", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            text = _message(error.read(MAX_ANSWER_BYTES)) or str(error)
        raise (ConfigError if error.code in (401, 403) else MachineError)(f"{url} refuses: {text}") from error
    except (OSError, ValueError) as error:  # nobody there, a URL that is none, an answer that is no JSON
        raise MachineError(f"no ambidex server answers at {url} ({error}): start one, or set --url") from error
    if not isinstance(found, dict):
        raise MachineError(f"what answers at {url} is no ambidex server: set --url")
    return found


def _message(data: bytes) -> str | None:
    """The message of an error in OpenAI's shape, if it is one."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None
