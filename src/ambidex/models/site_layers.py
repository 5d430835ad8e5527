"""The layers of a place of a model: their matrices as one shape, their biases, pieces in the place of parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import NeuronMask
from ambidex.layers.linear import Linear
from ambidex.layers.mlp import Neurons
from ambidex.layers.split_matrix import Piece, SplitMatrix
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.parts import Rows
from ambidex.models.base import CausalLM, LinearSite


def kinds_of_layers(model: CausalLM, kinds: Mapping[str, str]) -> dict[Linear, str]:
    """The GGUF types of layers whose matrices stay as they are stored.

    Args:
        kinds: by name of the matrix.
    """
    return {
        module: kinds[f"{name}.weight"]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and f"{name}.weight" in kinds
    }


def layers_of(site: LinearSite | Neurons) -> tuple[Linear, ...]:
    """All layers of a place."""
    return (*site.ins, site.out) if isinstance(site, Neurons) else site.ins


def shape_of(site: LinearSite | Neurons, kinds: Mapping[Linear, str]) -> SiteShape:
    """The matrices of a place, which stay quantised if all are of one type."""
    found = {kinds.get(layer) for layer in layers_of(site)}
    kind = found.pop() if len(found) == 1 else None
    num_rows = [layer.weight.shape[0] for layer in site.ins]
    num_in = site.ins[0].weight.shape[1]
    if isinstance(site, Neurons):
        return SiteShape(
            num_in=num_in,
            num_rows=num_rows[0],
            num_ins=len(num_rows),
            num_out=site.out.weight.shape[0],
            kind=kind,
        )
    return SiteShape(num_in=num_in, num_rows=sum(num_rows), kind=kind)


def answer_sizes(site: LinearSite | Neurons) -> list[int]:
    """Widths of what a place gives, of each matrix."""
    layers = (site.out,) if isinstance(site, Neurons) else site.ins
    return [layer.weight.shape[0] for layer in layers]


def activation_of(site: LinearSite | Neurons) -> Activation | None:
    """Of neurons; None: the place has none."""
    return site.activation if isinstance(site, Neurons) else None


def mask_of(site: LinearSite | Neurons) -> NeuronMask | None:
    """What sets some neurons to 0; None: nothing does."""
    return site.mask if isinstance(site, Neurons) else None


def neuron_biases(site: LinearSite | Neurons) -> list[Tensor]:
    """Those before the activation."""
    return [layer.bias for layer in site.ins if layer.bias is not None] if isinstance(site, Neurons) else []


def last_bias(site: LinearSite | Neurons) -> Tensor | None:
    """What is added to the answers of all matrices side by side."""
    layers = (site.out,) if isinstance(site, Neurons) else site.ins
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not biases:
        return None
    return torch.cat(
        [biases[0].new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias for layer in layers]
    )


def make_matrices(site: LinearSite | Neurons, parts: Sequence[Rows]) -> list[tuple[Linear, SplitMatrix]]:
    """Each matrix of a place in pieces, which are views of the parts."""
    parts = [part for part in parts if len(part.rows)]
    made: list[tuple[Linear, SplitMatrix]] = []
    first = 0  # row of the place
    for place, layer in enumerate(site.ins):
        num_rows, width = layer.weight.shape
        pieces = []
        for part in parts:
            if isinstance(site, Neurons):
                pieces.append(Piece(part.rows.start, part.ins[place]))
                continue
            start, stop = max(part.rows.start, first), min(part.rows.stop, first + num_rows)
            if start >= stop:
                continue
            if part.joint_in is not None:
                pieces.append(Piece(start - first, part.joint_in[start - part.rows.start : stop - part.rows.start]))
            else:
                pieces.append(Piece(start - first, part.ins[0], first=start - part.rows.start, num=stop - start))
        first += num_rows
        made.append((layer, SplitMatrix((num_rows, width), pieces, axis=0)))
    if isinstance(site, Neurons):
        num_out, num_rows = site.out.weight.shape
        columns = [Piece(part.rows.start, part.out) for part in parts if part.out is not None]
        made.append((site.out, SplitMatrix((num_out, num_rows), columns, axis=1)))
    return made
