"""The published definitions of the policies once more, slow and obvious: sets of positions, dictionaries of weights.

`NaiveRun` computes one request token by token through the model with attention made of plain loops; a rule says which
keys a decode query attends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ambidex.attention.select.keyformer import noise_seed
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.kernels.noise import gumbel_noise
from ambidex.layers.rope import RotaryEmbedding
from selective_world import CPU, TinyModel

Weights = list[dict[int, float]]
"""For each query head: position → probability."""


@dataclass(frozen=True)
class Seen:
    """Rotated queries [n, Hq, D], one in a decode step, and K and V [S, Hkv, D] as far as the last of them sees."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def num_keys(self) -> int:
        return len(self.k)


class Rule:
    """What a policy does in one layer; made anew for each layer.

    `spec` and `num_prompt` are set before the first call.
    """

    is_turned = False
    spec: ModelSpec
    num_prompt: int
    layer_idx: int
    early_q: Tensor
    """[Hq, D], rotated: the query that the input of the layer before would have; not in the first layer."""
    given: dict[tuple[int, int], float]
    """Scores by query head and position that stand in for the true ones, as `choose` left them."""

    def start(self) -> None:
        """Set up what depends on the prompt's length."""

    def see_prompt(self, seen: Seen, weights: list[Weights]) -> None:
        """The prompt, and the weights of each of its queries."""

    def choose(self, seen: Seen) -> list[set[int]]:
        """Keys of a decode query, for each query head."""
        raise NotImplementedError

    def after(self, weights: Weights) -> None:
        """The weights that came of it."""

    def kv_head(self, head: int) -> int:
        return head // self.spec.group_size

    def group(self, kv_head: int) -> range:
        return range(kv_head * self.spec.group_size, (kv_head + 1) * self.spec.group_size)

    def summed(self, weights: Weights) -> list[dict[int, float]]:
        """Weights added up over the query heads of each KV head."""
        sums: list[dict[int, float]] = [{} for _ in range(self.spec.num_kv_heads)]
        for head, own in enumerate(weights):
            for position, weight in own.items():
                sums[self.kv_head(head)][position] = sums[self.kv_head(head)].get(position, 0.0) + weight
        return sums

    def for_query_heads(self, by_kv_head: list[set[int]]) -> list[set[int]]:
        return [set(by_kv_head[self.kv_head(head)]) for head in range(self.spec.num_q_heads)]


class NaiveStreamingLLM(Rule):
    is_turned = True

    def __init__(self, num_sinks: int, num_recent: int) -> None:
        self.num_sinks, self.num_recent = num_sinks, num_recent

    def choose(self, seen: Seen) -> list[set[int]]:
        before = range(seen.num_keys - 1)
        kept = {*before[: self.num_sinks], *before[max(0, len(before) - self.num_recent) :], seen.num_keys - 1}
        return [kept] * self.spec.num_q_heads


class NaiveH2OFlexGen(Rule):
    """The cache as the program has it: a list whose first k places are the best, the others a ring of recent keys."""

    def __init__(self, percent: int) -> None:
        self.percent = percent

    def start(self) -> None:
        self.k = max(2, self.num_prompt * self.percent // 100) // 2

    def see_prompt(self, seen: Seen, weights: list[Weights]) -> None:
        heads = range(self.spec.num_kv_heads)
        column: list[dict[int, float]] = [{} for _ in heads]
        for query in weights:
            for head, own in enumerate(self.summed(query)):
                for position, weight in own.items():
                    column[head][position] = column[head].get(position, 0.0) + weight
        border = max(0, seen.num_keys - (self.k - 1))
        self.cache = [sorted(range(border), key=lambda j: (-column[h][j], j))[: self.k] for h in heads]
        self.recent = [list(range(border, seen.num_keys)) for _ in heads]
        self.acc = [{j: column[h][j] for j in [*self.cache[h], *self.recent[h]]} for h in heads]

    def choose(self, seen: Seen) -> list[set[int]]:
        self.position = seen.num_keys - 1
        lists = zip(self.cache, self.recent, strict=True)
        return self.for_query_heads([{*best, *recent, self.position} for best, recent in lists])

    def after(self, weights: Weights) -> None:
        for head, own in enumerate(self.summed(weights)):
            best, recent, acc = self.cache[head], self.recent[head], self.acc[head]
            for position, weight in own.items():
                acc[position] = acc.get(position, 0.0) + weight
            recent.append(self.position)
            oldest = recent.pop(0) if len(recent) > self.k - 1 else None
            if oldest is None:
                continue
            if len(best) == self.k:
                victim = min(best, key=lambda j: (acc[j], j))
                best.remove(victim)
                del acc[victim]
            best.append(oldest)


class NaiveH2ODrop(Rule):
    def __init__(self, percent: int, recent_percent: int) -> None:
        self.percent, self.recent_percent = percent, recent_percent

    def start(self) -> None:
        budget = max(2, self.num_prompt * self.percent // 100)
        self.num_recent = budget * self.recent_percent // 100
        self.num_best = budget - self.num_recent
        self.acc: list[dict[int, float]] = [{} for _ in range(self.spec.num_kv_heads)]

    def see_prompt(self, seen: Seen, weights: list[Weights]) -> None:
        for query in weights:
            self._add(query)
        self._evict(seen.num_keys)

    def choose(self, seen: Seen) -> list[set[int]]:
        self.num_keys = seen.num_keys
        return self.for_query_heads([{*acc, seen.num_keys - 1} for acc in self.acc])

    def after(self, weights: Weights) -> None:
        self._add(weights)
        self._evict(self.num_keys)

    def _add(self, weights: Weights) -> None:
        for acc, own in zip(self.acc, self.summed(weights), strict=True):
            for position, weight in own.items():
                acc[position] = acc.get(position, 0.0) + weight

    def _evict(self, num_keys: int) -> None:
        for head, acc in enumerate(self.acc):
            recent = {j for j in acc if j >= num_keys - self.num_recent}
            rest = sorted((j for j in acc if j not in recent), key=lambda j: (-acc[j], j))
            self.acc[head] = {j: acc[j] for j in acc if j in recent or j in rest[: self.num_best]}


class NaiveBounded(Rule):
    """Drops the least likely rows of each query head while their mass, by the true scores, is at most ε."""

    def __init__(self, max_mass: float) -> None:
        self.max_mass = max_mass

    def choose(self, seen: Seen) -> list[set[int]]:
        chosen = []
        for head in range(self.spec.num_q_heads):
            scores = (
                seen.k[:, self.kv_head(head)].double() @ seen.q[0, head].double() * self.spec.head_dim**-0.5
            ).tolist()
            total = sum(math.exp(score - max(scores)) for score in scores)
            kept, dropped = set(range(len(scores))), 0.0
            for j in sorted(range(len(scores) - 1), key=lambda j: (scores[j], j)):
                dropped += math.exp(scores[j] - max(scores)) / total
                if dropped > self.max_mass:
                    break
                kept.remove(j)
            chosen.append(kept)
        return chosen


class NaiveKeyformer(NaiveH2ODrop):
    """H2O's scheme, with softmax((x + noise) / τ) for what a query gives."""

    def __init__(self, percent: int, recent_percent: int, *, tau: tuple[float, float], limit: int | None) -> None:
        super().__init__(percent, recent_percent)
        self.tau, self.limit = tau, limit

    def start(self) -> None:
        super().start()
        self.num_queries = 0

    def _add(self, weights: Weights) -> None:
        position, self.num_queries = self.num_queries, self.num_queries + 1
        step = max(0, position - self.num_prompt + 1)
        delta = 0.01 if self.limit is None else (self.tau[1] - self.tau[0]) / self.limit
        seed = noise_seed(0, self.layer_idx)
        noise = gumbel_noise(seed, torch.tensor([position]), self.spec.num_q_heads, position + 1)[:, 0]
        noisy = []
        for head, own in enumerate(weights):
            scores = {
                j: (math.log(p) + float(noise[head, j])) / (self.tau[0] + step * delta) for j, p in own.items() if p
            }
            total = sum(math.exp(score) for score in scores.values())
            noisy.append(
                {j: math.exp(score) / total for j, score in scores.items()} | {j: 0.0 for j in own if j not in scores}
            )
        super()._add(noisy)


class NaiveQInferWindows(Rule):
    def __init__(self, percent: int, recent_percent: int) -> None:
        self.percent, self.recent_percent = percent, recent_percent

    def start(self) -> None:
        budget = max(2, self.num_prompt * self.percent // 100)
        self.num_recent = budget * self.recent_percent // 100
        self.num_best = max(1, (budget - self.num_recent) + (budget - self.num_recent) // 2)
        self.acc: list[dict[int, float]] = [{} for _ in range(self.spec.num_kv_heads)]

    def see_prompt(self, seen: Seen, weights: list[Weights]) -> None:
        assert seen.num_keys == len(weights)
        for query in weights:
            for acc, own in zip(self.acc, self.summed(query), strict=True):
                for position, weight in own.items():
                    acc[position] = acc.get(position, 0.0) + weight

    def choose(self, seen: Seen) -> list[set[int]]:
        own = seen.num_keys - 1
        chosen = []
        for head, acc in enumerate(self.acc):
            best = sorted(acc, key=lambda j: (-acc[j], j))[: self.num_best - 1]
            self.acc[head] = {j: acc[j] for j in best} | {own: 0.0}
            chosen.append({*best, own, *range(max(0, own - self.num_recent), own)})
        return self.for_query_heads(chosen)

    def after(self, weights: Weights) -> None:
        for acc, own in zip(self.acc, self.summed(weights), strict=True):
            for position in acc:
                acc[position] += own[position]


class NaiveQuest(Rule):
    def __init__(self, num_pages: int, page: int, exact_layers: int) -> None:
        self.num_pages, self.page, self.exact_layers = num_pages, page, exact_layers

    def choose(self, seen: Seen) -> list[set[int]]:
        everything = range(seen.num_keys)
        if self.layer_idx < self.exact_layers:
            return [set(everything)] * self.spec.num_q_heads
        pages = [everything[first : first + self.page] for first in range(0, seen.num_keys, self.page)]
        chosen = []
        for head in range(self.spec.num_q_heads):
            bounds = []
            for page in pages[:-1]:
                keys = seen.k[list(page), self.kv_head(head)]
                ends = zip(seen.q[0, head], keys.amin(0), keys.amax(0), strict=True)
                bounds.append(float(sum(max(x * low, x * high) for x, low, high in ends)))
            order = sorted(range(len(bounds)), key=lambda j: (-bounds[j], j))[: self.num_pages - 1]
            chosen.append({j for index in order for j in pages[index]} | set(pages[-1]))
        return chosen


class EarlyRule(Rule):
    """Rules that predict with the query of the layer before's input, and with few columns of K."""

    def __init__(self, exact_layers: int, percent: int) -> None:
        self.exact_layers, self.percent = exact_layers, percent

    def see_prompt(self, seen: Seen, weights: list[Weights]) -> None:
        assert seen.num_keys == len(weights)
        self.turns: list[Tensor] = []
        for kv_head in range(self.spec.num_kv_heads):
            queries = torch.cat([seen.q[:, head] for head in self.group(kv_head)])
            turn = torch.linalg.svd(queries.double(), full_matrices=False).Vh.T.float()
            sizes = (queries @ turn).abs().sum(0) + (seen.k[:, kv_head] @ turn).abs().sum(0)
            columns = sizes.topk(max(1, self.spec.head_dim * self.percent // 100)).indices
            self.turns.append(turn[:, columns])

    def predicted(self, seen: Seen, head: int) -> list[float]:
        turn = self.turns[self.kv_head(head)]
        scores = (seen.k[:-1, self.kv_head(head)] @ turn) @ (self.early_q[head] @ turn)
        return (scores * self.spec.head_dim**-0.5).tolist()

    def early(self, seen: Seen, head: int) -> list[float]:
        scores = seen.k[:-1, self.kv_head(head)] @ self.early_q[head] * self.spec.head_dim**-0.5
        return scores.tolist()

    def best_of_group(self, scores: list[list[float]], kv_head: int) -> list[float]:
        return [max(column) for column in zip(*(scores[head] for head in self.group(kv_head)), strict=True)]

    def everything(self, seen: Seen) -> list[set[int]]:
        return [set(range(seen.num_keys))] * self.spec.num_q_heads


class NaiveInfiniGen(EarlyRule):
    def __init__(self, cap_percent: int, alpha: float, *, percent: int, exact_layers: int) -> None:
        super().__init__(exact_layers, percent)
        self.cap_percent, self.alpha = cap_percent, alpha

    def choose(self, seen: Seen) -> list[set[int]]:
        if self.layer_idx < self.exact_layers:
            return self.everything(seen)
        all_scores = [self.predicted(seen, head) for head in range(self.spec.num_q_heads)]
        by_head = [self.best_of_group(all_scores, kv_head) for kv_head in range(self.spec.num_kv_heads)]
        counts = [sum(score > max(scores) - self.alpha for score in scores) for scores in by_head]
        count = min(int(sum(counts) / len(counts)), max(2, self.num_prompt * self.cap_percent // 100))
        return self.for_query_heads(
            [{*sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count], len(scores)} for scores in by_head]
        )


class NaiveHybridGen(EarlyRule):
    def __init__(self, percent_selected: int, *, near: int, is_pre: bool, percent: int, exact_layers: int) -> None:
        super().__init__(exact_layers, percent)
        self.percent_selected, self.near, self.is_pre = percent_selected, near, is_pre

    def choose(self, seen: Seen) -> list[set[int]]:
        self.given = {}
        num_far = max(0, seen.num_keys - 1 - self.near)
        if self.layer_idx < self.exact_layers or num_far == 0:
            return self.everything(seen)
        early = [self.early(seen, head)[:num_far] for head in range(self.spec.num_q_heads)]
        by = [self.predicted(seen, head)[:num_far] for head in range(self.spec.num_q_heads)] if self.is_pre else early
        count, chosen = max(2, self.num_prompt * self.percent_selected // 100), []
        for kv_head in range(self.spec.num_kv_heads):
            scores = self.best_of_group(by, kv_head)
            chosen.append(
                {*sorted(range(num_far), key=lambda j: (-scores[j], j))[:count], *range(num_far, seen.num_keys)}
            )
        self.given = {(head, j): early[head][j] for head in range(self.spec.num_q_heads) for j in range(num_far)}
        return self.for_query_heads(chosen)


class NaiveSteeredHybridGen(NaiveHybridGen):
    """The same, told at each position how many keys to select, and in which mode: `settings` (keys or None, is_pre)."""

    def __init__(self, settings: list[tuple[int | None, bool]], *, near: int, percent: int, exact_layers: int) -> None:
        super().__init__(0, near=near, is_pre=False, percent=percent, exact_layers=exact_layers)
        self.settings = settings

    def choose(self, seen: Seen) -> list[set[int]]:
        count, self.is_pre = self.settings[(seen.num_keys - 1) % len(self.settings)]
        # ceil, so that the share of the prompt is the number itself again
        self.percent_selected = 20 if count is None else -(-100 * count // self.num_prompt)
        return super().choose(seen)


@dataclass
class NaiveRun:
    """One request, computed by the definition. Implements `AttentionOp`.

    Attributes:
        attended, weights: by (layer, position of the decode query), for each query head.
        hidden: [S, E] of all tokens.
    """

    tiny: TinyModel
    rules: list[Rule]
    tokens: list[int]
    num_prompt: int
    attended: dict[tuple[int, int], list[set[int]]] = field(default_factory=dict)
    weights: dict[tuple[int, int], Weights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.tiny.spec
        for layer_idx, rule in enumerate(self.rules):
            rule.spec, rule.num_prompt, rule.layer_idx, rule.given = spec, self.num_prompt, layer_idx, {}
            rule.start()
        self.inputs: dict[int, Tensor] = {}
        self.attentions = {m.layer_idx: m for m in self.tiny.model.modules() if hasattr(m, "layer_idx")}
        hooks = [m.register_forward_pre_hook(self._note_input) for m in self.attentions.values()]
        self.rotary = RotaryEmbedding(spec.rope, CPU) if spec.rope is not None else None
        self.raw_k: list[Tensor] = [torch.empty(0)] * spec.num_layers
        self.v: list[Tensor] = [torch.empty(0)] * spec.num_layers
        with torch.inference_mode():
            states = [self._run(0, self.num_prompt)]
            states += [self._run(position, position + 1) for position in range(self.num_prompt, len(self.tokens))]
        self.hidden = torch.cat(states)
        for hook in hooks:
            hook.remove()

    def _note_input(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self.inputs[module.layer_idx] = args[0]

    def _run(self, start: int, end: int) -> Tensor:
        self.start = start
        return self.tiny.model(torch.tensor(self.tokens[start:end]), torch.arange(start, end), self)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        del angles
        self.raw_k[layer_idx] = k if self.start == 0 else torch.cat((self.raw_k[layer_idx], k))
        self.v[layer_idx] = v if self.start == 0 else torch.cat((self.v[layer_idx], v))
        values, rule = self.v[layer_idx], self.rules[layer_idx]
        positions = torch.arange(len(values))
        keys = self._rotate(self.raw_k[layer_idx], positions)
        turned_q = self._rotate(q, positions[self.start :])
        if self.start == 0:
            everything = [[set(range(row + 1))] * q.shape[1] for row in range(len(q))]
            rows = [self._attend(turned_q[row], keys, values, kept) for row, kept in enumerate(everything)]
            rule.see_prompt(Seen(turned_q, keys, values), [weights for _, weights in rows])
            return torch.stack([out for out, _ in rows])
        if layer_idx > 0:
            rule.early_q = self._rotate(self.attentions[layer_idx].query(self.inputs[layer_idx - 1]), positions[-1:])[0]
        chosen = rule.choose(Seen(turned_q, keys, values))
        if rule.is_turned and self.rotary is not None:
            kept = sorted(chosen[0])
            own_q = self._rotate(q, torch.tensor([len(kept) - 1]))[0]
            keys = keys.clone()
            keys[kept] = self._rotate(self.raw_k[layer_idx][kept], torch.arange(len(kept)))
            out, weights = self._attend(own_q, keys, values, chosen)
        else:
            out, weights = self._attend(turned_q[0], keys, values, chosen, rule.given)
        rule.after(weights)
        self.attended[layer_idx, self.start] = chosen
        self.weights[layer_idx, self.start] = weights
        return out[None]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else api.rotate(x, *self.rotary(positions))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attended: list[set[int]],
        given: Mapping[tuple[int, int], float] = MappingProxyType({}),
    ) -> tuple[Tensor, Weights]:
        outs, weights = [], []
        for head, positions in enumerate(attended):
            kept, kv_head = sorted(positions), head // self.tiny.spec.group_size
            true = (k[kept, kv_head] @ q[head] * self.tiny.spec.head_dim**-0.5).tolist()
            probs = torch.tensor([given.get((head, j), x) for j, x in zip(kept, true, strict=True)]).softmax(0)
            outs.append(probs @ v[kept, kv_head])
            weights.append(dict(zip(kept, probs.tolist(), strict=True)))
        return torch.stack(outs), weights
