"""How far a layer's query can be made one layer early: early scores against true ones, layer by layer, on a text.

    inputs of layers i − 1 and i  →  q̂ = W_q(i) · input(i − 1),  q = W_q(i) · input(i)  →  q̂·k and q·k of all far keys

Near keys, which HybridGen scores truly, are left out where scores are compared. Weights are those of all keys, as it
makes them: early scores of the far keys and true ones of the near in one softmax. The text is a prompt, which attends
all keys.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from ambidex.attention.select.policy import group_scores
from ambidex.core.config import EngineConfig, Graphs
from ambidex.core.errors import ConfigError, RequestFailedError
from ambidex.core.request import SamplingParams
from ambidex.engine.compose import build_engine
from ambidex.eval.teacher import Progress
from ambidex.formats.accuracy_profile import LayerLookAhead
from ambidex.kernels import api
from ambidex.models.base import Angles, AttentionOp, CausalLM
from ambidex.models.look_ahead import Attention
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model

NUM_QUERIES: Final = 64
"""Last tokens of the text whose queries are looked at."""
TOP_SHARE: Final = 0.05
"""Of the far keys, that count as those which a query finds."""
LEAST_RECALL: Final = 0.9
"""From which a layer's early query is good enough to select by. On SmolLM2-135M layers 1 and 2 have 0.3 and 0.5, all
others 0.9 and more: the border lies in the gap."""
NUM_IN_A_ROW: Final = 3
"""Layers one after the other that must reach it, so that one lucky layer does not count."""


def find_exact_layers(layers: Sequence[LayerLookAhead]) -> int:
    """How many first layers do not look ahead: those before the first from which on `NUM_IN_A_ROW` (or as many as there
    are) reach `LEAST_RECALL`; at least 1, since nothing lies before layer 0, and all if none do."""
    for first in range(1, len(layers)):
        if all(layer.recall >= LEAST_RECALL for layer in layers[first : first + NUM_IN_A_ROW]):
            return first
    return len(layers)


def measure_look_ahead(
    config: EngineConfig, text: str, *, context: int, num_near: int, progress: Progress | None = None
) -> tuple[LayerLookAhead, ...]:
    """Run the beginning of a text through a model, and compare the early queries of its last tokens with the true ones.

    Args:
        context: tokens of the text.
        num_near: newest keys of each query that are left out.
    Returns:
        One for each layer; layer 0, which has none before it, gets zeros.
    Raises:
        ConfigError, ModelError: settings, model or text cannot be used.
        RequestFailedError: the engine could not compute it.
    """
    probe = _Probe(first_query=context - min(NUM_QUERIES, context // 2), num_near=num_near)
    engine = build_engine(replace(config, graphs=Graphs.OFF), progress=progress, forward=probe)
    if context >= engine.max_context_len:
        raise ConfigError(f"--context is {context}, with the token behind it the limit is {engine.max_context_len}")
    ids = engine.tokenizer.encode(text)[:context]
    if len(ids) < context:
        raise ConfigError(f"the text has {len(ids)} tokens, --context is {context}: give more text, or lower it")
    if probe.first_query - num_near < 2 / TOP_SHARE:
        raise ConfigError(
            f"--context {context} leaves too few keys beyond the {num_near} near ones to compare: raise it, or lower "
            f"`near_tokens`"
        )
    engine.add(ids, SamplingParams(max_output_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RequestFailedError(output.error)
    return probe.layers(engine.figures.spec.num_layers)


class _Probe:
    """Calls the model with an attention that looks on."""

    def __init__(self, *, first_query: int, num_near: int) -> None:
        self.first_query = first_query
        self._num_near = num_near
        self._modules: dict[int, Attention] = {}
        self._inputs: dict[int, Tensor] = {}
        self._keys: dict[int, list[Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._num_seen: dict[int, int] = {}

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        if not self._modules:
            for module in model.modules():
                if isinstance(module, Attention):
                    self._modules[module.layer_idx] = module
                    module.register_forward_pre_hook(self._note_input)
        return call_model(model, batch, _Watched(attention, self, batch.positions))

    def _note_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Attention), "hooks are on attention"
        self._inputs[module.layer_idx] = args[0]

    def look(self, layer_idx: int, q: Tensor, k: Tensor, angles: Angles | None, positions: Tensor) -> None:
        """Compare the early queries of a step's tokens in one layer with the true ones."""
        turned = k if angles is None else api.rotate(k, *angles)
        self._keys.setdefault(layer_idx, []).append(turned.float())
        if layer_idx == 0:
            return
        early = self._modules[layer_idx].query(self._inputs[layer_idx - 1])
        if angles is not None:
            q, early = api.rotate(q, *angles), api.rotate(early, *angles)
        cosine = torch.cosine_similarity(self._inputs[layer_idx - 1].float(), self._inputs[layer_idx].float(), dim=1)
        keys = torch.cat(self._keys[layer_idx]).transpose(0, 1)  # [Hkv, S, D]
        scale = q.shape[2] ** -0.5
        for row, position in enumerate(positions.tolist()):
            if position < self.first_query:
                continue
            far = keys[:, : position - self._num_near]
            scores = group_scores(q[row][None].float(), keys[:, : position + 1], scale)[:, 0]  # [Hq, S]
            stale = group_scores(early[row][None].float(), far, scale)[:, 0]  # [Hq, far]
            true = scores[:, : far.shape[1]]
            figures = torch.stack(
                (
                    cosine[row],
                    correlation(true, stale).mean(),
                    recall(true, stale).mean(),
                    weight_distance(scores, stale).mean(),
                )
            )
            self._sums[layer_idx] = self._sums.get(layer_idx, torch.zeros_like(figures)) + figures
            self._num_seen[layer_idx] = self._num_seen.get(layer_idx, 0) + 1

    def layers(self, num_layers: int) -> tuple[LayerLookAhead, ...]:
        """The means."""
        means: Mapping[int, list[float]] = {
            layer_idx: (sums / self._num_seen[layer_idx]).tolist() for layer_idx, sums in self._sums.items()
        }
        found = [means.get(layer_idx, [0.0] * 4) for layer_idx in range(num_layers)]
        return tuple(
            LayerLookAhead(input_cosine=cosine, correlation=linear, recall=mass, weight_distance=distance)
            for cosine, linear, mass, distance in found
        )


