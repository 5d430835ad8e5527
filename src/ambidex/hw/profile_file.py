"""Profiles as JSON: one object, its version first, rates in bytes/s, seconds and bytes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.hw.profile import (
    CpuRates,
    Curve,
    GpuRates,
    HardwareProfile,
    LinkRates,
    Machine,
    NeuronRates,
    NodeRates,
    Products,
)

VERSION: Final = 3
"""Of the form that is read and written here; a change that an older reader would get wrong adds 1."""
MAX_BYTES: Final = 1 << 20
"""A profile has some 5 KiB."""
_NEURON_CURVES: Final = tuple(NeuronRates.__dataclass_fields__)
AGAIN: Final = "measure this machine again with `ambidex calibrate`"


def default_path(environ: Mapping[str, str]) -> Path:
    """Where this machine's profile lies: `ambidex/profile.json` in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    cache = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME") or os.path.expanduser("~")  # Path's raises for a user without a home
    folder = Path(cache) if cache.startswith("/") else Path(home) / ".cache"
    return folder / "ambidex" / "profile.json"


def has_profile(environ: Mapping[str, str]) -> bool:
    """Whether this machine's profile is there, and its folder may be looked into."""
    return os.path.exists(default_path(environ))  # Path's raises where a folder may not be entered


def profile_json(profile: HardwareProfile) -> dict[str, Any]:
    """A profile as JSON values."""
    cpu = _rates_json(profile.cpu)
    cpu["read_bytes_per_s"] = profile.cpu.read_bytes_per_s.points
    cpu["tiles_from"] = dict(profile.cpu.tiles_from)
    cpu["neurons"] = {
        kind: {name: getattr(rates, name).points for name in _NEURON_CURVES}
        for kind, rates in profile.cpu.neurons.items()
    }
    return {
        "version": VERSION,
        "machine": asdict(profile.machine) if profile.machine else None,
        "date": profile.date,
        "source": profile.source,
        "cpu": cpu,
        "gpu": _rates_json(profile.gpu) if profile.gpu else None,
        "link": asdict(profile.link) if profile.link else None,
        "nodes": [asdict(node) for node in profile.nodes],
    }


def parse_profile(value: object, *, where: str) -> HardwareProfile:
    """A profile from JSON values.

    Raises:
        ConfigError: it is none, of another version, or a value is missing or wrong; `where` names it in the message.
    """
    fields = _Fields(value, where)
    version = fields.take("version", int)
    if version != VERSION:
        raise ConfigError(f"{where} has version {version}, version {VERSION} is read here: {AGAIN}")
    machine = fields.object("machine")
    gpu, link = fields.object("gpu"), fields.object("link")
    cpu = fields.object("cpu")
    if cpu is None:
        raise ConfigError(f"{where} has no rates of a CPU: {AGAIN}")
    try:
        profile = HardwareProfile(
            machine=None if machine is None else _parse_machine(machine),
            date=fields.take("date", str),
            source=fields.take("source", str),
            cpu=_parse_cpu(cpu),
            gpu=None if gpu is None else _parse_gpu(gpu),
            link=None if link is None else _parse_link(link),
            nodes=tuple(map(_parse_node, fields.objects("nodes"))),
        )
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}: {AGAIN}") from None
    fields.end()
    return profile


def read_profile(path: Path) -> HardwareProfile:
    """The profile in a file.

    Raises:
        ConfigError: there is none, or what is there is no profile.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no profile of this machine at {path}: make one with `ambidex calibrate`, or name presets "
            f"(--gpu, --cpu, --link)"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}: {AGAIN}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: it is no profile, {AGAIN}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): {AGAIN}") from None
    return parse_profile(value, where=str(path))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object so that a reader finds the former one or the whole new one.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be written: {reason}: name another file") from error


class _Fields:
    """The keys of a JSON object, each taken once; what is left over in the end is refused."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is not a JSON object: {AGAIN}")
        self._left, self._where = dict(value), where

    def take(self, name: str, *kinds: type) -> Any:
        """The value of a key."""
        value = self._left.pop(name, None)
        if not isinstance(value, kinds) or isinstance(value, bool):
            named = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{self._where}: `{name}` is {str(value)[:60]!r}: it must be of type {named}: {AGAIN}")
        return value

    def number(self, name: str) -> float:
        """A number above 0."""
        value = float(self.take(name, int, float))
        if not 0 < value < float("inf"):
            raise ConfigError(f"{self._where}: `{name}` is {value}: it must be above 0: {AGAIN}")
        return value

    def object(self, name: str) -> "_Fields | None":
        """An object of its own, or null."""
        if self._left.get(name, False) is None:
            del self._left[name]
            return None
        return _Fields(self._left.pop(name, None), f"{self._where}: `{name}`")

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._left.pop(name, None)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: `{name}` is {str(value)[:60]!r}: it must be true or false: {AGAIN}")
        return value

    def objects(self, name: str) -> "list[_Fields]":
        """A list of objects; empty if it is missing."""
        values = self._left.pop(name, [])
        if not isinstance(values, list):
            raise ConfigError(f"{self._where}: `{name}` is {str(values)[:60]!r}: it must be a list: {AGAIN}")
        return [_Fields(value, f"{self._where}: `{name}` {place}") for place, value in enumerate(values)]

    def number_or_none(self, name: str) -> float | None:
        """A number above 0, or null."""
        if self._left.get(name, False) is None:
            del self._left[name]
            return None
        return self.number(name)

    def table(self, name: str) -> dict[str, Any]:
        """An object whose keys are free."""
        table: dict[str, Any] = self.take(name, dict)
        return table

    def end(self) -> None:
        """Refuse what was not taken."""
        if self._left:
            names = ", ".join(sorted(self._left))
            raise ConfigError(f"{self._where} has unknown keys ({names[:120]}): {AGAIN}")

    @property
    def where(self) -> str:
        """What messages call it."""
        return self._where


