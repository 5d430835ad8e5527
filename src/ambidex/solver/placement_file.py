"""Placements as JSON files, and pinned parts as words: both say the same, a file for all parts or for some of them.

{"version": 1,
 "layers": [{"layers": "0-39", "attention": "gpu", "mlp": {"gpu": 0.5, "cpu": 0.3, "stream": 0.2}}, …],
 "head": "gpu", "kv": {"gpu": 0.25, "cpu": 0.75}}

mlp.0-39=gpu:0.5,cpu:0.3,stream:0.2      attention=gpu      head=cpu      kv=gpu:0.25,cpu:0.75
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.solver.problem import Pins

VERSION: Final = 1
MAX_BYTES: Final = 1 << 24
"""A thousand layers, each told apart, take 200 KiB."""
LANES: Final = ("gpu", "cpu", "stream")
_LAYERS: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_PIN: Final = re.compile(r"(attention|mlp|head|kv)(?:\.([\d,-]+))?=(.+)")
_HELP: Final = "write it like mlp.0-9=cpu, attention=gpu:0.5,cpu:0.5, head=gpu or kv=gpu:0.25,stream:0.75"


def placement_json(placement: Placement, kv: KVShares) -> dict[str, Any]:
    """A placement as JSON values; equal layers that follow each other stand together."""
    runs: list[tuple[int, int, LayerPlacement]] = []
    for idx, layer in enumerate(placement.layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], idx, layer)
        else:
            runs.append((idx, idx, layer))
    return {
        "version": VERSION,
        "layers": [
            {
                "layers": str(first) if first == last else f"{first}-{last}",
                "attention": _split_json(layer.attention),
                "mlp": _split_json(layer.mlp),
            }
            for first, last, layer in runs
        ],
        "head": _split_json(placement.head),
        "kv": _split_json(kv),
    }


def read_pins(path: Path, num_layers: int) -> Pins:
    """The parts that a file names.

    Raises:
        ConfigError: it cannot be read, is none, or names layers that the model has not.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"placement file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a name with a null byte
        raise ConfigError(f"placement file {path} is not valid JSON: {error}") from None
    return parse_pins(value, num_layers, where=f"placement file {path}")


