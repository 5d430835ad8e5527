"""`SparseSide`: the neurons of an MLP that the CPU multiplies, of which a step needs a few.

    gate or only matrix    all rows, one native call       h = activation(…), 0 where a mask or a ReLU says so
    up                     rows of neurons that some token needs: known from the gate (ReLU, CATS)
    last matrix            columns of neurons that are not 0, which lie neuron by neuron

    one token, screened    rows that the screen lets through and their columns, one native call (`kernels/cpu/picked`)

Three forms give the same sums: token by token, the tokens' union gathered once, or all neurons. Each has a cost a row,
measured on this machine with this model's weights, and a step takes the cheapest for what it found
(`sparse_costs.py`; `sparse_rates.py` measures).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import NeuronMask, SparsityKind
from ambidex.kernels import api
from ambidex.kernels.cpu.picked import STEP, PickedPool
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.kernels.neurons import sum_all, sum_bags, sum_union
from ambidex.layers.mlp import activate_neurons, keep_large
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.neuron_cache import NeuronCounts
from ambidex.mlp.parts import Part
from ambidex.mlp.predictor import CHECK_EVERY, Predictor, PredictorPart
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_costs import Form, FormCosts, ScreenCosts

BAGS_PER_THREAD: Final = 2
"""Pieces of a token's rows for each thread: with a few more than threads, one that is late holds up less."""
TRY_AGAIN_STEPS: Final = 64
"""After so many steps in which it did not pay to screen, one is screened all the same: traffic changes."""


@dataclass(slots=True)
class SparsityCounts:
    """What was skipped so far. Neurons are counted once a token, `num_rows` once a step: those of the union.

    `num_checked` neurons were active where all were computed beside a prediction, `num_found` of them were predicted.
    """

    num_neurons: int = 0
    num_active: int = 0
    num_rows: int = 0
    num_rows_read: int = 0
    num_screened: int = 0
    num_candidates: int = 0
    num_checked: int = 0
    num_found: int = 0
    forms: Counter[Form] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class SparseContext:
    """What all sparse places of a model share."""

    linear: LinearContext
    num_threads: int
    costs: FormCosts
    screen_costs: ScreenCosts | None = None
    """None: no rows are screened."""
    picked: PickedPool | None = None
    """Computes screened neurons of one token; None: the forms above do."""
    counts: SparsityCounts = field(default_factory=SparsityCounts)


