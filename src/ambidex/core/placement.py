"""`Placement`: which share of a layer's weights lies where, as plain values. Solvers make it, storage acts on it."""

from collections.abc import Iterator
from dataclasses import dataclass

from ambidex.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSplit:
    """How one group of matrices is divided by output rows (an MLP by neurons: rows of gate and up, columns of down).

    Three fractions from 0 to 1 that add up to 1: `on_gpu` lies in GPU memory, `on_cpu` lies in DRAM and is multiplied
    there, `streamed` lies in DRAM and travels to the GPU in every step. Source: design of the engine, section 6.
    """

    on_gpu: float = 1.0
    on_cpu: float = 0.0
    streamed: float = 0.0

    def __post_init__(self) -> None:
        shares = {"on_gpu": self.on_gpu, "on_cpu": self.on_cpu, "streamed": self.streamed}
        for name, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"`{name}` is {share}: a share of weights is a fraction from 0 to 1")
        if abs(sum(shares.values()) - 1.0) > 1e-6:
            listed = ", ".join(f"`{name}` {share}" for name, share in shares.items())
            raise ConfigError(f"the shares of weights ({listed}) add up to {sum(shares.values()):.6g}, not to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """One layer: the projections around attention (q, k, v and output), and the MLP."""

    attention: WeightSplit = WeightSplit()
    mlp: WeightSplit = WeightSplit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Weights of a model, layer by layer, and of the last projection (`head`); embedding and norms are not divided."""

    layers: tuple[LayerPlacement, ...]
    head: WeightSplit = WeightSplit()

    @classmethod
    def all_on_gpu(cls, num_layers: int) -> "Placement":
        """Everything in GPU memory."""
        return cls(layers=(LayerPlacement(),) * num_layers)

    @property
    def is_all_on_gpu(self) -> bool:
        """Whether nothing lies elsewhere."""
        return all(split.on_gpu == 1.0 for split in self.splits())

    def splits(self) -> Iterator[WeightSplit]:
        """Every split: attention and MLP of each layer in order, then the head."""
        for layer in self.layers:
            yield layer.attention
            yield layer.mlp
        yield self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of a model's weights by what a placement says about them."""

    whole: int
    """Embedding, norms, biases, and a last projection that is the table of tokens: never divided."""
    attention: tuple[int, ...]
    """Of each layer."""
    mlp: tuple[int, ...]
    head: int
    """0 if it is part of `whole`."""

    @property
    def total(self) -> int:
        """All weights."""
        return self.whole + sum(self.attention) + sum(self.mlp) + self.head
