"""Settings that have a flag, a variable and a key in the configuration file, made from the fields of the dataclasses.

    flag  >  environment AMBIDEX_*  >  file  >  default

A default is stated in the dataclass; `max_output_tokens` alone has another one here.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import click

from ambidex.cli.values import (
    Reader,
    ValueType,
    check_ids,
    choice_reader,
    is_given,
    items_of,
    optional_reader,
    read_bias,
    read_float,
    read_int,
    read_size,
    read_switch,
    read_text,
    source_of,
)
from ambidex.core.config import EngineConfig, SettingKind, flag_name, variable_name, with_flags
from ambidex.core.errors import ConfigError
from ambidex.core.request import MAX_LOGPROBS, SamplingParams
from ambidex.core.units import format_size
from ambidex.server.config import ServerConfig

DEFAULT_OUTPUT_TOKENS: Final = 256
"""`SamplingParams` follows the completion APIs (16 tokens); who asks at a terminal wants a whole answer."""


SECRETS: Final = ("api_key",)
"""Settings that no report shows."""


class Owner(StrEnum):
    """The dataclass that a setting belongs to, by its title in help texts and reports."""

    ENGINE = "engine"
    SAMPLING = "sampling"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one of the dataclasses. `metavar` is its unit, or else its type, as help shows it."""

    name: str
    owner: Owner
    help: str
    metavar: str
    default: Any
    type: ValueType
    is_repeatable: bool = False
    is_switch: bool = False

    def read(self, value: object) -> Any:
        """Read a value of TOML or JSON.

        Raises:
            ValueError: it has the wrong type; the message follows "<name> is <value>: ".
        """
        if not self.is_repeatable:
            return self.type.read(value)
        items = tuple(self.type.read(item) for item in items_of(value))
        self.check_items(items)
        return items

    def check_items(self, items: Any) -> None:
        """Check the values of a repeatable setting together.

        Raises:
            ValueError: an id comes twice.
        """
        if self.type.read is read_bias:
            check_ids(items)

    @property
    def default_text(self) -> str:
        """The default as help shows it; empty if the help says it in words."""
        return "" if self.default is None or self.default == () else self.show(self.default)

    def show(self, value: Any) -> str:
        """A value as reports show it."""
        if value is None:
            return "auto" if self.owner is Owner.ENGINE else "none"
        if self.name in SECRETS:
            return "(set)"
        if self.type.name == SettingKind.SIZE:
            return format_size(value)
        if self.is_repeatable:
            return ", ".join(repr(item) for item in value) or "none"
        return str(value).lower() if self.is_switch else str(value)


class VerbOption(click.Option):
    """A flag that is also a variable: `--max-context-len` and `AMBIDEX_MAX_CONTEXT_LEN`."""

    def __init__(self, declarations: Iterable[str], **attributes: Any) -> None:
        super().__init__(list(declarations), **attributes)
        self.envvar = self.envvar or variable_name(self.opts[-1].removeprefix("--").replace("-", "_"))


class SettingOption(VerbOption):
    """A flag made from a `Setting`; click keeps None where nothing is given, the dataclass knows the default."""

    def __init__(self, setting: Setting) -> None:
        flag = flag_name(setting.name)
        super().__init__(
            [f"{flag}/--no-{flag[2:]}" if setting.is_switch else flag],
            type=click.BOOL if setting.is_switch else setting.type,
            multiple=setting.is_repeatable,
            default=None,
            metavar=None if setting.is_switch else setting.metavar,
            help=f"{setting.help}  [default: {setting.default_text}]" if setting.default_text else setting.help,
        )
        self.setting = setting

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Read the variable; click alone would not name it in the error."""
        try:
            return super().value_from_envvar(ctx)
        except ValueError as error:
            raise ConfigError(f'{self.envvar} must hold a JSON array, such as ["a", "b"]: {error}') from None

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Read the values, then look at them together."""
        items = super().type_cast_value(ctx, value)
        try:
            if self.setting.is_repeatable and items is not None:
                self.setting.check_items(items)
        except ValueError as error:
            raise ConfigError(f"{source_of(ctx, self)}: {error}") from None
        return items


def _field_setting(owner: Owner, field: "dataclasses.Field[Any]") -> Setting:
    kind: SettingKind = field.metadata["kind"]
    default: Any = field.default
    choices: tuple[str, ...] = ()
    read: Reader
    match kind:
        case SettingKind.INT:
            read = read_int
        case SettingKind.SIZE:
            read = read_size
        case SettingKind.TEXT:
            read = read_text
        case SettingKind.NUMBER:
            read = read_float
        case SettingKind.SWITCH:
            read = read_switch
        case SettingKind.CHOICE:
            words: type[StrEnum] = type(default)
            read, choices = choice_reader(words), tuple(words)
    is_size = kind is SettingKind.SIZE
    return Setting(
        name=field.name,
        owner=owner,
        help=field.metadata["help"],
        metavar="|".join(choices) or ("SIZE" if is_size else field.metadata["unit"].upper() or kind.value.upper()),
        default=default,
        type=ValueType(kind.value, optional_reader(read) if default is None else read, choices),
        is_repeatable=default == (),
        is_switch=kind is SettingKind.SWITCH,
    )


