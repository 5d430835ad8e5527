"""The tokenizer in a model's folder: tokenizer.json, or the older vocab.json with merges.txt.

The reading follows transformers 5, so that the ids are the same.
"""

from pathlib import Path
from typing import Final

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.formats.files import has_file
from ambidex.text.backend_errors import is_backend_error
from ambidex.text.parts import TokenizerParts, add_frame
from ambidex.text.pre_tokenizers import PRE_TOKENIZATIONS, gpt2_words
from ambidex.text.tokenizer_settings import TokenizerSettings

_LLAMA_CLASS_IGNORED: Final = ("mistral", "qwen2")
"""Model types for which tokenizer.json alone counts, also where LlamaTokenizer is named."""


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Build the tokenizer that a folder holds.

    Raises:
        ModelFileError: there are no tokenizer files, or one of them is malformed.
        UnsupportedModelError: there is only a tokenizer.model, or vocabulary files of an unknown class.
    """
    settings = TokenizerSettings(folder)
    if has_file(folder / "tokenizer.json"):
        backend = _read_tokenizer_json(folder / "tokenizer.json")
        _apply_llama_class(backend, settings)
        _add_tokens(backend, settings, folder)
    elif has_file(folder / "vocab.json") and has_file(folder / "merges.txt"):
        backend = _read_vocab_and_merges(folder, settings)
        _add_tokens(backend, settings, folder)
        _add_frame(backend, settings)
    elif has_file(folder / "tokenizer.model"):
        raise UnsupportedModelError(
            f"{folder} has a tokenizer.model but no tokenizer.json: provide a tokenizer.json "
            "(transformers writes one when it saves the tokenizer)"
        )
    else:
        raise ModelFileError(f"{folder} has no tokenizer: it needs a tokenizer.json, or a vocab.json and a merges.txt")
    backend.encode_special_tokens = settings.find_flag("split_special_tokens") or False
    eos = _id_of(backend, settings.find_token("eos_token"))
    eos_ids = [eos, *settings.find_eos_ids()]
    return TokenizerParts(
        backend=backend,
        bos_id=_id_of(backend, settings.find_token("bos_token")),
        eos_ids=tuple(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        chat_template=settings.find_chat_template(),
    )


def _read_tokenizer_json(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except BaseException as error:  # the library raises nothing narrower
        if not is_backend_error(error):
            raise
        raise ModelFileError(f"{path} is no tokenizer.json: {error}") from error


def _read_vocab_and_merges(folder: Path, settings: TokenizerSettings) -> Backend:
    if settings.class_name not in ("", "GPT2Tokenizer", "Qwen2Tokenizer"):
        raise UnsupportedModelError(
            f"{folder} has a vocab.json and a merges.txt of class {settings.class_name}: known are GPT2Tokenizer and "
            "Qwen2Tokenizer; provide a tokenizer.json (transformers writes one when it saves the tokenizer)"
        )
    try:
        backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except BaseException as error:  # the library raises nothing narrower
        if not is_backend_error(error):
            raise
        raise ModelFileError(f"{folder}: vocab.json and merges.txt are no vocabulary: {error}") from error
    if settings.class_name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = PRE_TOKENIZATIONS["qwen2"].cut()
    else:
        backend.pre_tokenizer = gpt2_words(add_prefix_space=settings.find_flag("add_prefix_space") or False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _apply_llama_class(backend: Backend, settings: TokenizerSettings) -> None:
    """Where LlamaTokenizer is named, its own rules for spaces replace those of a SentencePiece tokenizer.json.

    `legacy` puts a space before each stretch of text between special tokens, else only the very first text gets one.
    """
    is_named = settings.class_name == "LlamaTokenizer" and settings.model_type not in _LLAMA_CLASS_IGNORED
    if not is_named or not (isinstance(backend.model, models.BPE) and backend.model.byte_fallback):
        return
    prefixes = settings.find_flag("add_prefix_space") is not False
    scheme = "never" if not prefixes else "always" if settings.find_flag("legacy") else "first"
    strip = [decoders.Strip(" ", 1, 0)] if prefixes else []
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _add_tokens(backend: Backend, settings: TokenizerSettings, folder: Path) -> None:
    """Register the tokens that are looked for in a text before anything else, where tokenizer.json has not."""
    known = backend.get_added_tokens_decoder()
    declared = settings.declared_tokens()
    special = {token.content: token for token in settings.special_tokens()}
    new = [token for token_id, token in sorted(declared.items()) if known.get(token_id) != token]
    for token in new:
        token.special = token.special or token.content in special
    contents = {token.content for token in (*known.values(), *new)}
    backend.add_tokens([*new, *(token for text, token in special.items() if text not in contents)])
    for token_id, token in declared.items():
        if (got := backend.token_to_id(token.content)) != token_id:
            raise ModelFileError(
                f"{folder}: tokenizer_config.json gives {token.content!r:.60} the id {token_id}, "
                f"but the vocabulary gives it {got}: provide the files of one version"
            )


def _add_frame(backend: Backend, settings: TokenizerSettings) -> None:
    bos, eos = settings.find_token("bos_token"), settings.find_token("eos_token")
    add_frame(
        backend,
        bos=bos.content if bos and settings.find_flag("add_bos_token") else None,
        eos=eos.content if eos and settings.find_flag("add_eos_token") else None,
    )


def _id_of(backend: Backend, token: AddedToken | None) -> int | None:
    return None if token is None else backend.token_to_id(token.content)