def parse_pins(value: object, num_layers: int, *, where: str) -> Pins:
    """The parts that JSON values name.

    Raises:
        ConfigError: they are no placement, or of another version, or name layers that the model has not.
    """
    fields = _object(value, ("version", "layers", "head", "kv"), where)
    if fields.get("version") != VERSION:
        raise ConfigError(f"{where}: `version` is {fields.get('version')!r}: version {VERSION} is read here")
    attention: dict[int, WeightSplit] = {}
    mlp: dict[int, WeightSplit] = {}
    entries = fields.get("layers", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: `layers` is no list")
    for entry in entries:
        item = _object(entry, ("layers", "attention", "mlp"), f"{where}: `layers`")
        layers = _parse_layers(item.get("layers"), num_layers, where)
        for name, found in (("attention", attention), ("mlp", mlp)):
            if name not in item:
                continue
            split = _parse_split(item[name], f"{where}: {name} of layers {item.get('layers')}")
            if twice := found.keys() & set(layers):
                raise ConfigError(f"{where}: {name} of layer {min(twice)} is there twice: leave one out")
            found.update(dict.fromkeys(layers, split))
    return Pins(
        attention=attention,
        mlp=mlp,
        head=_parse_split(fields["head"], f"{where}: head") if "head" in fields else None,
        kv=_parse_kv(fields["kv"], f"{where}: kv") if "kv" in fields else None,
    )


def parse_words(words: Iterable[str], num_layers: int) -> Pins:
    """The parts that words name, each `PART[.LAYERS]=WHERE`; a later word beats an earlier one.

    Raises:
        ConfigError: a word has another form, or names layers that the model has not.
    """
    attention: dict[int, WeightSplit] = {}
    mlp: dict[int, WeightSplit] = {}
    head: WeightSplit | None = None
    kv: KVShares | None = None
    for word in words:
        found = _PIN.fullmatch(word.strip())
        if found is None or (found[2] is not None and found[1] in ("head", "kv")):
            raise ConfigError(f"pin {word[:60]!r} is no PART=WHERE: {_HELP}")
        part, layers_text, where_text = found.groups()
        where = _parse_where(where_text, word)
        layers = [
            idx
            for piece in (layers_text.split(",") if layers_text else [f"0-{num_layers - 1}"])
            for idx in _parse_layers(piece, num_layers, f"pin {word[:60]!r}")
        ]
        match part:
            case "attention":
                attention |= dict.fromkeys(layers, _parse_split(where, f"pin {word!r}"))
            case "mlp":
                mlp |= dict.fromkeys(layers, _parse_split(where, f"pin {word!r}"))
            case "head":
                head = _parse_split(where, f"pin {word!r}")
            case _:
                kv = _parse_kv(where, f"pin {word!r}")
    return Pins(attention=attention, mlp=mlp, head=head, kv=kv)


def join_pins(first: Pins, second: Pins) -> Pins:
    """Both; where they differ the second holds."""
    return Pins(
        attention={**first.attention, **second.attention},
        mlp={**first.mlp, **second.mlp},
        head=second.head or first.head,
        kv=second.kv or first.kv,
    )


def whole_placement(pins: Pins, num_layers: int, *, where: str) -> tuple[Placement, KVShares | None]:
    """The placement that pins are, if they name all of a model.

    Raises:
        ConfigError: a part is missing.
    """
    for idx in range(num_layers):
        for name, found in (("attention", pins.attention), ("mlp", pins.mlp)):
            if idx not in found:
                raise ConfigError(f"{where} does not say where {name} of layer {idx} lies")
    if pins.head is None:
        raise ConfigError(f"{where} does not say where the head lies")
    layers = tuple(LayerPlacement(attention=pins.attention[idx], mlp=pins.mlp[idx]) for idx in range(num_layers))
    return Placement(layers=layers, head=pins.head), pins.kv


def _split_json(split: WeightSplit | KVShares) -> str | dict[str, float]:
    shares = dict(zip(LANES, (split.on_gpu, split.on_cpu, split.streamed), strict=True))
    for lane, share in shares.items():
        if share == 1.0:
            return lane
    return {lane: share for lane, share in shares.items() if share}


def _object(value: object, known: tuple[str, ...], where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object")
    if unknown := sorted(set(value) - set(known)):
        raise ConfigError(f"{where} has unknown keys ({', '.join(unknown)[:120]}): known are {', '.join(known)}")
    return value


def _parse_layers(value: object, num_layers: int, where: str) -> range:
    found = _LAYERS.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{where}: layers {str(value)[:40]!r} are no number and no range such as 0-39")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < num_layers:
        raise ConfigError(f"{where}: layers {value} are named, the model has the layers 0 to {num_layers - 1}")
    return range(first, last + 1)


def _parse_where(text: str, word: str) -> str | dict[str, float]:
    if text in LANES:
        return text
    shares: dict[str, float] = {}
    for piece in text.split(","):
        lane, colon, number = piece.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = float("nan")
        if not colon or lane in shares or share != share:
            raise ConfigError(f"pin {word[:60]!r}: {piece[:30]!r} is no LANE:SHARE: {_HELP}")
        shares[lane] = share
    return shares


def _shares(value: object, where: str) -> tuple[float, float, float]:
    if value in LANES:
        value = {value: 1.0}
    shares = _object(value, LANES, f"{where} is {str(value)[:40]!r}, which")
    for lane, share in shares.items():
        if not isinstance(share, int | float) or isinstance(share, bool):
            raise ConfigError(f"{where}: the share of {lane} is {str(share)[:40]!r}: it must be a number from 0 to 1")
    gpu, cpu, stream = (float(str(shares.get(lane, 0.0))) for lane in LANES)
    return gpu, cpu, stream


def _parse_split(value: object, where: str) -> WeightSplit:
    gpu, cpu, stream = _shares(value, where)
    try:
        return WeightSplit(on_gpu=gpu, on_cpu=cpu, streamed=stream)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse_kv(value: object, where: str) -> KVShares:
    gpu, cpu, stream = _shares(value, where)
    try:
        return KVShares(on_gpu=gpu, on_cpu=cpu, streamed=stream)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
