"""`NeuronProfile`: how a model's neurons behave on a text, as `ambidex calibrate neurons` measures it; a .npz file."""

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.sparsity import MLPSparsity, NeuronMask, SparsityKind
from ambidex.formats.locate import ModelSource

SHARES: Final = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Of the neurons of a layer, for which there are thresholds."""
_VERSION: Final = 1
_SAMPLE_BYTES: Final = 1 << 16
_AGAIN: Final = "measure it with `ambidex calibrate neurons MODEL TEXT`"

Sizes = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeuronProfile:
    """What a text did to a model's MLPs.

    Args:
        model: fingerprint of the model that it belongs to.
        num_tokens: of the text.
        activity: [L, F], the share of tokens for which a neuron was active: not 0 behind a ReLU; with another
            activation, among the larger half of its layer.
        gate_sizes: [L, Q], below which |activation(gate)| is for each of `SHARES` of the neurons; [L, 0]: no gate.
        input_sizes: [L, Q], the same of |input of the last matrix|.
    """

    model: str
    num_tokens: int
    activity: Sizes
    gate_sizes: Sizes
    input_sizes: Sizes

    @property
    def active_share(self) -> float:
        """Of the neurons, for a token, in the mean over layers."""
        return float(self.activity.mean())

    def unions(self, sizes: Sequence[int]) -> dict[int, float]:
        """Shares of neurons that some token of a step needs, by its tokens: as if they were independent, but for how
        often each neuron is active. At least one neuron."""
        least = 1.0 / self.activity.shape[1]
        return {num: max(least, float(1.0 - ((1.0 - self.activity.astype(np.float64)) ** num).mean())) for num in sizes}

    def masks(self, sparsity: MLPSparsity) -> list[NeuronMask]:
        """The mask of each layer for a form that is not exact.

        Raises:
            ConfigError: the profile has no thresholds of that kind.
        """
        sizes = self.gate_sizes if sparsity.kind is SparsityKind.CATS else self.input_sizes
        if sizes.shape[1] != len(SHARES):
            raise ConfigError(f"the profile of neurons has no thresholds for {sparsity.kind}: {_AGAIN}")
        return [
            NeuronMask(kind=sparsity.kind, threshold=float(np.interp(sparsity.share or 0.0, SHARES, row)))
            for row in sizes
        ]

    def write(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            ConfigError: the file cannot be written.
        """
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(
                    file, version=_VERSION, model=self.model, num_tokens=self.num_tokens, activity=self.activity,
                    gate_sizes=self.gate_sizes, input_sizes=self.input_sizes,
                )  # fmt: skip
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"neuron profile {path} cannot be written: {error.strerror or error}") from error


def read_neuron_profile(path: Path, spec: ModelSpec, *, model: str) -> NeuronProfile:
    """Read the profile of a model.

    Args:
        model: its fingerprint.
    Raises:
        ConfigError: the file is not there, is none, or belongs to another model.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            version = int(file["version"])
            profile = NeuronProfile(
                model=str(file["model"]),
                num_tokens=int(file["num_tokens"]),
                activity=file["activity"].astype(np.float32),
                gate_sizes=file["gate_sizes"].astype(np.float32),
                input_sizes=file["input_sizes"].astype(np.float32),
            )
    except FileNotFoundError:
        raise ConfigError(f"there is no neuron profile {path}: {_AGAIN}") from None
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no neuron profile ({error}): {_AGAIN}") from error
    if version != _VERSION:
        raise ConfigError(f"neuron profile {path} has version {version}, version {_VERSION} is read here: {_AGAIN}")
    if profile.model != model:
        raise ConfigError(f"neuron profile {path} belongs to another model, or to other weights of it: {_AGAIN}")
    shape = (spec.num_layers, spec.intermediate_size)
    if profile.activity.shape != shape or len(profile.gate_sizes) != shape[0] or len(profile.input_sizes) != shape[0]:
        raise ConfigError(
            f"neuron profile {path} is of {' x '.join(map(str, profile.activity.shape))} neurons, "
            f"the model has {shape[0]} layers of {shape[1]}: {_AGAIN}"
        )
    for name, values in (("activity", profile.activity), ("gate_sizes", profile.gate_sizes),
                         ("input_sizes", profile.input_sizes)):  # fmt: skip
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ConfigError(f"neuron profile {path} holds `{name}` that are no sizes: {_AGAIN}")
    return profile


def default_neuron_path(environ: Mapping[str, str], model: str) -> Path:
    """Where a model's profile lies: `ambidex/neurons/` in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    cache = environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if cache.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return folder / "ambidex" / "neurons" / f"{model}.npz"


def fingerprint(source: ModelSource, spec: ModelSpec) -> str:
    """What tells models apart: their shape, and size, beginning and end of each file of weights.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.sha256(repr((spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size,
                                  spec.vocab_size, spec.activation)).encode())  # fmt: skip
    for path in source.files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}".encode())
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()[:32]
