import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ambidex.core.errors import RequestError
from ambidex.formats.locate import ModelSource, SourceKind, find_model
from ambidex.text.folder_tokenizer import read_folder_tokenizer
from ambidex.text.parts import TokenizerParts
from ambidex.text.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizers import gpt2_tokenizer, save_folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = save_folder(tmp_path, gpt2_tokenizer(), bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
    return Tokenizer(read_folder_tokenizer(folder))


def _tokenizer(backend: Backend) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend=backend, bos_id=None, eos_ids=(), chat_template=None))


def test_load_smollm2_reads_the_gguf() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == (2, 0)
    assert len(tokenizer.special_ids) == 17
    assert "SmolLM" in (tokenizer.chat_template or "")


def test_load_folder_reads_the_json(tmp_path: Path) -> None:
    save_folder(tmp_path, gpt2_tokenizer())
    source = ModelSource(str(tmp_path), SourceKind.SAFETENSORS, tmp_path, (), tmp_path / "config.json")
    assert load_tokenizer(source).vocab_size == 900


def test_named_tokens_have_ids_and_strings(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.bos_token) == (3, "<|begin_of_text|>")
    assert (tokenizer.eos_ids, tokenizer.eos_token) == ((2,), "<|im_end|>")


def test_encode_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer.encode("a\ud800")


def test_encode_text_with_unknown_token_that_is_not_in_the_vocabulary_is_refused() -> None:
    # Bug: the library's plain Exception went through to the caller.
    tokenizer = _tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[], unk_token="<unk>")))
    with pytest.raises(RequestError, match="Unk token `<unk>` not found") as caught:
        tokenizer.encode("b")
    assert type(caught.value.__cause__) is Exception


def test_encode_panic_of_the_library_is_refused() -> None:
    # Bug: a panic is a BaseException, so that no handler of errors of requests saw it.
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(RequestError, match="chunk size must be non-zero") as caught:
        _tokenizer(backend).encode("a")
    assert type(caught.value.__cause__).__name__ == "PanicException"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_encode_interrupt_goes_through(interrupt: type[BaseException]) -> None:
    tokenizer = _tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])))
    tokenizer._backend = Mock(encode_batch_fast=Mock(side_effect=interrupt))
    with pytest.raises(interrupt):
        tokenizer.encode("a")


def test_encode_long_text_lets_other_threads_go_on(tokenizer: Tokenizer) -> None:
    # Bug: the interpreter's lock was held all the while: a prompt of 10 MB kept a server from answering for 12 s.
    # A sentence as a whole is one word for this tokenizer's merges, so its ids are those of its parts.
    begins, ids, num_turns = threading.Event(), list[int](), 0

    def encode() -> None:
        begins.set()
        ids.extend(tokenizer.encode("hello world " * 100_000, add_special=False))

    thread = threading.Thread(target=encode)
    thread.start()
    begins.wait()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0)
    assert num_turns > 100  # with the lock held: one or two
    assert ids == tokenizer.encode("hello world ", add_special=False) * 100_000


def test_decode_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"


@pytest.mark.parametrize("unknown", [900, 10**12, -1])
def test_decode_id_outside_the_vocabulary_adds_nothing(unknown: int, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), unknown, *tokenizer.encode("b")]) == "ab"
    assert tokenizer.token_bytes(unknown) == b""


def test_token_text_shows_special_tokens_and_parts_of_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(2) == "<|im_end|>"
    ids = tokenizer.encode("\U0010ffff")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xf4", b"\x8f", b"\xbf", b"\xbf"]
    assert tokenizer.token_text(ids[0]) == "\ufffd"
