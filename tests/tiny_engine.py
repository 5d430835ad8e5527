"""A tiny model folder that a whole engine can load: random weights and a tokenizer of one token per ASCII character."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from tiny_models import NUM_LAYERS, VOCAB_SIZE, save_tiny_model

FIRST_CHAR_ID = 3
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_engine_folder(folder: Path, variant: str = "llama", *, seed: int = 0, num_layers: int = NUM_LAYERS) -> Path:
    """Save a tiny model with its tokenizer; returns the folder to name as `model`."""
    path, _ = save_tiny_model(variant, folder, seed=seed, num_layers=num_layers)
    add_tokenizer(path)
    return path


def add_tokenizer(path: Path) -> None:
    """Put the character tokenizer into a model folder."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(code): FIRST_CHAR_ID + code for code in range(128)}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def ids_of(text: str) -> list[int]:
    """Token ids of an ASCII text."""
    return [FIRST_CHAR_ID + ord(char) for char in text]
