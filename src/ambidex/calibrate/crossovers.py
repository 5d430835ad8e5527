"""Where one form of a computation on the CPU becomes faster than another: matrix tiles than vectors, for 4-bit weights;
and of neurons that are left out, what a row costs token by token, as the tokens' union, or with all others.

An engine takes its choices from these figures (`kernels/cpu/linear.py`, `mlp/sparse_side.py`), the same in every run.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.calibrate import cpu
from ambidex.calibrate.figures import measure_seconds
from ambidex.core.model_spec import Activation
from ambidex.core.units import MIB
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import TILED_KINDS, LinearPool, Matrices
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.picked import PickedPool
from ambidex.kernels.cpu.quantized import Weight
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_rates import NO_COSTS, Place, measure_costs, measure_screens
from ambidex.mlp.sparse_side import SparseContext

NEURON_FORMATS: Final = ("fp32", "bf16", "fp16")
"""Of weights of which neurons are left out; quantised ones are read whole."""
TILE_TOKENS: Final = (1, 2, 4, 8, 12, 16, 24, 32)
"""At which tiles and vectors are compared; beyond, tiles have a whole row of their own for each token."""
MOST_NEURON_BYTES: Final = 128 * MIB
"""Of the weights that neurons are measured with: beyond the caches of most processors; some seconds on two cores."""
NEURONS: Final = 1024
"""Of a piece."""


def measure_tiles(threads: ThreadPool, buffer: Tensor) -> dict[str, int | None]:
    """From how many tokens on tiles multiply weights of each 4-bit format faster; None: they do not at any number that
    is tried. Empty on a processor without them.

    Args:
        buffer: [n] uint8, as in `cpu.measure_products`.
    """
    if native.isa() != "amx":
        return {}
    return {kind: _measure_tiles(threads, kind, buffer) for kind in TILED_KINDS}


def _measure_tiles(threads: ThreadPool, kind: str, buffer: Tensor) -> int | None:
    weights = cpu.cut_weights(kind, buffer)
    vectors, tiles = (_product_rates(threads, weights, tiles_from) for tiles_from in (None, 1))
    return find_crossover(vectors, tiles)


def find_crossover(before: Sequence[tuple[int, float]], behind: Sequence[tuple[int, float]]) -> int | None:
    """The smallest count from which on the second form has the higher rate, at it and at all larger ones."""
    found = None
    for (count, rate), (_, other) in zip(reversed(before), reversed(behind), strict=True):
        if other <= rate:
            break
        found = count
    return found


def _product_rates(threads: ThreadPool, weights: Sequence[Weight], tiles_from: int | None) -> list[tuple[int, float]]:
    pool = LinearPool(threads, tiles_from=tiles_from)
    matrices = [Matrices([weight], [None]) for weight in weights]
    rates = []
    for num_tokens in TILE_TOKENS:
        x = torch.randn(num_tokens, cpu.WIDTH)

        def run(x: Tensor = x) -> None:
            for one in matrices:
                pool.multiply(one, x)

        seconds = min(measure_seconds(run, num_warmups=1, num_runs=cpu.NUM_RUNS))
        rates.append((num_tokens, 1.0 / seconds))
    return rates


@torch.inference_mode()
def measure_neurons(
    threads: ThreadPool, kind: str, buffer: Tensor, *, num_torch_threads: int
) -> dict[str, list[tuple[int, float]]]:
    """Seconds a byte of rows of each way to multiply neurons that are needed, by tokens: the fields of `NeuronRates`.

    Args:
        kind: one of `NEURON_FORMATS`.
        buffer: [n] uint8, as in `cpu.measure_products`.
        num_torch_threads: that gather rows: all beside a GPU, one where the CPU is the accelerator.
    """
    context = SparseContext(
        linear=LinearContext(threads), num_threads=num_torch_threads, costs=NO_COSTS, picked=PickedPool(threads)
    )
    places = make_places(kind, buffer[:MOST_NEURON_BYTES], context.linear)
    row_bytes = cpu.WIDTH * cpu.TORCH_DTYPES[kind].itemsize
    before = torch.get_num_threads()
    torch.set_num_threads(num_torch_threads)
    costs, screens = measure_costs(places, context), measure_screens(places, context)
    torch.set_num_threads(before)
    found = {"bags": costs.bags, "union": costs.union, "dense": costs.dense,
             "plain": screens.plain, "screen": screens.screen, "candidate": screens.candidate}  # fmt: skip
    return {name: [(num, seconds / row_bytes) for num, seconds in values.items()] for name, values in found.items()}


def make_places(kind: str, buffer: Tensor, linear: LinearContext) -> list[Place]:
    """MLPs of a ReLU model that lie in a buffer: NEURONS neurons each, fewer if it is small, of width `cpu.WIDTH`."""
    dtype = cpu.TORCH_DTYPES[kind]
    num_rows = NEURONS
    while num_rows > 16 and 2 * num_rows * cpu.WIDTH * dtype.itemsize > buffer.numel():
        num_rows //= 2
    shape = SiteShape(num_in=cpu.WIDTH, num_rows=num_rows, num_out=cpu.WIDTH, is_neuron_major=True)
    size = shape.num_bytes(num_rows, dtype.itemsize)
    places: list[Place] = []
    for start in range(0, buffer.numel() - size + 1, size):
        rows = Rows(shape, range(num_rows), buffer[start : start + size], dtype)
        part = Part(rows, Activation.RELU, linear)
        first = [weight for weight in rows.ins if isinstance(weight, Tensor)]
        places.append((shape, [part], Screen(first, linear)))
    return places
