"""Logits → token ids. Each request has its own random stream and its own history, so that an answer does not depend
on which other requests share the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.ids import RequestId
from ambidex.core.request import SamplingParams
from ambidex.core.step import NewRequest, SampledToken


@dataclass(slots=True, kw_only=True)
class SamplingState:
    """What the sampler keeps of one request from its first step until it is forgotten."""

    params: SamplingParams
    generator: torch.Generator
    stop_ids: Tensor  # [n] int64
    bias_ids: Tensor  # [n] int64
    bias: Tensor  # [n] fp32
    is_in_prompt: Tensor | None  # [V] bool, only with a penalty
    output_counts: Tensor | None  # [V] fp32, only with a penalty
    num_output_tokens: int = 0


class Sampler:
    """Chooses one token for each row of logits.

    Source of the filters: top-p arXiv:1904.09751, min-p arXiv:2407.01082.
    """

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[RequestId, SamplingState] = {}

    def add(self, request: NewRequest) -> None:
        """Start the random stream and the history of a request."""
        params = request.params
        generator = torch.Generator()
        generator.manual_seed(request.seed)
        is_in_prompt = output_counts = None
        if _has_penalty(params):
            is_in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            is_in_prompt[self._ids(request.prompt_token_ids)] = True
            output_counts = torch.zeros(self._vocab_size, device=self._device)
        self._states[request.request_id] = SamplingState(
            params=params,
            generator=generator,
            stop_ids=self._ids(sorted(request.stop_ids)),
            bias_ids=self._ids([token_id for token_id, _ in params.logit_bias]),
            bias=torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=self._device),
            is_in_prompt=is_in_prompt,
            output_counts=output_counts,
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop the state of a request that ended."""
        self._states.pop(request_id, None)

    def sample(
        self, logits: Tensor, request_ids: Sequence[RequestId], allowed_tokens: Sequence[bytes | None] = ()
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str]]:
        """Choose a token for each request.

        Args:
            logits: [B, V] fp32; row i belongs to `request_ids[i]`. Overwritten.
            allowed_tokens: bit mask of the tokens that each may be given (`ScheduledRequest`), None or no entry: any.
        Returns:
            The chosen tokens, and the requests whose logits are not finite, with the reason.
        Cost: waits for the device.
        """
        states = [self._states[request_id] for request_id in request_ids]
        is_finite = torch.isfinite(logits).all(dim=-1)  # [B]
        wants_logprobs = any(state.params.logprobs is not None for state in states)
        raw_logprobs = torch.log_softmax(logits, dim=-1) if wants_logprobs else None
        for row, state in zip(logits, states, strict=True):
            _adjust(row, state)
        self._forbid(logits, allowed_tokens)
        is_possible = logits.amax(dim=-1) > -torch.inf  # [B]
        chosen = self._choose(logits, states)  # [B]
        tokens: dict[RequestId, SampledToken] = {}
        failures: dict[RequestId, str] = {}
        rows = zip(
            request_ids, states, chosen.tolist(), is_finite.tolist(), (is_possible | ~is_finite).tolist(), strict=True
        )
        for row_idx, (request_id, state, token_id, is_row_finite, is_row_possible) in enumerate(rows):
            if not is_row_finite:
                failures[request_id] = _not_finite(state)
                continue
            if not is_row_possible:
                failures[request_id] = (
                    "every token is forbidden: the grammar and min_output_tokens shut out all that are left"
                )
                continue
            state.num_output_tokens += 1
            if state.output_counts is not None:
                state.output_counts[token_id] += 1
            tokens[request_id] = _with_logprobs(token_id, state.params, raw_logprobs, row_idx)
        return tokens, failures

    def _forbid(self, logits: Tensor, allowed_tokens: Sequence[bytes | None]) -> None:
        """Shut out the tokens that a mask does not allow, in place."""
        rows = [idx for idx, mask in enumerate(allowed_tokens) if mask is not None]
        if not rows:
            return
        masks = bytearray(b"".join(mask for mask in allowed_tokens if mask is not None))
        words = torch.frombuffer(masks, dtype=torch.int32).reshape(len(rows), -1).to(self._device)  # [R, W]
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self._device)) & 1  # [R, W, 32]
        is_forbidden = bits.flatten(1)[:, : self._vocab_size] == 0  # [R, V]
        logits[rows] = logits[rows].masked_fill(is_forbidden, -torch.inf)

    def takes_likeliest(self, request_ids: Sequence[RequestId]) -> bool:
        """Whether `sample` would give each of the requests its likeliest token and nothing besides."""
        return all(_is_plain(self._states[request_id]) for request_id in request_ids)

    def keep(
        self, request_ids: Sequence[RequestId], chosen: Sequence[int]
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str]]:
        """What `sample` returns, for requests whose likeliest tokens are known; −1 where logits are not finite."""
        tokens: dict[RequestId, SampledToken] = {}
        failures: dict[RequestId, str] = {}
        for request_id, token_id in zip(request_ids, chosen, strict=True):
            state = self._states[request_id]
            if token_id < 0:
                failures[request_id] = _not_finite(state)
            else:
                state.num_output_tokens += 1
                tokens[request_id] = SampledToken(token_id=token_id)
        return tokens, failures

    def _choose(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        chosen = logits.argmax(dim=-1)  # [B]
        random_rows = [idx for idx, state in enumerate(states) if state.params.temperature > 0]
        if random_rows:
            picked = [states[idx] for idx in random_rows]
            chosen[random_rows] = _draw(logits[random_rows], picked)
        return chosen

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(token_ids), dtype=torch.int64, device=self._device)