def _rates_json(rates: CpuRates | GpuRates) -> dict[str, Any]:
    values = {name: getattr(rates, name) for name in type(rates).__dataclass_fields__}
    values["products"] = {kind: curve.points for kind, curve in rates.products.curves.items()}
    return values


def _parse_machine(fields: _Fields) -> Machine:
    machine = Machine(
        cpu=fields.take("cpu", str), cores=fields.take("cores", int), gpu=fields.take("gpu", str, type(None))
    )
    fields.end()
    return machine


def _parse_cpu(fields: _Fields) -> CpuRates:
    attention = fields.table("attention_bytes_per_s")
    cpu = CpuRates(
        name=fields.take("name", str),
        num_threads=fields.take("num_threads", int),
        read_bytes_per_s=_parse_curve(fields.take("read_bytes_per_s", list), f"{fields.where}: `read_bytes_per_s`"),
        products=_parse_products(fields),
        attention_bytes_per_s={kind: _Fields(attention, fields.where).number(kind) for kind in attention},
        layer_s=fields.number("layer_s"),
        step_s=fields.number("step_s"),
        request_s=fields.number("request_s"),
        tiles_from=_parse_tiles(fields.table("tiles_from"), f"{fields.where}: `tiles_from`"),
        neurons=_parse_neurons(fields.table("neurons"), f"{fields.where}: `neurons`"),
    )
    fields.end()
    return cpu


def _parse_tiles(table: Mapping[str, Any], where: str) -> dict[str, int | None]:
    for kind, tokens in table.items():
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ConfigError(f"{where} of {kind} is {str(tokens)[:60]!r}: it must be from 1 on, or null: {AGAIN}")
    return dict(table)


def _parse_neurons(table: Mapping[str, Any], where: str) -> dict[str, NeuronRates]:
    found = {}
    for kind, value in table.items():
        fields = _Fields(value, f"{where} of {kind}")
        found[kind] = NeuronRates(
            **{name: _parse_curve(fields.take(name, list), f"{fields.where}: `{name}`") for name in _NEURON_CURVES}
        )
        fields.end()
    return found


def _parse_gpu(fields: _Fields) -> GpuRates:
    gpu = GpuRates(
        name=fields.take("name", str),
        memory_bytes=fields.take("memory_bytes", int),
        read_bytes_per_s=fields.number("read_bytes_per_s"),
        products=_parse_products(fields),
        attention_bytes_per_s=fields.number("attention_bytes_per_s"),
        layer_s=fields.number("layer_s"),
        launch_s=fields.number("launch_s"),
    )
    fields.end()
    return gpu


def _parse_link(fields: _Fields) -> LinkRates:
    names = ("to_gpu_bytes_per_s", "from_gpu_bytes_per_s", "beside_bytes_per_s", "handover_s")
    link = LinkRates(name=fields.take("name", str), **{name: fields.number(name) for name in names})
    fields.end()
    return link


def _parse_node(fields: _Fields) -> NodeRates:
    node_id, is_memory_only = fields.take("node_id", int), fields.flag("is_memory_only")
    node = NodeRates(
        node_id=node_id,
        is_memory_only=is_memory_only,
        read_bytes_per_s=fields.number("read_bytes_per_s"),
        latency_s=fields.number_or_none("latency_s"),
        to_gpu_bytes_per_s=fields.number_or_none("to_gpu_bytes_per_s"),
    )
    fields.end()
    return node


def _parse_products(fields: _Fields) -> Products:
    table = fields.table("products")
    return Products(
        {kind: _parse_curve(points, f"{fields.where}: products of {kind}") for kind, points in table.items()}
    )


def _parse_curve(value: object, where: str) -> Curve:
    if not isinstance(value, list) or not all(
        isinstance(point, list)
        and len(point) == 2
        and isinstance(point[0], int)
        and isinstance(point[1], int | float)
        and not any(isinstance(number, bool) for number in point)
        for point in value
    ):
        raise ConfigError(f"{where} is no list of [count, rate]: {AGAIN}")
    try:
        return Curve(tuple((count, float(rate)) for count, rate in value))
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}: {AGAIN}") from None
