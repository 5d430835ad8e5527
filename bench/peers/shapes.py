"""Checkpoints with random weights in the shapes of known models, which every engine reads alike.

python bench/peers/shapes.py FOLDER [SHAPE …]     # without weights, for `ambidex bench … --load-format dummy`
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, models


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0 if tied else 8.0,
                            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }  # fmt: skip


def _qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }  # fmt: skip


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden, "do_layer_norm_before": True, "activation_function": "relu",
    }  # fmt: skip


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, tied=False),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, 152064, tied=False),
    "tiny": {**_llama(64, 96, 2, 4, 2, tied=False), "vocab_size": 131, "max_position_embeddings": 512},
}
"""The models of HybridGen's tables, by what their config.json says; `tiny` is to try the scripts."""


SCORE_STD: Final = 4.5
COMMON: Final = 0.5
NEXT_LOGIT: Final = 6.0
"""Logit of a token that each token asks for, in standard deviations of the others."""
NEXT_COSINE: Final = 0.6
"""Of the last hidden state with the embedding of its token."""


def save_random_model(shape: str, folder: Path, *, seed: int = 0) -> int:
    """Save a checkpoint in bf16 with a tokenizer that loads (no text is read); returns the vocabulary's size.

    Scores of attention spread by 4.5 and heads of a group have half of their queries in common, as with the engine's
    dummy weights (`models/weights.py`). So that rounding to bf16 does not decide which token is the likeliest, layers
    add as much to a state as its embedding, and each token has one that often follows it (where embeddings are not
    tied). Weights are made where there is a GPU on it: an 8B model in seconds.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    std = config.initializer_range if hasattr(config, "initializer_range") else config.init_std
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):
            parameter.data.mul_(SCORE_STD / (std**2 * parameter.shape[1]))
            num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
            group_size = config.num_attention_heads // num_kv_heads
            heads = parameter.data.view(num_kv_heads, group_size, -1, parameter.shape[1])
            common = torch.randn_like(heads[:, :1]) * heads.std()
            heads.mul_((1 - COMMON) ** 0.5).add_(common, alpha=COMMON**0.5)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")):
            parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    if head.data_ptr() != embeddings.data_ptr():
        embeddings.normal_()
        following = torch.randperm(head.shape[0], device=head.device)
        margin = NEXT_LOGIT * std / (NEXT_COSINE * head.shape[1] ** 0.5)
        head.index_add_(0, following, embeddings, alpha=margin)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    del model, parameter, embeddings, head
    torch.cuda.empty_cache()  # the engines that read it run while this process lives
    return int(fields["vocab_size"])


def save_config(shape: str, folder: Path) -> None:
    """Save what a model of the shape would say of itself, and a tokenizer that loads."""
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "opt": "OPTForCausalLM"}
    fields = SHAPES[shape]
    config = {"architectures": [architecture[fields["model_type"]]], "hidden_act": "silu", "torch_dtype": "bfloat16",
              "bos_token_id": 1, "eos_token_id": 2, **fields}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Save the smallest tokenizer that loads: no text is read or written with these models."""
    Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[], unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )


def main(folder: str, *shapes: str) -> int:
    """Save the configs of shapes, each in a folder of its name; returns the exit code."""
    unknown: Sequence[str] = [shape for shape in shapes if shape not in SHAPES]
    if unknown:
        print(f"unknown shapes {', '.join(unknown)}: known are {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    for shape in shapes or SHAPES:
        save_config(shape, Path(folder, shape))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
