"""`PlacedForecast`: how long decode steps take where weights and keys lie as the settings have it, not as solved."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.step import StepPrediction, predict_step
from ambidex.cost.units import make_units
from ambidex.cost.weights import ModelWeights
from ambidex.cost.workload import KVShares, Workload
from ambidex.hw.profile import Curve, HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class NearKeys:
    """Tokens of keys on the accelerator: of all requests together, at most, and of one; None: as many as fit."""

    of_all: int
    of_one: int | None
    stream_share: float
    """Of the others, that the accelerator reads over the link; the CPU attends over the rest."""

    def shares(self, batch: int, context: int) -> KVShares:
        """Where the keys of such traffic are attended."""
        near = min(context, self.of_all // batch, context if self.of_one is None else self.of_one)
        away = 1.0 - near / context
        return KVShares(on_gpu=near / context, on_cpu=away * (1 - self.stream_share), streamed=away * self.stream_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedForecast:
    """Steps of one engine.

    `placement` is where weights lie, `cpu_share` what the CPU multiplies of its part in steps of so many tokens (the
    rest travels), `mlp_reads` as in `make_units`. Without a GPU in the profile both tiers are the same memory.
    """

    spec: ModelSpec
    weights: ModelWeights
    dtype: DType
    profile: HardwareProfile
    workload: Workload
    placement: Placement
    keys: NearKeys
    cpu_share: Callable[[int], float]
    mlp_reads: Curve | None = None

    def __call__(self, batch: int, context: int) -> StepPrediction:
        """A decode step of `batch` requests with `context` tokens each.

        Raises:
            ConfigError: the profile has no rate for a format.
        """
        workload = replace(self.workload, batch=max(1, batch), context=max(1, context))
        units = make_units(self.spec, self.weights, self.profile, workload, dtype=self.dtype, mlp_reads=self.mlp_reads)
        if not units.has_link:
            return predict_step(units, Placement.all_on_gpu(self.spec.num_layers), KVShares())
        placement = share_with_link(self.placement, self.cpu_share(workload.batch))
        return predict_step(units, placement, self.keys.shares(workload.batch, workload.context))

    def step_s(self, batch: int, context: int) -> float:
        """Its seconds."""
        return self(batch, context).step_s


def share_with_link(placement: Placement, cpu_share: float) -> Placement:
    """The placement as steps have it in which the CPU multiplies a share of its part and the rest travels."""

    def shared(split: WeightSplit) -> WeightSplit:
        on_cpu = split.on_cpu * cpu_share
        return WeightSplit(on_gpu=split.on_gpu, on_cpu=on_cpu, streamed=split.streamed + split.on_cpu - on_cpu)

    layers = tuple(
        LayerPlacement(attention=shared(layer.attention), mlp=shared(layer.mlp)) for layer in placement.layers
    )
    return Placement(layers=layers, head=shared(placement.head))
