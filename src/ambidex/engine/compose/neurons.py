"""`measure_neurons`: a text runs through a model while every MLP tells what its neurons do."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, RequestFailedError
from ambidex.core.model_spec import Activation
from ambidex.core.request import SamplingParams
from ambidex.engine.compose.root import build_engine
from ambidex.engine.compose.weights import Progress
from ambidex.engine.engine import Engine
from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import SHARES, NeuronProfile, fingerprint
from ambidex.formats.spec import read_spec
from ambidex.layers.mlp import Neurons
from ambidex.runner.runner import ModelRunner

Tell = Callable[[int, int], None]
_LOWEST_OCTAVE: Final = -40
_NUM_OCTAVES: Final = 56
_BINS_PER_OCTAVE: Final = 32
"""A bin is 2.2 % wide; sizes below 2^-40 count as 0, those above 2^16 as that."""


class SizeHistogram:
    """Sizes of numbers, in bins whose width grows with the size; the first bin holds what is 0."""

    def __init__(self) -> None:
        self._counts = torch.zeros(1 + _NUM_OCTAVES * _BINS_PER_OCTAVE, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Count values of any shape."""
        octaves = values.detach().abs().float().log2() - _LOWEST_OCTAVE  # -inf for 0
        bins = (octaves * _BINS_PER_OCTAVE + 1).clamp(0, len(self._counts) - 1).long()
        self._counts += torch.bincount(bins.flatten(), minlength=len(self._counts)).cpu()

    def quantile(self, share: float) -> float:
        """The size below which a share of the values is."""
        below = self._counts.cumsum(0)
        wanted = share * int(below[-1])
        place = int(torch.searchsorted(below, wanted))
        if place == 0:
            return 0.0
        within = (wanted - int(below[place - 1])) / int(self._counts[place])
        return float(2 ** (_LOWEST_OCTAVE + (place - 1 + within) / _BINS_PER_OCTAVE))


class LayerStatistics:
    """What one MLP's neurons did."""

    def __init__(self, activation: Activation) -> None:
        self._is_relu = activation is Activation.RELU
        self._gate_sizes = SizeHistogram()
        self._input_sizes = SizeHistogram()
        self._has_gate = False
        self._num_active: Tensor | None = None
        self._num_tokens = 0

    def observe(self, gate: Tensor | None, neurons: Tensor) -> None:
        """See `NeuronObserver`."""
        self._input_sizes.add(neurons)
        if gate is not None:
            self._has_gate = True
            self._gate_sizes.add(gate)
        if self._is_relu:
            active = neurons != 0
        else:
            values, sizes = (neurons, self._input_sizes) if gate is None else (gate, self._gate_sizes)
            active = values.abs() >= sizes.quantile(0.5)
        counts = active.sum(0).cpu()
        self._num_active = counts if self._num_active is None else self._num_active + counts
        self._num_tokens += len(neurons)

    @property
    def activity(self) -> Tensor:
        """[F], the share of tokens for which a neuron was active."""
        assert self._num_active is not None, "a text has tokens"
        return self._num_active.float() / self._num_tokens

    def gate_sizes(self) -> list[float]:
        """Quantiles of |activation(gate)|; none without a gate."""
        return [self._gate_sizes.quantile(share) for share in SHARES] if self._has_gate else []

    def input_sizes(self) -> list[float]:
        """Quantiles of |input of the last matrix|."""
        return [self._input_sizes.quantile(share) for share in SHARES]


def measure_neurons(
    config: EngineConfig, text: str, *, num_tokens: int, context: int, progress: Progress | None, tell: Tell
) -> NeuronProfile:
    """Run the beginning of a text, in contexts one after the other, and see what neurons do.

    Args:
        num_tokens: of the text, at most.
        context: tokens of each.
        progress: as in `build_engine`; tell: called with (tokens that have run, tokens in all).
    Raises:
        ConfigError: the settings divide the weights or leave out neurons, or the text is shorter than a context.
        RequestFailedError: the engine could not compute it.
    """
    engine = build_engine(config, progress=progress)
    mlps = _find_mlps(engine)
    if any(mlp.stand_in is not None or mlp.mask is not None for mlp in mlps):
        raise ConfigError(
            "neurons are measured where all of them are computed in one place: leave out `mlp_sparsity`, `placement` "
            "and `weights_gpu_memory`, and use `device` cpu if the GPU does not hold the model"
        )
    if context >= engine.max_context_len:
        raise ConfigError(
            f"--context is {context}, with the token behind it the limit is {engine.max_context_len}: lower it"
        )
    ids = engine.tokenizer.encode(text)[:num_tokens]
    if len(ids) < context:
        raise ConfigError(
            f"the text has {len(ids)} tokens, a context has {context}: give more text, or lower --context"
        )
    statistics = [LayerStatistics(mlp.activation) for mlp in mlps]
    for mlp, layer in zip(mlps, statistics, strict=True):
        mlp.observer = layer.observe
    windows = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    for place, window in enumerate(windows):
        _run(engine, window)
        tell((place + 1) * context, len(windows) * context)
    source = find_model(config.model)
    return NeuronProfile(
        model=fingerprint(source, read_spec(source)),
        num_tokens=len(windows) * context,
        activity=torch.stack([layer.activity for layer in statistics]).numpy(),
        gate_sizes=np.array([layer.gate_sizes() for layer in statistics], dtype=np.float32),
        input_sizes=np.array([layer.input_sizes() for layer in statistics], dtype=np.float32),
    )


def _find_mlps(engine: Engine) -> Sequence[Neurons]:
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner), "no setting of this engine puts another in its place"
    return [sites.mlp for sites in runner.model.layer_sites()]


def _run(engine: Engine, ids: Sequence[int]) -> None:
    engine.add(list(ids), SamplingParams(max_output_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RequestFailedError(output.error)