def _not_finite(state: SamplingState) -> str:
    return f"the model's logits are not finite after {state.num_output_tokens} tokens"


def _is_plain(state: SamplingState) -> bool:
    params = state.params
    return (
        params.temperature == 0
        and params.logprobs is None
        and params.guide is None
        and not params.logit_bias
        and state.output_counts is None
        and (state.num_output_tokens >= params.min_output_tokens or not state.stop_ids.numel())
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _adjust(row: Tensor, state: SamplingState) -> None:
    """Apply bias, penalties and the minimum length to one row of logits, in place."""
    params = state.params
    if state.bias_ids.numel():
        row[state.bias_ids] += state.bias
    if state.output_counts is not None and state.is_in_prompt is not None:
        is_seen = state.is_in_prompt | (state.output_counts > 0)
        scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        torch.where(is_seen, scaled, row, out=row)
        row -= params.frequency_penalty * state.output_counts
        row -= params.presence_penalty * (state.output_counts > 0)
    if state.num_output_tokens < params.min_output_tokens and state.stop_ids.numel():
        row[state.stop_ids] = -torch.inf


def _draw(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Draw from the filtered distribution of each row by inverting its cumulative sum, in fp64.

    Returns: token ids [R].
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    params = [state.params for state in states]
    shifted = logits.double() - logits.double().amax(dim=-1, keepdim=True)  # so that tiny temperatures do not overflow
    scaled = shifted / column([p.temperature for p in params])  # [R, V]
    probs, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=logits.device)
    top_k = column([p.top_k or probs.shape[-1] for p in params])
    before = probs.cumsum(dim=-1) - probs  # mass of likelier tokens
    is_kept = (ranks < top_k) & (before < column([p.top_p for p in params]))
    is_kept &= probs >= column([p.min_p for p in params]) * probs[:, :1]
    is_kept[:, 0] = True
    cumulative = (probs * is_kept).cumsum(dim=-1)
    uniform = [float(torch.rand((), generator=state.generator, dtype=torch.float64)) for state in states]
    threshold = column(uniform) * cumulative[:, -1:]
    place = (cumulative <= threshold).sum(dim=-1, keepdim=True)  # first rank whose cumulative mass exceeds it
    last_kept = (ranks * is_kept).amax(dim=-1, keepdim=True)
    return order.gather(-1, torch.minimum(place, last_kept))[:, 0]


def _with_logprobs(token_id: int, params: SamplingParams, raw: Tensor | None, row_idx: int) -> SampledToken:
    if params.logprobs is None or raw is None:
        return SampledToken(token_id=token_id)
    row = raw[row_idx]
    values, ids = row.topk(min(params.logprobs, row.shape[-1]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id=token_id, logprob=float(row[token_id]), top_logprobs=top)
