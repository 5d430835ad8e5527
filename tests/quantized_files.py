"""Small GGUF files of llamas whose matrices are quantised, each as it is asked for."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.gguf_config import spec_from_gguf
from ambidex.kernels.cpu.quantized import BLOCKS
from gguf_writer import Tensor as GGUFTensor
from gguf_writer import llama_metadata, make_gguf, quantize
from quantized_rows import random_rows

WIDTH, INNER, VOCAB, NUM_LAYERS = 256, 512, 61, 2
MIXED = {"attn_v": "Q6_K", "attn_k": "Q8_0", "ffn_down": "Q5_K", "token_embd": "Q8_0", "output.": "F16"}


def make_tensor(kind: str, num_rows: int, width: int, seed: int) -> GGUFTensor:
    """Random numbers of about 1 / sqrt(width) for every type."""
    if kind in ("F32", "F16", "BF16"):
        return quantize(np.random.default_rng(seed).normal(0, width**-0.5, (num_rows, width)).astype(np.float32), kind)
    rows = random_rows(kind, num_rows, width // BLOCKS[kind][0], seed)
    rows = rows.reshape(num_rows, -1, BLOCKS[kind][1])
    for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}.get(kind, (0, 2)):
        rows[..., at + 1] = 0x04 | rows[..., at + 1] & 0x83  # 2^-14 to 2^-13, either sign
    return GGUFTensor((width, num_rows), int(GGMLQuantizationType[kind]), rows.tobytes())


def make_file(path: Path, kinds: Mapping[str, str], default: str, *, tied: bool = False) -> ModelSpec:
    """A llama whose tensors have the types that `kinds` says for parts of their names."""
    shapes = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    for i in range(NUM_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_k": (WIDTH // 2, WIDTH),
            f"blk.{i}.attn_v": (WIDTH // 2, WIDTH), f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (INNER, WIDTH), f"blk.{i}.ffn_up": (INNER, WIDTH), f"blk.{i}.ffn_down": (WIDTH, INNER),
        }  # fmt: skip
    if tied:
        del shapes["output"]
    tensors: dict[str, GGUFTensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = next((kind for part, kind in kinds.items() if part in name), default)
        tensors[f"{name}.weight"] = make_tensor(kind, *shape, seed)
    norms = ["output_norm", *(f"blk.{i}.{norm}" for i in range(NUM_LAYERS) for norm in ("attn_norm", "ffn_norm"))]
    tensors |= {f"{name}.weight": quantize(np.ones(WIDTH, np.float32)) for name in norms}
    metadata = llama_metadata(embedding_length=WIDTH, feed_forward_length=INNER)
    path.write_bytes(make_gguf(metadata, tensors))
    return spec_from_gguf(GGUFFile(path))