class _Watched:
    """The attention, which the probe is shown the queries and keys of."""

    def __init__(self, attention: AttentionOp, probe: _Probe, positions: Tensor) -> None:
        self._attention, self._probe, self._positions = attention, probe, positions

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        self._probe.look(layer_idx, q, k, angles, self._positions)
        return self._attention.attend(layer_idx, q, k, v, angles=angles)


def correlation(true: Tensor, early: Tensor) -> Tensor:
    """Pearson's, of scores [H, S] each: [H]; 0 where one does not vary."""
    a, b = (values - values.mean(1, keepdim=True) for values in (true, early))
    norms = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(norms > 0, (a * b).sum(1) / norms, 0.0).clamp(-1, 1)


def recall(true: Tensor, early: Tensor) -> Tensor:
    """Softmax mass, by true scores [H, S], of the `TOP_SHARE` of the keys that the early scores [H, S] put first, over
    that of those which the true ones do: [H], at most 1."""
    count = max(1, math.ceil(TOP_SHARE * true.shape[1]))
    probs = true.softmax(1)
    found, best = (probs.gather(1, scores.topk(count, dim=1).indices).sum(1) for scores in (early, true))
    return (found / best).clamp(max=1)


def weight_distance(true: Tensor, early: Tensor) -> Tensor:
    """How far weights are from those that true scores [H, S] give, if early ones [H, far] stand in the place of those
    of the first keys: total variation, the share of the weight that lies on other keys, [H], 0 … 1."""
    joined = torch.cat((early, true[:, early.shape[1] :]), dim=1)
    return (joined.softmax(1) - true.softmax(1)).abs().sum(1) / 2
