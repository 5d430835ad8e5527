"""`TextSide`: what of an engine deals with text alone; it needs no weights, and so a server has one of its own."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ambidex.core.errors import ConfigError, ContextLengthError, RequestError
from ambidex.core.ids import RequestId
from ambidex.core.request import MAX_PRIORITY, Request, SamplingParams
from ambidex.formats.bounded_file import read_file
from ambidex.formats.locate import ModelSource, SourceKind, find_model
from ambidex.text.chat import MAX_TEMPLATE_BYTES, ChatTemplate
from ambidex.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """What a built engine has found out and the text side must know.

    `model_path` is the folder or the GGUF file that the tokenizer is in, `max_context_len` counts tokens of prompt and
    answer together, `eos_ids` end an answer.
    """

    model_path: str
    max_context_len: int
    vocab_size: int
    eos_ids: frozenset[int]


class TextSide:
    """Prompts to checked requests. Any thread may call it."""

    def __init__(self, facts: TextFacts, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._numbers = itertools.count()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            RequestError: the model has no template, or the messages or tools do not fit it.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, tools=tools), add_special=False)

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, tenant: str = "", cache_salt: str = "", priority: int = 0
    ) -> Request:
        """Check a prompt and its parameters, but for a grammar; nothing runs yet.

        Args:
            tenant, cache_salt: only requests with the same two share what they have in common.
            priority: lower goes sooner among the waiting requests of its tenant.
        Raises:
            RequestError, ContextLengthError: what is wrong with them.
        """
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the sampling parameters are a {type(params).__name__}: give SamplingParams(...)")
        if not token_ids or prompt == "":
            raise RequestError("the prompt is empty: give at least one token")
        self.check_ids("prompt", token_ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        limit = self.facts.max_context_len
        if len(token_ids) >= limit:
            raise ContextLengthError(len(token_ids), limit)
        if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}: it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        max_total = limit
        if params.max_output_tokens is not None:
            max_total = min(max_total, len(token_ids) + params.max_output_tokens)
        eos_ids: frozenset[int] = frozenset() if params.ignore_eos else self.facts.eos_ids
        return Request(
            request_id=RequestId(f"req-{next(self._numbers)}"),
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_total_tokens=max_total,
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """See that ids are the model's.

        Raises:
            RequestError: one is not; names it and the list.
        """
        vocab_size = self.facts.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise RequestError(f"{name}: {wrong!r} is no token id of this model (0 … {vocab_size - 1})")


def read_text_side(facts: TextFacts, *, chat_template: str | None) -> TextSide:
    """Read tokenizer and chat template of a model that an engine has loaded elsewhere.

    Args:
        chat_template: the setting of that name.
    Raises:
        ModelError, ConfigError: the files have changed since then, and cannot be used any more.
    """
    tokenizer = load_tokenizer(find_model(facts.model_path))
    return TextSide(facts, tokenizer, make_chat_template(chat_template, tokenizer))


def model_path(source: ModelSource) -> str:
    """What finds the model again, without asking the Hub."""
    return str((source.files[0] if source.kind is SourceKind.GGUF else source.folder).absolute())


def make_chat_template(setting: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that chat uses; the user's own is compiled at once, the model's when it is first needed.

    Raises:
        ConfigError, RequestError: the user's cannot be read or is no template.
    """
    if setting is None:
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    try:
        source = read_file(Path(setting), max_bytes=MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:  # not there, not UTF-8, a name with a null byte
        raise ConfigError(
            f"`chat_template` {setting!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
    template.check()
    return template


def _as_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain numbers; numpy's are as good."""
    if isinstance(prompt, list | tuple) and {int}.issuperset(map(type, prompt)):  # a server's, for each request
        return list(prompt)
    try:
        ids = [operator.index(token_id) for token_id in prompt if not isinstance(token_id, bool)]
        if len(ids) == len(prompt):
            return ids
    except TypeError:
        pass
    raise RequestError(f"the prompt is a {type(prompt).__name__} of something else: give text or a list of token ids")