ENGINE_SETTINGS: Final = tuple(
    _field_setting(Owner.ENGINE, field) for field in dataclasses.fields(EngineConfig) if field.name != "model"
)
"""The fields of `EngineConfig` without the model, which is an argument."""

SERVER_SETTINGS: Final = tuple(_field_setting(Owner.SERVER, field) for field in dataclasses.fields(ServerConfig))
"""The fields of `ServerConfig`."""

_SAMPLING_DEFAULTS: Final[Mapping[str, Any]] = {
    **{field.name: field.default for field in dataclasses.fields(SamplingParams)},
    "max_output_tokens": DEFAULT_OUTPUT_TOKENS,
}


def _sampling_setting(name: str, read: Reader, metavar: str, help_text: str) -> Setting:
    default = _SAMPLING_DEFAULTS[name]
    return Setting(
        name=name,
        owner=Owner.SAMPLING,
        help=help_text,
        metavar=metavar,
        default=default,
        type=ValueType(metavar, read),
        is_repeatable=default == (),
        is_switch=read is read_switch,
    )


SAMPLING_SETTINGS: Final = tuple(
    _sampling_setting(*row)
    for row in (
        ("max_output_tokens", optional_reader(read_int), "TOKENS", "longest answer; none: up to the context limit"),
        ("min_output_tokens", read_int, "TOKENS", "before this many the answer does not end by itself"),
        ("temperature", read_float, "NUMBER", "flattens (above 1) or sharpens the distribution; 0 is greedy"),
        ("top_k", read_int, "TOKENS", "choose among the k likeliest; 0 is off"),
        ("top_p", read_float, "SHARE", "choose among the likeliest that hold this probability together; 1 is off"),
        ("min_p", read_float, "SHARE", "leave out tokens below this share of the likeliest's probability; 0 is off"),
        ("presence_penalty", read_float, "NUMBER", "subtracted from logits of tokens in the answer, −2 to 2"),
        ("frequency_penalty", read_float, "NUMBER", "the same, once for each occurrence, −2 to 2"),
        ("repetition_penalty", read_float, "FACTOR", "makes tokens of prompt and answer less likely; 1 is off"),
        ("seed", optional_reader(read_int), "INT", "seed of one request; default: made from the engine's"),
        ("stop", read_text, "TEXT", "end the answer before this text (repeatable)"),
        ("stop_token_ids", read_int, "ID", "end the answer at this token (repeatable)"),
        ("include_stop", read_switch, "", "show the stop text too"),
        ("ignore_eos", read_switch, "", "go on after an end-of-text token"),
        ("logprobs", optional_reader(read_int), "N", f"log-probabilities, also of the n ≤ {MAX_LOGPROBS} likeliest"),
        ("logit_bias", read_bias, "ID=BIAS", "added to the logit of a token, −100 to 100 (repeatable)"),
        ("json_schema", optional_reader(read_text), "JSON", "the answer is JSON that fits this schema"),
        ("regex", optional_reader(read_text), "PATTERN", "the answer matches this regular expression"),
        ("grammar", optional_reader(read_text), "TEXT", "the answer fits this grammar, in llguidance's Lark form"),
    )
)  # fmt: skip
"""The fields of `SamplingParams`."""

RUN_SETTINGS: Final = (*ENGINE_SETTINGS, *(setting for setting in SAMPLING_SETTINGS if setting.name != "seed"))
"""Those of a run at the terminal. `--seed` is the engine's: requests without one of their own make theirs from it."""
SERVE_SETTINGS: Final = (*SERVER_SETTINGS, *ENGINE_SETTINGS)
"""Those of a server: requests bring their sampling with them."""
FLAG_SETTINGS: Final = (*RUN_SETTINGS, *SERVER_SETTINGS)
"""All that have a flag, a variable and a key in the file."""


def as_flags(text: str) -> str:
    """A message of the engine as it reads at a terminal: settings are named by their flags."""
    return with_flags(text, {setting.name for setting in FLAG_SETTINGS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSettings:
    """What holds for a run. `rows` are (section, name, value, source) of each setting, as in `EngineReport.rows`."""

    engine: EngineConfig
    sampling: SamplingParams
    server: ServerConfig
    rows: tuple[tuple[str, str, str, str], ...]


def choose_settings(ctx: click.Context, *, model: str, model_source: str) -> ChosenSettings:
    """The settings of a verb; click has ranked flag, variable, file and default already.

    Raises:
        ConfigError, RequestError: a value is out of its range.
    """
    options = [param for param in ctx.command.params if isinstance(param, SettingOption)]
    values: dict[Owner, dict[str, Any]] = {owner: {} for owner in Owner}
    rows = [("model", "model", model, model_source)]
    for option in options:
        setting = option.setting
        value = ctx.params[setting.name] if is_given(ctx, option) else setting.default
        values[setting.owner][setting.name] = value
        rows.append((setting.owner, setting.name, setting.show(value), source_of(ctx, option)))
    return ChosenSettings(
        engine=EngineConfig(model=model, **values[Owner.ENGINE]),
        sampling=SamplingParams(**values[Owner.SAMPLING]),
        server=ServerConfig(**values[Owner.SERVER]),
        rows=tuple(rows),
    )
