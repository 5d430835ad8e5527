"""Text to token ids and back."""

from collections.abc import Iterable

from ambidex.core.errors import RequestError
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.locate import ModelSource, SourceKind
from ambidex.text.backend_errors import is_backend_error
from ambidex.text.folder_tokenizer import read_folder_tokenizer
from ambidex.text.gguf_tokenizer import read_gguf_tokenizer
from ambidex.text.parts import TokenizerParts
from ambidex.text.pieces import Pieces, TextStream


def load_tokenizer(source: ModelSource) -> "Tokenizer":
    """Read the tokenizer of a model.

    Raises:
        ModelFileError: tokenizer files or metadata are missing or malformed.
        UnsupportedModelError: a tokenizer of a kind that this package does not know.
    """
    if source.kind is SourceKind.GGUF:
        file = source.files[0]
        return Tokenizer(read_gguf_tokenizer(GGUFFile(file).metadata, name=str(file)))
    return Tokenizer(read_folder_tokenizer(source.folder))


class Tokenizer:
    """A vocabulary and how text is cut into its tokens.

    `bos_id` and `eos_ids` are the ids that begin and end a text (the first of `eos_ids` is the one that chat templates
    call eos); `special_ids` are left out of decoded text; `vocab_size` is the largest id plus one.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._pieces = Pieces(backend)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template

    @property
    def bos_token(self) -> str | None:
        """String of the token that begins a text."""
        return None if self.bos_id is None else self._pieces.find_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """String of the token that ends a text."""
        return self._pieces.find_token(self.eos_ids[0]) if self.eos_ids else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; strings of special tokens inside it become those tokens.

        Args:
            add_special: put the tokens around it that the model wants around a text; not wanted after a chat template,
                which writes them itself.

        Raises:
            RequestError: the text holds half of a surrogate pair, or the model's tokenizer fails at it.
        """
        try:
            # Of its ways the one that lets other threads run, and leaves out where in the text each token stands.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except TypeError as error:
            raise RequestError("the text is no valid Unicode (half of a surrogate pair): remove it") from error
        except BaseException as error:  # the library raises nothing narrower
            if not is_backend_error(error):
                raise
            raise RequestError(
                f"the model's tokenizer fails at this text ({error}): its vocabulary has no token for a part of it, or "
                "its files are broken; give another text or other tokenizer files"
            ) from error

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        stream = self.open_text(skip_special)
        return stream.push(ids) + stream.finish()

    def open_text(self, skip_special: bool = True) -> TextStream:
        """Begin a text that is decoded as its tokens come."""
        return TextStream(self._pieces, self.special_ids if skip_special else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token as it stands inside a text; none for ids outside the vocabulary."""
        return self._pieces.find_bytes(token_id) or b""

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text, U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")
