"""A model with planted retrieval heads: what it answers is known without running it.

An OPT model of two layers whose weights are set by hand. Hidden states have five parts of 64 numbers:

    token      a vector of ±1 for each word
    position   sines and cosines of 32 frequencies
    back 1     the token one place before, written by head 0 of layer 0
    back 2     the token two places before, written by head 1 of layer 0
    answer     written by head 0 of layer 1, read by the output matrix

Layer 1 looks for the place whose back 2 is this place's back 1 and says the token there: behind `… of the apple is` it
says what followed `apple is` earlier. A policy that leaves that one row out makes it say something else.
"""

import json
import re
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from ambidex.eval import long_context
from ambidex.eval.words import known_words, shipped_text

PART: Final = 64
TOKEN, POSITION, BACK_1, BACK_2, ANSWER = (slice(number * PART, (number + 1) * PART) for number in range(5))
WIDTH: Final = 5 * PART
MAX_CONTEXT_LEN: Final = 512
POSITION_SHARPNESS: Final = 24.0
"""Times the query of layer 0: the right place then leads by a score of some 150."""
TOKEN_SHARPNESS: Final = 24.0
"""The same in layer 1: some 150."""


def save_planted_model(folder: Path) -> Path:
    """Save the model and its tokenizer of whole words; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = _save_tokenizer(folder)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 2, (len(vocab), PART), generator=generator).float() * 2 - 1
    frequencies = torch.linspace(0.31, 3.05, PART // 2)
    weights: dict[str, Tensor] = {}
    weights["model.decoder.embed_tokens.weight"] = _in_part(TOKEN, tokens)
    angles = torch.arange(MAX_CONTEXT_LEN + 2)[:, None] * frequencies
    weights["model.decoder.embed_positions.weight"] = _in_part(POSITION, torch.cat([angles.cos(), angles.sin()], 1))
    for layer_idx in range(2):
        _add_layer(weights, f"model.decoder.layers.{layer_idx}.", _HEADS[layer_idx](frequencies))
    weights["model.decoder.final_layer_norm.weight"] = torch.ones(WIDTH)
    weights["model.decoder.final_layer_norm.bias"] = torch.zeros(WIDTH)
    weights["lm_head.weight"] = _in_part(ANSWER, tokens)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": len(vocab), "hidden_size": WIDTH,
        "ffn_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 5, "max_position_embeddings": MAX_CONTEXT_LEN,
        "word_embed_proj_dim": WIDTH, "do_layer_norm_before": True, "activation_function": "relu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Head = tuple[Tensor, Tensor, Tensor, slice]
"""Query, key and value matrices [64, E], and the part that the head's answer is added to."""


def _read(part: slice) -> Tensor:
    matrix = torch.zeros(PART, WIDTH)
    matrix[:, part] = torch.eye(PART)
    return matrix


def _previous(frequencies: Tensor, distance: int) -> Tensor:
    """Turns a position's sines and cosines into those of the position `distance` before."""
    cos, sin = (distance * frequencies).cos().diag(), (distance * frequencies).sin().diag()
    return torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])


def _previous_token_heads(frequencies: Tensor) -> list[Head]:
    return [
        (POSITION_SHARPNESS * _previous(frequencies, distance) @ _read(POSITION), _read(POSITION), _read(TOKEN), part)
        for distance, part in ((1, BACK_1), (2, BACK_2))
    ]


def _retrieval_head(frequencies: Tensor) -> list[Head]:
    del frequencies
    return [(TOKEN_SHARPNESS * _read(BACK_1), _read(BACK_2), _read(TOKEN), ANSWER)]


_HEADS: Final = (_previous_token_heads, _retrieval_head)


def _add_layer(weights: dict[str, Tensor], prefix: str, heads: list[Head]) -> None:
    out = torch.zeros(WIDTH, WIDTH)
    for name in ("q", "k", "v"):
        matrix = torch.zeros(WIDTH, WIDTH)
        for number, head in enumerate(heads):
            rows = slice(number * PART, (number + 1) * PART)
            matrix[rows] = head["qkv".index(name)]
            out[head[3], rows] = torch.eye(PART)
        weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix
        weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(WIDTH)
    weights[f"{prefix}self_attn.out_proj.weight"] = out
    weights[f"{prefix}self_attn.out_proj.bias"] = torch.zeros(WIDTH)
    for name, shape in (("fc1", (8, WIDTH)), ("fc2", (WIDTH, 8))):
        weights[f"{prefix}{name}.weight"] = torch.zeros(shape)
        weights[f"{prefix}{name}.bias"] = torch.zeros(shape[0])
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(WIDTH)
        weights[f"{prefix}{name}.bias"] = torch.zeros(WIDTH)


def _in_part(part: slice, rows: Tensor) -> Tensor:
    matrix = torch.zeros(len(rows), WIDTH)
    matrix[:, part] = rows
    return matrix


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """One token a word, a digit or a mark, of all texts that the tasks are made of."""
    templates = [value for name, value in vars(long_context).items() if name.isupper() and isinstance(value, str)]
    text = " ".join([*known_words(), shipped_text(), *templates, "0 1 2 3 4 5 6 7 8 9"])
    words = dict.fromkeys(re.findall(r"\d|[^\W\d]+|[^\w\s]", text))
    vocab = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocab
