"""The published definitions of the policies once more, slow and obvious: sets of positions, dictionaries of weights.

`NaiveRun` computes one request token by token through the model with attention made of plain loops; a rule says which
keys a decode query attends.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
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
            rule.spec, rule.num_prompt, rule.layer_idx = spec, self.num_prompt, layer_idx
            rule.start()
        self.rotary = RotaryEmbedding(spec.rope, CPU) if spec.rope is not None else None
        self.raw_k: list[Tensor] = [torch.empty(0)] * spec.num_layers
        self.v: list[Tensor] = [torch.empty(0)] * spec.num_layers
        with torch.inference_mode():
            states = [self._run(0, self.num_prompt)]
            states += [self._run(position, position + 1) for position in range(self.num_prompt, len(self.tokens))]
        self.hidden = torch.cat(states)

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
        chosen = rule.choose(Seen(turned_q, keys, values))
        if rule.is_turned and self.rotary is not None:
            kept = sorted(chosen[0])
            own_q = self._rotate(q, torch.tensor([len(kept) - 1]))[0]
            keys = keys.clone()
            keys[kept] = self._rotate(self.raw_k[layer_idx][kept], torch.arange(len(kept)))
            out, weights = self._attend(own_q, keys, values, chosen)
        else:
            out, weights = self._attend(turned_q[0], keys, values, chosen)
        rule.after(weights)
        self.attended[layer_idx, self.start] = chosen
        self.weights[layer_idx, self.start] = weights
        return out[None]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else api.rotate(x, *self.rotary(positions))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attended: list[set[int]]) -> tuple[Tensor, Weights]:
        outs, weights = [], []
        for head, positions in enumerate(attended):
            kept, kv_head = sorted(positions), head // self.tiny.spec.group_size
            probs = (k[kept, kv_head] @ q[head] * self.tiny.spec.head_dim**-0.5).softmax(0)
            outs.append(probs @ v[kept, kv_head])
            weights.append(dict(zip(kept, probs.tolist(), strict=True)))
        return torch.stack(outs), weights
