"""Placements as JSON files, and pinned parts as words.

    {"layers": [{"attention": {"on_gpu": 1.0}, "mlp": {"on_gpu": 0.5, "on_cpu": 0.3, "streamed": 0.2}}, …],
     "head": {"on_cpu": 1.0}}

one entry for each layer; a part that is left out lies on the GPU, a share that is left out is 0.

    mlp.0-39=gpu:0.5,cpu:0.3,stream:0.2      attention=gpu      head=cpu      kv=gpu:0.25,cpu:0.75
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.solver.problem import Pins

MAX_BYTES: Final = 1 << 24
"""A thousand layers, each told apart, take 200 KiB."""
LANES: Final = ("gpu", "cpu", "stream")
_SHARES: Final = tuple(item.name for item in fields(WeightSplit))
_LAYERS: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_PIN: Final = re.compile(r"(attention|mlp|head|kv)(?:\.([\d,-]+))?=(.+)")
_HELP: Final = "write it like mlp.0-9=cpu, attention=gpu:0.5,cpu:0.5, head=gpu or kv=gpu:0.25,stream:0.75"


def placement_json(placement: Placement) -> dict[str, Any]:
    """A placement as JSON values; shares that are 0 are left out."""
    return {
        "layers": [
            {"attention": _split_json(layer.attention), "mlp": _split_json(layer.mlp)} for layer in placement.layers
        ],
        "head": _split_json(placement.head),
    }


def read_placement(path: Path) -> Placement:
    """The placement in a file.

    Raises:
        ConfigError: it cannot be read, is none, or shares do not add up.
    """
    where = f"placement file {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{where} has more than {MAX_BYTES} bytes: it is no placement")
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a name with a null byte
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    return parse_placement(value, where=where)


def parse_placement(value: object, *, where: str) -> Placement:
    """The placement that JSON values are; `where` names them in errors.

    Raises:
        ConfigError: they are none, or shares do not add up.
    """
    top = _object(value, ("layers", "head"), where)
    layers = top.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"{where}: `layers` must be a list with an entry for each layer")
    made = []
    for idx, entry in enumerate(layers):
        layer = _object(entry, ("attention", "mlp"), f"{where}: layer {idx}")
        attention, mlp = (
            _parse_split(layer[name], f"{where}: {name} of layer {idx}") if name in layer else WeightSplit()
            for name in ("attention", "mlp")
        )
        made.append(LayerPlacement(attention=attention, mlp=mlp))
    head = _parse_split(top["head"], f"{where}: head") if "head" in top else WeightSplit()
    return Placement(layers=tuple(made), head=head)


def pin_all(placement: Placement) -> Pins:
    """All weights of a placement pinned; keys are free."""
    return Pins(
        attention={idx: layer.attention for idx, layer in enumerate(placement.layers)},
        mlp={idx: layer.mlp for idx, layer in enumerate(placement.layers)},
        head=placement.head,
    )


def join_pins(first: Pins, second: Pins) -> Pins:
    """Both; where they differ the second holds."""
    return Pins(
        attention={**first.attention, **second.attention},
        mlp={**first.mlp, **second.mlp},
        head=second.head or first.head,
        kv=second.kv or first.kv,
    )


def parse_pins(words: Iterable[str], num_layers: int) -> Pins:
    """The parts that words name, each `PART[.LAYERS]=WHERE`; a later word beats an earlier one.

    Raises:
        ConfigError: a word has another form, or names layers that the model has not.
    """
    attention: dict[int, WeightSplit] = {}
    mlp: dict[int, WeightSplit] = {}
    head: WeightSplit | None = None
    kv: KVShares | None = None
    for word in words:
        name = f"pin {word[:60]!r}"
        found = _PIN.fullmatch(word.strip())
        if found is None or (found[2] is not None and found[1] in ("head", "kv")):
            raise ConfigError(f"{name} is no PART=WHERE: {_HELP}")
        part, layers_text, where = found.groups()
        gpu, cpu, stream = _parse_where(where, name)
        if part == "kv":
            try:
                kv = KVShares(on_gpu=gpu, on_cpu=cpu, streamed=stream)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            continue
        split = _make_split(gpu, cpu, stream, name)
        layers = [idx for piece in (layers_text or f"0-{num_layers - 1}").split(",")
                  for idx in _parse_layers(piece, num_layers, name)]  # fmt: skip
        if part == "head":
            head = split
        else:
            (attention if part == "attention" else mlp).update(dict.fromkeys(layers, split))
    return Pins(attention=attention, mlp=mlp, head=head, kv=kv)


def _split_json(split: WeightSplit) -> dict[str, float]:
    return {name: getattr(split, name) for name in _SHARES if getattr(split, name)}


def _object(value: object, known: tuple[str, ...], where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object with {', '.join(known)}")
    if unknown := sorted(set(value) - set(known)):
        raise ConfigError(f"{where} has unknown keys ({', '.join(unknown)[:120]}): known are {', '.join(known)}")
    return value


def _parse_split(value: object, where: str) -> WeightSplit:
    shares = _object(value, _SHARES, where)
    for name, share in shares.items():
        if not isinstance(share, int | float) or isinstance(share, bool):
            raise ConfigError(f"{where}: `{name}` is {str(share)[:40]!r}: it must be a number from 0 to 1")
    gpu, cpu, stream = (float(str(shares.get(name, 0.0))) for name in _SHARES)
    return WeightSplit() if not shares else _make_split(gpu, cpu, stream, where)


def _make_split(gpu: float, cpu: float, stream: float, where: str) -> WeightSplit:
    try:
        return WeightSplit(on_gpu=gpu, on_cpu=cpu, streamed=stream)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse_layers(text: str, num_layers: int, where: str) -> range:
    found = _LAYERS.fullmatch(text)
    if found is None:
        raise ConfigError(f"{where}: layers {text[:40]!r} are no number and no range such as 0-39")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < num_layers:
        raise ConfigError(f"{where}: layers {text} are named, the model has the layers 0 to {num_layers - 1}")
    return range(first, last + 1)


def _parse_where(text: str, where: str) -> tuple[float, ...]:
    """Shares of the lanes in their order."""
    if text in LANES:
        return tuple(float(lane == text) for lane in LANES)
    shares: dict[str, float] = {}
    for piece in text.split(","):
        lane, colon, number = piece.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = float("nan")
        if not colon or lane not in LANES or lane in shares or share != share:
            raise ConfigError(f"{where}: {piece[:30]!r} is no LANE:SHARE (lanes are {', '.join(LANES)}): {_HELP}")
        shares[lane] = share
    return tuple(shares.get(lane, 0.0) for lane in LANES)
