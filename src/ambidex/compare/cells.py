"""What a comparison measures: cells, each a point of models × variants × contexts × batches × KV budgets.

    speed      decode steps and prompt of one point (`ambidex.bench`)
    quality    one context's predictions and secrets against full attention (`ambidex.eval`); answers depend neither on
               the batch nor on where KV lies, so one serves all speeds of its context. But for `bounded` in its native
               form, which scans what the accelerator does not hold: its KV lies as in the smallest budget
    timeline   what each lane did in a few steps

A variant is a policy with settings, written `h2o`, `h2o:policy_percent=30` or `exact:stream_percent=100`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

from ambidex.core.config import EngineConfig, SettingKind
from ambidex.core.errors import ConfigError
from ambidex.core.policy import LANE_PRESETS, BoundedScores, PolicyName
from ambidex.core.units import parse_size

ENGINE: Final = "ambidex"
_FIXED: Final = ("model", "policy", "kv_gpu_tokens", "trace", "verify")
"""Fields of `EngineConfig` that a variant cannot set: the comparison does."""


class CellKind(StrEnum):
    """What is measured in a cell."""

    SPEED = "speed"
    QUALITY = "quality"
    TIMELINE = "timeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with settings of the engine; `name` is what the user wrote."""

    name: str
    policy: PolicyName
    settings: Mapping[str, Any]

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read `POLICY[:SETTING=VALUE]…`.

        Raises:
            ConfigError: the policy or a setting is unknown, or a value is none of the setting.
        """
        policy, *pieces = word.split(":")
        pairs: list[str] = []
        for piece in pieces:
            if pairs and "=" in pairs[-1] and "=" not in piece:
                pairs[-1] += f":{piece}"  # of a value, as in `mlp_sparsity=teal:0.5`
            else:
                pairs.append(piece)
        if policy not in list(PolicyName):
            raise ConfigError(f"policy {policy!r} of {word!r} is unknown: known are {', '.join(PolicyName)}")
        kinds = {item.name: item.metadata.get("kind") for item in dataclasses.fields(EngineConfig)}
        settings: dict[str, Any] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            kind = kinds.get(name)
            if not equals or kind is None or name in _FIXED:
                raise ConfigError(
                    f"{pair!r} of variant {word!r} is no setting: write SETTING=VALUE with an engine setting that the "
                    f"comparison does not set itself ({', '.join(_FIXED)})"
                )
            settings[name] = _read(kind, value, pair)
        variant = cls(name=word, policy=PolicyName(policy), settings=settings)
        EngineConfig(model="none", policy=variant.policy, **settings)  # a wrong value is refused here, not in a cell
        return variant

    @property
    def may_be_native(self) -> bool:
        """It is exact, or the bounded policy and not asked for its reference form: quality is that of its own steps."""
        scores = self.settings.get("bounded_scores", BoundedScores.AUTO)
        is_bounded = self.policy is PolicyName.BOUNDED and scores in (BoundedScores.AUTO, BoundedScores.SCAN)
        return is_bounded or self.policy is PolicyName.EXACT

    def config(self, base: EngineConfig, *, model: str, kv_gpu_tokens: int | None) -> EngineConfig:
        """The settings of an engine."""
        own = {"model": model, "policy": self.policy, **self.settings}
        if kv_gpu_tokens is not None:
            own["kv_gpu_tokens"] = kv_gpu_tokens
        return dataclasses.replace(base, **own)


def _read(kind: SettingKind, value: str, pair: str) -> Any:
    try:
        match kind:
            case SettingKind.INT | SettingKind.SIZE:
                return parse_size(value)
            case SettingKind.NUMBER:
                return float(value)
            case SettingKind.SWITCH:
                return {"true": True, "false": False}[value]
            case SettingKind.TEXT | SettingKind.CHOICE:
                return value
    except (ValueError, KeyError, ConfigError):
        raise ConfigError(f"{pair!r} has no value of the kind {kind}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point. `variant` is its name; `batch` is None for quality, `kv_gpu_tokens` mostly; `settings` are those that
    figures depend on besides: of the engine where they differ from the defaults, steps, texts and rounds."""

    kind: CellKind
    engine: str
    model: str
    variant: str
    context: int
    batch: int | None
    kv_gpu_tokens: int | None
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Names the cell among those of a report: equal for equal cells, whenever they are measured."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """For a JSON line."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The cell of a line.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return cls(**{**record, "kind": CellKind(record["kind"])})

    def words(self) -> str:
        """For people."""
        budget = "" if self.kv_gpu_tokens is None else f", {self.kv_gpu_tokens} tokens of KV on the accelerator"
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.kind} of {self.variant}, context {self.context}{batch}{budget}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All that is compared, and how each cell is measured.

    `budgets`: tokens of KV on the accelerator tier; None leaves it to the engine. `timelines`: variants whose lanes are
    drawn. `kinds`: of cells that are measured.
    """

    models: Sequence[str]
    variants: Sequence[Variant]
    contexts: Sequence[int]
    batches: Sequence[int]
    budgets: Sequence[int | None]
    steps: int
    num_predicted: int
    num_rounds: int
    text_name: str
    text_sha256: str
    timelines: Sequence[str]
    kinds: Sequence[CellKind] = tuple(CellKind)

    def cells(self, base: EngineConfig) -> list[list[Cell]]:
        """Cells in the order in which they are measured, those that share an engine together."""
        own = changed_settings(base)
        groups = []
        for model in self.models:
            for variant in self.variants:
                shared = {"engine": ENGINE, "model": model, "variant": variant.name}
                for budget in self.budgets:
                    groups.append(
                        [
                            Cell(kind=CellKind.SPEED, context=context, batch=batch, kv_gpu_tokens=budget,
                                 settings={**own, "steps": self.steps, "text_sha256": self.text_sha256}, **shared)
                            for context in self.contexts
                            for batch in self.batches
                        ]
                    )  # fmt: skip
                    if variant.name in self.timelines:
                        groups.append(
                            [Cell(kind=CellKind.TIMELINE, context=max(self.contexts), batch=min(self.batches),
                                  kv_gpu_tokens=budget, settings=own, **shared)]
                        )  # fmt: skip
                if variant.policy in LANE_PRESETS and any(other.name == PolicyName.EXACT for other in self.variants):
                    continue  # it attends all keys: its quality is that of `exact`
                quality = {"predict": self.num_predicted, "rounds": self.num_rounds, "text": self.text_name,
                           "text_sha256": self.text_sha256, **own}  # fmt: skip
                budget = None
                if variant.may_be_native:
                    budget = min((size for size in self.budgets if size is not None), default=None)
                    quality["form"] = "as answered"
                groups.append(
                    [
                        Cell(kind=CellKind.QUALITY, context=context, batch=None, kv_gpu_tokens=budget, settings=quality,
                             **shared)
                        for context in self.contexts
                    ]
                )  # fmt: skip
        return [group for group in groups if group[0].kind in self.kinds]


def changed_settings(config: EngineConfig) -> dict[str, Any]:
    """Settings of an engine that are not at their defaults, as JSON has them."""
    return {
        item.name: str(value) if isinstance(value, StrEnum) else value
        for item in dataclasses.fields(config)
        if item.name != "model" and (value := getattr(config, item.name)) != item.default
    }
