"""What `generate`, `chat` and `serve` share: options of a run, the model's name, the engine for as long as it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ambidex.cli.config_file import use_config_file
from ambidex.cli.run_plan import show_outcome, show_run_plan
from ambidex.cli.services import LLMService, Services
from ambidex.cli.settings import (
    RUN_SETTINGS,
    ChosenSettings,
    Owner,
    Setting,
    SettingOption,
    VerbOption,
    choose_settings,
)
from ambidex.cli.show import loading_bar, print_table, stats_rows
from ambidex.cli.values import source_of
from ambidex.core.errors import ConfigError


class SettingsCommand(click.Command):
    """A verb that runs a model: its own parameters, then the model, the file, `-v` and all settings, or those given."""

    def __init__(
        self,
        name: str,
        *,
        params: Sequence[click.Parameter],
        settings: Sequence[Setting] = RUN_SETTINGS,
        **attributes: Any,
    ) -> None:
        common = [
            VerbOption(["-m", "--model"], metavar="MODEL", help="the model, instead of the argument"),
            VerbOption(
                ["--config"],
                type=click.Path(path_type=Path),
                is_eager=True,
                expose_value=False,
                callback=use_config_file,
                help="TOML file with settings, such as block_size = 32",
            ),
            VerbOption(["-v", "--verbose"], is_flag=True, help="show the effective configuration and statistics"),
        ]
        options = [SettingOption(setting) for setting in settings]
        super().__init__(name, params=[*params, *common, *options], **attributes)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own options first, then a section for each dataclass of settings."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *map(_section, Owner))}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections[_section(param.setting.owner) if isinstance(param, SettingOption) else "Options"].append(
                    record
                )
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        formatter.write_text(
            "Each flag is also an environment variable: --block-size is AMBIDEX_BLOCK_SIZE. "
            "A flag beats a variable, a variable beats the file."
        )

    def choose(self, ctx: click.Context, word: str | None) -> ChosenSettings:
        """The settings of this run; `word` is the model as an argument.

        Raises:
            ConfigError, RequestError: a value is wrong, or no model is named.
        """
        if word is not None:
            return choose_settings(ctx, model=word, model_source="MODEL")
        option = next(param for param in self.params if param.name == "model")
        model: str | None = ctx.params["model"]
        if model is None:
            raise ConfigError("no model is named: give a folder, a .gguf file, a Hub id, or smollm2")
        return choose_settings(ctx, model=model, model_source=source_of(ctx, option))


def quiet_option() -> VerbOption:
    """`--quiet`, of the verbs that say at start what lies where."""
    return VerbOption(["-q", "--quiet"], is_flag=True, help="do not say what lies where and how long steps take")


@contextmanager
def open_llm(
    services: Services, chosen: ChosenSettings, *, verbose: bool, shows_plan: bool = False
) -> Iterator[LLMService]:
    """Load the model, report what was chosen if asked to, and close the engine at the end.

    Args:
        shows_plan: say what lies where, if not all lies on the accelerator, and at the end what came of it.
    """
    with loading_bar(chosen.engine.model) as progress:
        llm = services.make_llm(chosen.engine, progress)
    try:
        if verbose:
            # The engine's list of settings does not know where they came from; ours does.
            obtained = [row for row in llm.report.rows() if row[0] != "settings"]
            print_table(("section", "name", "value", "source"), [*chosen.rows, *obtained], err=True)
        plan = llm.report.plan if shows_plan else None
        if plan is not None:
            show_run_plan(plan)
        yield llm
        if plan is not None:
            show_outcome(llm.decode_outcome())
        if verbose:
            print_table(("statistics", ""), [*stats_rows(llm.stats()), *_compared(llm)], err=True)
    except KeyboardInterrupt:
        raise  # the engine may stand in the middle of a step: leave it as it is, the program ends
    except BaseException:
        llm.close()
        raise
    llm.close()


def _compared(llm: LLMService) -> list[tuple[str, str]]:
    """What steps should have taken and took, where that was predicted."""
    seconds = llm.compare_decode()
    if seconds is None:
        return []
    predicted, measured = (1e3 * value for value in seconds)
    return [("decode step", f"{predicted:.2f} ms predicted, {measured:.2f} ms measured")]


def _section(owner: Owner) -> str:
    return f"{owner.capitalize()} settings"
