"""What the files beside a vocabulary say: which tokens are special, which frame a text, and the chat template."""

from pathlib import Path
from typing import Final, TypeVar

from tokenizers import AddedToken

from ambidex.core.errors import ModelFileError
from ambidex.formats.bounded_file import read_file
from ambidex.formats.files import has_file
from ambidex.formats.json_file import read_json_object, show
from ambidex.text.chat import MAX_TEMPLATE_BYTES

_T = TypeVar("_T")

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CLASS_TOKENS: Final[dict[str, dict[str, object]]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
}
"""Tokens that a class of tokenizers has where tokenizer_config.json does not say otherwise."""
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and chat_template.jinja of a
    folder; each may be absent.

    Raises:
        ModelFileError: (also in its methods) a file is malformed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        values = self._read("tokenizer_config.json")
        self._has_declared = "added_tokens_decoder" in values
        if not self._has_declared:  # older writers kept the special tokens in a file of their own
            values |= self._read("special_tokens_map.json")
        self._values = values
        self.class_name = (self._find("tokenizer_class", str) or "").removesuffix("Fast")
        self._values = _CLASS_TOKENS.get(self.class_name, {}) | values
        self.model_type = self._read("config.json").get("model_type")

    def find_flag(self, key: str) -> bool | None:
        """A setting that is true or false."""
        return self._find(key, bool)

    def find_token(self, role: str) -> AddedToken | None:
        """The token of a role, such as `bos_token`."""
        value = self._values.get(role)
        return None if value is None else self._read_token(role, value)

    def special_tokens(self) -> list[AddedToken]:
        """Tokens of all roles, and those that are only said to be special."""
        own_roles = [key for key, value in self._values.items() if key.endswith("_token") and isinstance(value, str)]
        tokens = [token for role in dict.fromkeys([*_ROLES, *own_roles]) if (token := self.find_token(role))]
        tokens += self._tokens_without_role()
        for token in tokens:
            token.special = True
        return tokens

    def declared_tokens(self) -> dict[int, AddedToken]:
        """Tokens that are looked for in a text before anything else, by id."""
        if self._has_declared:
            declared = self._find("added_tokens_decoder", dict) or {}
            return {self._read_id(key): self._read_token("added_tokens_decoder", declared[key]) for key in declared}
        special = {token.content for token in self.special_tokens()}
        return {
            self._read_id(token_id): self._make_token(
                "added_tokens.json", text, special=text in special, normalized=text not in special
            )
            for text, token_id in self._read("added_tokens.json").items()
        }

    def find_eos_ids(self) -> list[int]:
        """Ids that end an answer, from generation_config.json."""
        value = self._read("generation_config.json").get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return [self._read_id(token_id) for token_id in ids]

    def find_chat_template(self) -> str | None:
        """chat_template.jinja, else the (default) template in tokenizer_config.json."""
        path = self._folder / "chat_template.jinja"
        if has_file(path):
            try:
                return read_file(path, max_bytes=MAX_TEMPLATE_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(f"{path} cannot be read as text: {error}") from error
        value = self._values.get("chat_template")
        if isinstance(value, list):
            if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
                raise self._error("chat_template", value, "text, or a list of named texts")
            value = {item["name"]: item.get("template") for item in value}.get("default")
        if value is not None and not isinstance(value, str):
            raise self._error("chat_template", value, "text, or a list of named texts")
        return value

    def _tokens_without_role(self) -> list[AddedToken]:
        key = "extra_special_tokens" if "extra_special_tokens" in self._values else "additional_special_tokens"
        values = self._values.get(key) or []
        if not isinstance(values, list | dict):
            raise self._error(key, values, "a list or an object of tokens")
        return [self._read_token(key, value) for value in (values.values() if isinstance(values, dict) else values)]

    def _read(self, name: str) -> dict[str, object]:
        path = self._folder / name
        return read_json_object(path) if has_file(path) else {}

    def _find(self, key: str, kind: type[_T]) -> _T | None:
        value = self._values.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise self._error(key, value, kind.__name__)

    def _read_token(self, key: str, value: object) -> AddedToken:
        if isinstance(value, str):
            return self._make_token(key, value, special=True, normalized=False)
        if not isinstance(value, dict) or not isinstance(content := value.get("content"), str):
            raise self._error(key, value, "a token's text, or an object with its `content`")
        flags = {flag: value[flag] for flag in _TOKEN_FLAGS if flag in value}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise self._error(key, value, "a token with flags that are true or false")
        return self._make_token(key, content, **flags)

    def _make_token(self, key: str, content: str, **flags: bool) -> AddedToken:
        try:
            return AddedToken(content, **flags)
        except UnicodeEncodeError as error:
            raise self._error(key, content, "valid Unicode (it holds half of a surrogate pair)") from error

    def _read_id(self, value: object) -> int:
        text = str(value)
        if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 9:
            raise self._error("a token id", value, "a whole number")
        return int(text)

    def _error(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self._folder}: {key} is {show(value)}: it must be {wanted}")
