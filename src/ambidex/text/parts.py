"""What a model's files say about its text: the result of reading a folder or a GGUF file."""

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A `tokenizers` object and what stands around it. The first of `eos_ids` is the one that templates call eos."""

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None


def add_frame(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Put `bos` before and `eos` after every text that is encoded with special tokens; None: nothing.

    Both must be tokens of the vocabulary.
    """
    # Names of their own, for TemplateProcessing reads `:` and `$` in a name as signs.
    frame = {name: token for name, token in (("bos", bos), ("eos", eos)) if token is not None}
    backend.post_processor = TemplateProcessing(
        single=" ".join(["bos"] * ("bos" in frame) + ["$A"] + ["eos"] * ("eos" in frame)),
        special_tokens=[
            {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]} for name, token in frame.items()
        ],
    )
