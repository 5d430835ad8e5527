"""What the user may set for a server. Imports nothing heavy: the command line reads the fields."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ambidex.core.config import SettingKind, check_settings, setting
from ambidex.core.errors import ConfigError
from ambidex.core.units import format_size

MIN_KEY_CHARS = 8
"""Of an API key: shorter ones are guessed."""
MAX_KEY_FILE_BYTES = 1024**2
"""Each request compares its key with all of them."""


class LogFormat(StrEnum):
    """`text`: `name=value` words. `json`: one object a line."""

    TEXT = "text"
    JSON = "json"


class ToolFormat(StrEnum):
    """How a model writes its tool calls. `auto`: as its chat template shows."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    Raises:
        ConfigError: a value is out of its range, or they are not safe together.
    """

    host: str = setting("127.0.0.1", SettingKind.TEXT, "address to listen on; other than loopback needs an API key")
    port: int = setting(8000, SettingKind.INT, "port to listen on; 0 takes a free one", low=0, high=65535)
    api_key: str | None = setting(
        None, SettingKind.TEXT, "key that clients must send; rather set the variable: others see flags in ps"
    )
    api_key_file: str | None = setting(None, SettingKind.TEXT, "file with one key a line; each of them is accepted")
    insecure: bool = setting(False, SettingKind.SWITCH, "listen on other than loopback without a key")
    allowed_hosts: tuple[str, ...] = setting(
        (), SettingKind.TEXT, "name that clients may call this machine, beside localhost, IP addresses and its own "
        "name (repeatable)",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), SettingKind.TEXT, "web origin whose pages may call the server, such as https://chat.example (repeatable)"
    )
    served_model_name: tuple[str, ...] = setting(
        (), SettingKind.TEXT, "name by which clients ask for the model; default: MODEL (repeatable)"
    )
    lenient: bool = setting(
        False, SettingKind.SWITCH, "unknown request fields are left out and listed in warnings, not refused"
    )
    web: bool = setting(True, SettingKind.SWITCH, "serve the web page at /")
    tool_format: ToolFormat = setting(ToolFormat.AUTO, SettingKind.CHOICE, "how the model writes tool calls")
    log_format: LogFormat = setting(LogFormat.TEXT, SettingKind.CHOICE, "form of the log lines on stderr")
    otlp_endpoint: str | None = setting(
        None, SettingKind.TEXT, "send a trace span of each request to this OpenTelemetry collector, such as "
        "http://127.0.0.1:4318/v1/traces; needs ambidex[otel]",
    )  # fmt: skip
    max_body: int = setting(32 * 1024**2, SettingKind.SIZE, "largest request body", unit="bytes", low=1024)
    max_choices: int = setting(
        32, SettingKind.INT, "answers of one request: prompts times n", unit="answers", low=1, high=4096
    )
    max_prompt_tokens: int | None = setting(
        None, SettingKind.INT, "longest prompt; default: what the context limit leaves", unit="tokens", low=1
    )
    max_queue: int = setting(
        256, SettingKind.INT, "answers that may wait or run at the same time; more are refused with 429",
        unit="answers", low=1,
    )  # fmt: skip
    guide_s: float = setting(
        5, SettingKind.NUMBER, "longest time to compile a JSON schema, regex or grammar", unit="seconds", low=0
    )
    ping_s: float = setting(
        10, SettingKind.NUMBER, "a stream that is silent for so long gets a comment line, so that proxies keep it open",
        unit="seconds", low=0,
    )  # fmt: skip
    stall_s: float = setting(
        60, SettingKind.NUMBER, "an engine that spends longer in one stage is called stalled by /ready",
        unit="seconds", low=0,
    )  # fmt: skip
    drain_s: float = setting(
        30, SettingKind.NUMBER, "after SIGTERM answers may run on for so long; after Ctrl-C for 1 second",
        unit="seconds", low=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.is_loopback and not self.insecure and self.api_key is None and self.api_key_file is None:
            raise ConfigError(
                f"--host {self.host} lets other machines in, and there is no API key: set AMBIDEX_API_KEY or "
                f"--api-key-file, or say --insecure"
            )
        for key in () if self.api_key is None else (self.api_key,):
            _check_key(key, "the API key")

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def read_api_keys(self) -> tuple[str, ...]:
        """The keys that are accepted, from setting and file; none: no key is needed.

        Raises:
            ConfigError: the file cannot be read, holds no key, or one that is too short.
        """
        keys = [] if self.api_key is None else [self.api_key]
        if self.api_key_file is None:
            return tuple(keys)
        try:
            lines = _read_keys(Path(self.api_key_file)).split("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {self.api_key_file} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {self.api_key_file} holds no key: write one a line")
        for number, key in enumerate(found, start=1):
            _check_key(key, f"key {number} of {self.api_key_file}")
        return (*keys, *found)


def _read_keys(path: Path) -> str:
    with path.open("rb") as file:  # which may be a device or a pipe without end
        data = file.read(MAX_KEY_FILE_BYTES + 1)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ValueError(f"it has more than {format_size(MAX_KEY_FILE_BYTES)}, the most that is read")
    return data.decode("utf-8")


def _check_key(key: str, name: str) -> None:
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{name} must have at least {MIN_KEY_CHARS} printable ASCII characters and no space, it has {len(key)}"
        )
