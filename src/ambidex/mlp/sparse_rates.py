"""What leaving out neurons costs on this machine: seconds a row of each form, by its profile or measured when an engine
starts, and the rate of whole places at a share of active neurons."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.core.units import MIB
from ambidex.hw.profile import Curve, NeuronRates
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.parts import Part
from ambidex.mlp.predictor import Predictor
from ambidex.mlp.rates import TOKENS
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_costs import Form, FormCosts, ScreenCosts
from ambidex.mlp.sparse_side import SparseContext, SparseSide

PROBE_SHARE: Final = 0.06
"""Of the neurons, that are active where a form's cost a row is measured: the cost does not depend on it much, and so
few rows of different places do not come from caches."""
_PROBE_BYTES: Final = 256 * MIB
"""Of weights that each figure reads or chooses from."""
_NUM_PROBES: Final = 3
NO_COSTS: Final = FormCosts(bags={}, union={}, dense={})
"""Nothing was measured: all is dense."""


def costs_of(rates: NeuronRates, row_bytes: int) -> FormCosts:
    """Seconds a row of each form, by what `ambidex calibrate` has measured of other weights.

    Args:
        row_bytes: of a row of the last matrix.
    """
    bags, union, dense = (_per_row(curve, row_bytes) for curve in (rates.bags, rates.union, rates.dense))
    return FormCosts(bags=bags, union=union, dense=dense)


def screen_costs_of(rates: NeuronRates, row_bytes: int) -> ScreenCosts:
    """The same of looking at 8-bit copies, and of doing without.

    Args:
        row_bytes: of a row of the first matrix.
    """
    plain, screen, candidate = (_per_row(curve, row_bytes) for curve in (rates.plain, rates.screen, rates.candidate))
    return ScreenCosts(plain=plain, screen=screen, candidate=candidate)


def _per_row(curve: Curve, row_bytes: int) -> dict[int, float]:
    return {num_tokens: row_bytes * seconds for num_tokens, seconds in curve.points}


Place = tuple[SiteShape, Sequence[Part], Screen | None]
"""Neurons that the CPU multiplies, and the copy of their first rows."""


def measure_costs(places: Sequence[Place], context: SparseContext) -> FormCosts:
    """Seconds a row of each form by tokens of a step, with the last matrices of some MLPs.

    Args:
        places: neurons that the CPU multiplies.
    Cost: reads some 256 MiB of weights twice for each of 7 sizes and 3 forms; tenths of a second on a server.
    """
    sides = [SparseSide(shape, parts, context) for shape, parts, _ in _take(places)]
    bags: dict[int, float] = {}
    union: dict[int, float] = {}
    dense: dict[int, float] = {}
    for num_tokens in TOKENS:
        active = [_some_active(side.num_neurons, num_tokens, PROBE_SHARE) for side in sides]
        own = sum(int(neurons.ne(0).sum()) for neurons in active)
        rows = sum(int(neurons.ne(0).any(0).sum()) for neurons in active)
        whole = sum(side.num_neurons for side in sides)
        for costs, form, num_rows in ((bags, Form.BAGS, own), (union, Form.UNION, rows), (dense, Form.DENSE, whole)):
            costs[num_tokens] = _time(lambda form=form, active=active: _sum_up(sides, active, form)) / num_rows  # type: ignore[misc]  # mypy does not infer defaults of lambdas
    return FormCosts(bags=bags, union=union, dense=dense)


def measure_screens(places: Sequence[Place], context: SparseContext) -> ScreenCosts:
    """Seconds a row of looking at the 8-bit copies of some first matrices, and of doing without.

    Args:
        places: as in `measure_costs`, with screens.
    """
    some = [(shape, parts, screen) for shape, parts, screen in _take(places) if screen is not None]
    sides = [SparseSide(shape, parts, context, screen=screen) for shape, parts, screen in some]
    heads = [screen.head(len(parts)) for _, parts, screen in some]
    unions = [torch.rand(side.num_neurons).lt(PROBE_SHARE).nonzero()[:, 0] for side in sides]
    whole, candidates = sum(side.num_neurons for side in sides), max(1, sum(map(len, unions)))
    plain: dict[int, float] = {}
    screen_s: dict[int, float] = {}
    candidate: dict[int, float] = {}
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, some[0][0].num_in)

        def look(x: Tensor = x) -> None:
            for (_, parts, _), head in zip(some, heads, strict=True):
                head.candidates(x, [part.biases[0] for part in parts])

        def multiply_all(x: Tensor = x) -> None:
            for side in sides:
                side.first_products(x)

        def multiply_some(x: Tensor = x) -> None:
            for side, union in zip(sides, unions, strict=True):
                if side.picks(x.shape[0]):
                    side.pick(x, union)
                else:
                    side.candidate_products(x, union, None)

        plain[num_tokens] = _time(multiply_all) / whole
        screen_s[num_tokens] = _time(look) / whole
        candidate[num_tokens] = _time(multiply_some) / candidates
    return ScreenCosts(plain=plain, screen=screen_s, candidate=candidate)


def sparse_rates(
    places: Sequence[Place],
    context: SparseContext,
    *,
    active_share: float,
    predictors: Sequence[Predictor | None] | None = None,
) -> dict[int, float]:
    """Bytes of weights a second, counted as if all were read, by tokens of a step, at a share of active neurons.

    Args:
        active_share: of the neurons, for a token, as a profile has it.
        predictors: of each place; None: there are none.
    """
    some = _take(places)
    sides = [
        SparseSide(shape, parts, context, screen=screen, predictor=predictor)
        for (shape, parts, screen), predictor in zip(some, predictors or [None] * len(places), strict=False)
    ]
    num_bytes = sum(part.num_bytes for _, parts, _ in some for part in parts)
    rates: dict[int, float] = {}
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, sides[0].shape.num_in)
        active = [_some_active(side.num_neurons, num_tokens, active_share) for side in sides]
        rates[num_tokens] = num_bytes / _time(
            lambda x=x, active=active: [side.compute_as_if(x, h) for side, h in zip(sides, active, strict=True)]  # type: ignore[misc]
        )
    return rates


def _sum_up(sides: Sequence[SparseSide], active: Sequence[Tensor], form: Form) -> None:
    for side, neurons in zip(sides, active, strict=True):
        side.sum_up(neurons, form)


def _some_active(num_neurons: int, num_tokens: int, share: float) -> Tensor:
    """h [T, n] with a random share of numbers other than 0, and one at least."""
    neurons = torch.where(torch.rand(num_tokens, num_neurons) < share, 1.0, 0.0)
    neurons[:, 0] = 1.0
    return neurons


def _time(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_NUM_PROBES):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _take(places: Sequence[Place]) -> list[Place]:
    """The first places that together have so many bytes."""
    taken: list[Place] = []
    left = _PROBE_BYTES
    for shape, parts, screen in places:
        taken.append((shape, parts, screen))
        left -= sum(part.num_bytes for part in parts)
        if left <= 0:
            break
    return taken