class SparseSide(HostSide):
    """Neurons in DRAM, computed as far as a step needs them.

    Args:
        parts: with columns neuron by neuron; they follow each other in one memory.
        counts: is told which neurons each step needs; None: nobody is.
        screen: of the rows of the first matrix; None: there is none.
        predictor: of the neurons, trained; None: there is none. Only one of both.
    Raises:
        ShapeError: they do not.
    """

    def __init__(
        self,
        shape: SiteShape,
        parts: Sequence[Part],
        context: SparseContext,
        counts: NeuronCounts | None = None,
        screen: Screen | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        super().__init__(shape, parts)
        self._counts = counts
        self._screen = None if screen is None else screen.head(len(parts))
        self._predictor = None if predictor is None else predictor.head(len(self.rows))
        self._num_predicted = 0  # steps
        self._candidate_share: dict[int, float] = {}  # by tokens of a step, of late
        self._num_passed_over = 0  # steps since it last did not pay to screen
        refusal = find_scattered(shape, parts)
        if refusal is not None:
            raise ShapeError(refusal)
        first = parts[0]
        assert first.activation is not None, "these are neurons"
        self._context = context
        self._activation: Activation = first.activation
        self._mask: NeuronMask | None = first.mask
        self._is_gated = shape.num_ins > 1
        self._is_early = self._is_gated and (
            self._mask.kind is SparsityKind.CATS if self._mask is not None else self._activation is Activation.RELU
        )
        self._columns = [part.numbers.columns for part in parts if part.numbers.columns is not None]
        self._table, rows = lay_out(shape, parts)
        self._places = rows[-1]
        self._first_rows = rows[0]
        self._up_rows = rows[1] if self._is_gated else None
        self._up_biases: Tensor | None = None
        self._multiply = LinearOp(context.linear)
        self._multiply_up = LinearOp(context.linear)

    @property
    def is_recordable(self) -> bool:
        """Never: what is read is known only in the step."""
        return False

    @property
    def num_neurons(self) -> int:
        """Neurons of this side."""
        return len(self.rows)

    def compute(self, x: Tensor) -> Tensor:
        """x [T, K] fp32 in DRAM → [T, num_out] fp32."""
        if self._predictor is not None:
            return self._compute_predicted(x, self._predictor)
        screens = self._screen is not None and self._pays_to_screen(x.shape[0])
        if screens and self.picks(x.shape[0]):
            return self._compute_picked(x, self._find_candidates(x))
        return self._finish(x, self.screened(x) if screens else self._begin(x))

    def picks(self, num_tokens: int) -> bool:
        """Whether screened neurons of such a step are one native call."""
        return (
            num_tokens == 1
            and (self._screen is not None or self._predictor is not None)
            and self._context.picked is not None
            and not self._is_gated
            and self._activation is Activation.RELU
            and self.shape.num_in % STEP == 0
        )

    def pick(self, x: Tensor, union: Tensor) -> tuple[Tensor, Tensor]:
        """What some neurons give behind the ReLU, [k], and their part of the sum, [num_out]."""
        assert self._context.picked is not None, "`picks` says so"
        biases = self._first_biases()
        return self._context.picked.relu_sum(
            self._table, self._first_rows[union], self._places[union], None if biases is None else biases[union], x[0]
        )

    def _compute_picked(self, x: Tensor, union: Tensor) -> Tensor:
        h, y = self.pick(x, union)
        is_active = h.ne(0)
        num_all, num_active = len(self.rows), int(is_active.sum())
        counts = self._context.counts
        counts.num_neurons += num_all
        counts.num_active += num_active
        counts.num_rows += num_all
        counts.num_rows_read += num_active
        counts.forms[Form.BAGS] += 1
        if self._counts is not None:
            needed = torch.zeros(1, num_all, dtype=torch.bool)
            needed[0, union[is_active]] = True
            self._counts.add_far(needed)
        return y[None]

    def _compute_predicted(self, x: Tensor, predictor: PredictorPart) -> Tensor:
        needed = predictor.needed(x)
        if self._num_predicted % CHECK_EVERY == 0:
            active = self._begin(x).ne(0)
            self._context.counts.num_checked += int(active.sum())
            self._context.counts.num_found += int(active.logical_and_(needed).sum())
        self._num_predicted += 1
        union = needed.any(0).nonzero()[:, 0]
        if self.picks(x.shape[0]) and len(union):
            return self._compute_picked(x, union)
        return self._finish(x, self._predicted_neurons(x, union, needed))

    def _predicted_neurons(self, x: Tensor, union: Tensor, needed: Tensor) -> Tensor:
        """What neurons give behind the ReLU, [T, n], 0 where a token does not need them; by the cheaper of two forms,
        which differ by roundings alone."""
        num_all = len(self.rows)
        if not self._context.costs.gathers(x.shape[0], num_union=len(union), num_all=num_all):
            return self._begin(x) * needed
        values = x.new_zeros(x.shape[0], num_all)
        if len(union):
            values[:, union] = self.candidate_products(x, union, self._first_biases()) * needed[:, union]
        return values

    def compute_as_if(self, x: Tensor, active: Tensor) -> Tensor:
        """What a step costs in which other neurons are active than those of x, for measurements.

        Args:
            active: [T, n], other than 0 where a neuron is.
        """
        if self._predictor is not None:
            self._predictor.needed(x)
            needed = active.ne(0)
            union = needed.any(0).nonzero()[:, 0]
            if self.picks(x.shape[0]):
                return self.pick(x, union)[1][None]
            self._predicted_neurons(x, union, needed)
        elif self._screen is not None and self._pays_to_screen(x.shape[0]):
            self._screen.candidates(x, [part.biases[0] for part in self.parts])
            union = active.ne(0).any(0).nonzero()[:, 0]
            if self.picks(x.shape[0]):
                return self.pick(x, union)[1][None]
            self.candidate_products(x, union, None)
        elif self._is_early:
            self._gate(x)
        else:
            self._neurons(x)
        return self._finish(x, active)

    def _begin(self, x: Tensor) -> Tensor:
        """What tells which neurons are needed, [T, n]: activation(gate), or what neurons give."""
        return self._gate(x) if self._is_early else self._neurons(x)

    def _finish(self, x: Tensor, found: Tensor) -> Tensor:
        needed = found.ne(0)
        if self._counts is not None:
            self._counts.add_far(needed)
        form = self._choose(needed)
        if not self._is_early:
            return self.sum_up(found, form)
        return self.sum_up(found * self._product(x, 1) if form is Form.DENSE else self._with_up(x, found, needed), form)

    def _pays_to_screen(self, num_tokens: int) -> bool:
        """By what was seen in steps of that size; now and then it is tried again."""
        costs = self._context.screen_costs
        if costs is None:
            return False
        most = costs.most_candidates(num_tokens)
        if most > self._candidate_share.get(num_tokens, 0.0):
            return True
        self._num_passed_over += 1
        return most > 0 and self._num_passed_over % TRY_AGAIN_STEPS == 0

    def _find_candidates(self, x: Tensor) -> Tensor:
        """The neurons that the copy does not rule out, [k]."""
        assert self._screen is not None, "there is a copy"
        union = self._screen.candidates(x, [part.biases[0] for part in self.parts])
        share = len(union) / len(self.rows)
        before = self._candidate_share.get(x.shape[0], share)
        self._candidate_share[x.shape[0]] = 0.9 * before + 0.1 * share
        counts = self._context.counts
        counts.num_screened += len(self.rows)
        counts.num_candidates += len(union)
        return union

    def _first_biases(self) -> Tensor | None:
        """Of the first matrix, of all parts."""
        biases = [part.biases[0] for part in self.parts]
        if biases[0] is None:
            return None
        return torch.cat([bias for bias in biases if bias is not None])  # anew: neurons may have changed places

    def screened(self, x: Tensor) -> Tensor:
        """What neurons give behind the ReLU, [T, n], from the rows that the copy does not rule out."""
        union = self._find_candidates(x)
        values = x.new_zeros(x.shape[0], len(self.rows))
        if len(union):
            values[:, union] = self.candidate_products(x, union, self._first_biases())
        return values

    def candidate_products(self, x: Tensor, union: Tensor, biases: Tensor | None) -> Tensor:
        """The activations of some rows of the first matrix, [T, k]."""
        rows = torch.index_select(self._table, 0, self._first_rows[union])
        # An op of its own: it keeps the native form of weights that do not move, and these do.
        product = LinearOp(self._context.linear)(x, (rows,), (None if biases is None else biases[union],))[0]
        return api.activate(product, self._activation.value)

    def sum_up(self, neurons: Tensor, form: Form) -> Tensor:
        """The product with the last matrix: neurons [T, n] → [T, num_out]."""
        match form:
            case Form.DENSE:
                return sum_all(neurons, self._columns, self._context.linear)
            case Form.BAGS:
                num_bags = max(1, -(-BAGS_PER_THREAD * self._context.num_threads // neurons.shape[0]))
                return sum_bags(neurons, self._table, self._places, num_bags=num_bags)
            case Form.UNION:
                union = neurons.ne(0).any(0).nonzero()[:, 0]
                return sum_union(neurons, self._table, self._places, union, self._context.linear)

    def _choose(self, needed: Tensor) -> Form:
        num_tokens, num_all = needed.shape
        own = int(needed.sum())
        union = own if num_tokens == 1 else int(needed.any(0).sum())
        form = self._context.costs.choose(num_tokens, num_own=own, num_union=union, num_all=num_all)
        counts = self._context.counts
        counts.num_neurons += num_tokens * num_all
        counts.num_active += own
        counts.num_rows += num_all
        counts.num_rows_read += num_all if form is Form.DENSE else union
        counts.forms[form] += 1
        return form

    def first_products(self, x: Tensor) -> Tensor:
        """x · rows of the first matrix, all of them: [T, n]."""
        return self._product(x, 0)

    def _neurons(self, x: Tensor) -> Tensor:
        """All rows of all matrices but the last → [T, n]."""
        ins = [self._product(x, place) for place in range(self.shape.num_ins)]
        return activate_neurons(ins, self._activation, self._mask)

    def _gate(self, x: Tensor) -> Tensor:
        """activation(gate) [T, n], 0 where it skips a neuron."""
        gate = api.activate(self._product(x, 0), self._activation.value)
        return gate if self._mask is None else keep_large(gate, self._mask.threshold)

    def _product(self, x: Tensor, place: int) -> Tensor:
        """x · rows of the matrix at a place, of all parts side by side."""
        multiply = self._multiply if place == 0 else self._multiply_up
        products = multiply(
            x, [part.numbers.ins[place] for part in self.parts], [part.biases[place] for part in self.parts]
        )
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _with_up(self, x: Tensor, gate: Tensor, needed: Tensor) -> Tensor:
        """gate · up [T, n] where some token needs it, and 0 elsewhere."""
        assert self._up_rows is not None, "a gated MLP"
        union = needed.any(0).nonzero()[:, 0]
        neurons = torch.zeros_like(gate)
        if not len(union):
            return neurons
        rows = torch.index_select(self._table, 0, self._up_rows[union])  # [k, K]
        bias = self._up_bias()
        # An op of its own: it keeps the native form of weights that do not move, and these do.
        up = LinearOp(self._context.linear)(x, (rows,), (None if bias is None else bias[union],))[0]
        neurons[:, union] = gate[:, union] * up
        return neurons

    def _up_bias(self) -> Tensor | None:
        biases = [part.biases[1] for part in self.parts]
        if self._up_biases is None and biases[0] is not None:
            self._up_biases = torch.cat([bias for bias in biases if bias is not None])
        return self._up_biases


def find_scattered(shape: SiteShape, parts: Sequence[Part]) -> str | None:
    """Why neurons cannot be reached as rows of one table; None: they can."""
    if shape.num_in != shape.num_out:
        return f"rows of {shape.num_in} and columns of {shape.num_out} numbers are no rows of one table"
    if not shape.is_neuron_major:
        return "columns do not lie neuron by neuron"
    for part in parts:
        first = part.numbers.ins[0]
        if not isinstance(first, Tensor):
            return "the matrices are quantised"
        if (first.data_ptr() - parts[0].numbers.memory.data_ptr()) % (shape.num_in * first.element_size()):
            return f"chunks of rows of {shape.num_in} numbers do not begin at whole rows"
    return None


def lay_out(shape: SiteShape, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """All rows of all matrices of parts that follow each other.

    Returns:
        The table [R, E], and [M, n] int64: the row of each neuron in each matrix, the last one's column among them.
    """
    memory = parts[0].numbers.memory
    first, last = parts[0].numbers.columns, parts[-1].numbers.columns
    assert first is not None, "columns lie neuron by neuron"
    assert last is not None, "columns lie neuron by neuron"
    size = last.data_ptr() + last.nbytes - memory.data_ptr()
    numbers = memory.as_strided((size,), (1,)).view(first.dtype)
    rows = [
        torch.cat([_first_row(parts, part, matrix) + torch.arange(len(part.rows)) for part in parts])
        for matrix in range(shape.num_ins + 1)
    ]
    return numbers.view(-1, shape.num_in), torch.stack(rows)


def _first_row(parts: Sequence[Part], part: Part, matrix: int) -> int:
    """The row of the table at which a matrix of a part begins."""
    first = parts[0].numbers.columns
    assert first is not None, "columns lie neuron by neuron"
    distance = part.numbers.memory.data_ptr() - parts[0].numbers.memory.data_ptr()
    return distance // (first.shape[1] * first.element_size()) + matrix * len(part.rows)
