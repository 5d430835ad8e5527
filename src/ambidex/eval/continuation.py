"""The log-probability of a text behind another: what multiple choice and perplexity harnesses ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ambidex.core.errors import ConfigError
from ambidex.core.step import SelectionFigures
from ambidex.eval.teacher import Teacher
from ambidex.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """`logprob` of all tokens together, in nats; `is_greedy`: each of them was the likeliest."""

    logprob: float
    is_greedy: bool
    selection: SelectionFigures | None


def split_ids(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, at least one each.

    Spaces at the context's end belong to what follows, as words of most tokenizers begin with theirs; both are cut as
    one text, then parted, as lm-evaluation-harness does. An empty context is the token that begins or ends a text.

    Raises:
        ConfigError: nothing follows, or the context is empty and the tokenizer has no such token.
    """
    whole = tokenizer.encode(context + continuation)
    num_context = len(tokenizer.encode(context.rstrip()))
    if not num_context:
        edge = [tokenizer.bos_id] if tokenizer.bos_id is not None else tokenizer.eos_ids[:1]
        whole, num_context = [*edge, *whole], len(edge)
    num_context = min(num_context, len(whole) - 1)  # a token may reach across the border
    if num_context < 1:
        raise ConfigError(f"no tokens to score in {continuation[:60]!r} behind {context[-60:]!r}: give both a text")
    return whole[:num_context], whole[num_context:]


def score_continuation(
    teacher: Teacher, context: Sequence[int], continuation: Sequence[int], *, is_exact: bool
) -> Continuation:
    """Log-probability of a continuation.

    All of the context but its last token is the prompt, which attends all keys; that token and the continuation are
    decode queries under the engine's policy. A context of one token is the prompt itself.

    Args:
        context: at least one token.
        is_exact: attend all keys instead.
    Raises:
        ConfigError: it is longer than the context limit.
        RequestFailedError: the engine could not compute it.
    """
    ids = [*context, *continuation[:-1]]
    if len(ids) >= teacher.engine.max_context_len:
        raise ConfigError(
            f"a question with what stands before it and its answer has {len(ids) + 1} tokens: the context limit is "
            f"{teacher.engine.max_context_len}: lower --shots, or raise --max-context-len"
        )
    first = len(context) - 1
    selection = None
    if is_exact or len(ids) == 1:
        logprobs = teacher.exact(ids, first=first)
    else:
        logprobs, selection = teacher.with_policy(ids, num_prompt=max(1, first), first=first)
    return Continuation(
        logprob=_sum(logprobs, continuation),
        is_greedy=logprobs.argmax(1).tolist() == list(continuation),
        selection=selection,
    )


def _sum(logprobs: Tensor, tokens: Sequence[int]) -> float:
    return float(sum(float(row[token]) for row, token in zip(logprobs, tokens, strict=True)))
