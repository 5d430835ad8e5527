import json
from pathlib import Path

import pytest

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.text.folder_tokenizer import read_folder_tokenizer
from ambidex.text.tokenizer import Tokenizer
from tiny_tokenizers import HARD_TEXTS, gpt2_tokenizer, llama3_tokenizer, qwen2_tokenizer, save_folder


def _write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def _load(folder: Path) -> Tokenizer:
    return Tokenizer(read_folder_tokenizer(folder))


def test_read_without_settings_has_no_named_tokens(tmp_path: Path) -> None:
    gpt2_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = _load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (), None)


def test_read_json_frame_ignores_flags_of_settings(tmp_path: Path) -> None:
    tokenizer = _load(save_folder(tmp_path, llama3_tokenizer(), add_bos_token=False, bos_token="<|begin_of_text|>"))
    assert tokenizer.encode("") == [tokenizer.bos_id]


def test_read_json_cuts_nothing_off(tmp_path: Path) -> None:
    backend = gpt2_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = _load(save_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("one two three four five six")) == "one two three four five six"


def test_read_eos_ids_join_both_files(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, gpt2_tokenizer(), eos_token="<|im_end|>")
    _write(folder, "generation_config.json", {"eos_token_id": [0, 2]})
    assert _load(folder).eos_ids == (2, 0)


def test_read_single_eos_id(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, gpt2_tokenizer())
    _write(folder, "generation_config.json", {"eos_token_id": 4})
    assert _load(folder).eos_ids == (4,)


def test_read_split_special_tokens_spells_them(tmp_path: Path) -> None:
    tokenizer = _load(save_folder(tmp_path, gpt2_tokenizer(), split_special_tokens=True))
    assert 2 not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "tool_use", "template": "a"}], None),
        (None, None),
    ],
)
def test_read_chat_template_in_settings(template: object, expected: str | None, tmp_path: Path) -> None:
    assert _load(save_folder(tmp_path, gpt2_tokenizer(), chat_template=template)).chat_template == expected


def test_read_chat_template_file_goes_first(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, gpt2_tokenizer(), chat_template="one")
    _write(folder, "chat_template.jinja", "two")
    assert _load(folder).chat_template == "two"


def test_read_vocab_and_merges_of_qwen2_encodes_as_json(tmp_path: Path) -> None:
    original = qwen2_tokenizer()
    original.model.save(str(tmp_path))
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    _write(tmp_path, "added_tokens.json", {"<|im_start|>": 1, "<|im_end|>": 2, "<|eot_id|>": 4, "<|begin_of_text|>": 3})
    tokenizer = _load(tmp_path)
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, repr(text)


def test_read_vocab_and_merges_of_unknown_class_is_refused(tmp_path: Path) -> None:
    gpt2_tokenizer().model.save(str(tmp_path))
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "CodeGenTokenizer"})
    with pytest.raises(UnsupportedModelError, match="class CodeGenTokenizer: known are GPT2Tokenizer"):
        _load(tmp_path)


def test_read_sentencepiece_model_alone_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "tokenizer.model", "x")
    with pytest.raises(UnsupportedModelError, match=r"provide a tokenizer\.json"):
        _load(tmp_path)


def test_read_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer: it needs a tokenizer\.json"):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_read_malformed_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    gpt2_tokenizer().model.save(str(tmp_path))
    _write(tmp_path, name, "x y z")
    with pytest.raises(ModelFileError, match=r"vocab.json and merges.txt are no vocabulary"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer.json", "{", "is no tokenizer.json"),
        ("tokenizer_config.json", "[]", "must be a JSON object"),
        ("tokenizer_config.json", {"tokenizer_class": 1}, "tokenizer_class is 1: it must be str"),
        ("tokenizer_config.json", {"bos_token": 1}, "bos_token is 1: it must be a token's text"),
        ("tokenizer_config.json", {"bos_token": {"content": "x", "lstrip": 2}}, "flags that are true or false"),
        ("tokenizer_config.json", {"split_special_tokens": "yes"}, "split_special_tokens is 'yes': it must be bool"),
        ("tokenizer_config.json", {"extra_special_tokens": 1}, "a list or an object of tokens"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template is 1"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "token id is 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<new>"}}}, "gives '<new>' the id 7"),
        ("generation_config.json", {"eos_token_id": [-1]}, "token id is -1: it must be a whole number"),
        ("chat_template.jinja", b"\xff", "cannot be read as text"),
        # Bug: TypeError of a name that cannot be a key.
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": [1], "template": "x"}]},
            "text, or a list of named texts",
        ),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "text, or a list of named texts"),
        # Bug: UnicodeEncodeError of half of a surrogate pair in a token's text.
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "bos_token is '\\ud800': it must be valid Unicode"),
        ("tokenizer_config.json", {"eos_token": {"content": "\ud800"}}, "eos_token is '\\ud800'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "\ud800"}}}, "is '\\ud800'"),
        ("added_tokens.json", {"\ud800": 7}, "added_tokens.json is '\\ud800'"),
    ],
)
def test_read_malformed_file_is_refused(name: str, value: object, message: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, gpt2_tokenizer())
    if isinstance(value, bytes):
        (folder / name).write_bytes(value)
    else:
        _write(folder, name, value)
    with pytest.raises(ModelFileError) as caught:
        _load(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "added_tokens.json"])
def test_read_folder_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    # Bug: whatever was no regular file counted as absent.
    folder = save_folder(tmp_path, gpt2_tokenizer())
    (folder / name).mkdir()
    with pytest.raises(ModelFileError, match=rf"{name} is a folder: it must be a file"):
        _load(folder)


def test_read_json_at_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    # Bug: a panic is a BaseException, so that it was not seen as a malformed file.
    folder = save_folder(tmp_path, gpt2_tokenizer())
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    _write(folder, "tokenizer.json", content)
    with pytest.raises(ModelFileError, match=r"is no tokenizer\.json"):
        _load(folder)
