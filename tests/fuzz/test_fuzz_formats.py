"""Damaged model files: nothing but our own errors, and no memory beyond the file's size plus a constant.

Every mutation is a function of a seed, which a failure prints. The memory counted is Python's and numpy's
(tracemalloc), from opening the file to the finished ModelSpec; mapped pages are the file's own.
"""

import json
import random
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.core.errors import AmbidexError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.gguf_config import spec_from_gguf
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.safetensors import SafetensorsFile
from gguf_writer import embedding, llama_metadata, make_gguf, quantize

ALLOWANCE = 64 * 1024
"""Bytes that a parse may use above the file's size: interpreter objects, error texts, windows of up to 4096 layers."""
NUM_RANDOM = 10_000
EXTREMES = tuple(
    struct.pack(layout, value)
    for layout, values in {
        "<I": (0, 1, 4, 7, 8, 9, 13, 2**16, 2**31 - 1, 2**31, 2**32 - 1),
        "<Q": (0, 1, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    }.items()
    for value in values
)

GGUF_HEADER = make_gguf(
    {
        **llama_metadata(),
        "general.alignment": 32,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "Ġthe", "▁a"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.add_bos_token": True,
    },
    {
        "token_embd.weight": embedding(num_rows=2, type_name="Q8_0"),
        "rope_freqs.weight": quantize(np.ones(4, np.float32)),
        "blk.0.attn_norm.weight": quantize(np.ones(32, np.float32)),
    },
)


def make_safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


SAFETENSORS_DATA = bytes(8 * 6 * 2 + 8 * 4)
SAFETENSORS_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 6], "data_offsets": [0, 96]},
        "model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [96, 128]},
    }
).encode()
JSON_TOKENS = tuple(re.compile(pattern) for pattern in (rb'"[^"]*"|\d+', rb"\[[^\]]*\]|[{}:,]", rb"\{[^{}]*\}"))
JSON_ODDITIES = (
    b"-1", b"0", b"1e999", b"NaN", b"1.5", b"9223372036854775808", b"1" * 400, b"null", b"true", b"[]", b"{}", b'"x"',
    b"[[[[[[", b'"\\ud800"', b'"F4"', b'{"a":1,"a":2}', b",", b"\xff",
)  # fmt: skip


def flip(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def splice_extreme(content: bytes, rng: random.Random) -> bytes:
    position, number = rng.randrange(len(content)), rng.choice(EXTREMES)
    return content[:position] + number + content[position + len(number) :]


def delete_piece(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randint(1, 16) :]


def repeat_piece(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    stop = start + rng.randint(1, 64)
    return content[:stop] + content[start:]


MUTATIONS = (flip, truncate, splice_extreme, splice_extreme, delete_piece, repeat_piece)


def mutate_bytes(content: bytes, seed: int) -> bytes:
    """One to three random faults."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        content = rng.choice(MUTATIONS)(content or b"\0", rng)
    return content


def mutate_header(seed: int) -> bytes:
    """A safetensors file whose JSON is damaged but whose header length is right: faults behind the first check."""
    rng = random.Random(seed)
    header = SAFETENSORS_HEADER
    for _ in range(rng.randint(1, 3)):
        start, stop = rng.choice([token.span() for token in rng.choice(JSON_TOKENS).finditer(header)] or [(0, 0)])
        if rng.random() < 0.3:  # cut into the token or beyond it
            stop = start + rng.randint(1, 40)
        header = header[:start] + rng.choice(JSON_ODDITIES) + header[stop:]
    return make_safetensors(header, SAFETENSORS_DATA)


def read_gguf(path: Path) -> None:
    spec_from_gguf(GGUFFile(path))


def read_safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name, info in file.tensors.items():
        assert len(file.read(name)) == info.num_bytes


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def check_case(path: Path, content: bytes, read: Callable[[Path], None], what: str) -> bool:
    """Read one damaged file; whether it was accepted. Anything but our own errors, or too much memory, fails."""
    path.unlink(missing_ok=True)  # a mapped file must not shrink under an older mapping
    write(path, content)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    is_accepted = True
    try:
        read(path)
    except AmbidexError:
        is_accepted = False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} instead of one of our errors") from error
    used = tracemalloc.get_traced_memory()[1] - before
    assert used <= len(content) + ALLOWANCE, f"{what}: {used} bytes for a file of {len(content)}"
    return is_accepted


@pytest.mark.usefixtures("traced")
def test_fuzz_gguf_when_mutated_at_random_raises_only_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert check_case(path, GGUF_HEADER, read_gguf, "the intact file")
    accepted = [
        check_case(path, mutate_bytes(GGUF_HEADER, seed), read_gguf, f"seed {seed}") for seed in range(NUM_RANDOM)
    ]
    assert 0 < sum(accepted) < NUM_RANDOM / 2  # some faults change only values; most are found


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("number", [struct.pack("<I", 2**31), struct.pack("<I", 2**32 - 1), b"\xff" * 8, bytes(8)])
def test_fuzz_gguf_when_any_place_is_extreme_raises_only_our_errors(tmp_path: Path, number: bytes) -> None:
    first_data = GGUFFile(write(tmp_path / "intact.gguf", GGUF_HEADER)).tensors["token_embd.weight"].offset
    for position in range(first_data):
        content = GGUF_HEADER[:position] + number + GGUF_HEADER[position + len(number) :]
        check_case(tmp_path / "m.gguf", content, read_gguf, f"{number.hex()} at byte {position}")


@pytest.mark.usefixtures("traced")
def test_fuzz_safetensors_when_mutated_at_random_raises_only_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    intact = make_safetensors(SAFETENSORS_HEADER, SAFETENSORS_DATA)
    assert check_case(path, intact, read_safetensors, "the intact file")
    for seed in range(NUM_RANDOM // 2):
        check_case(path, mutate_bytes(intact, seed), read_safetensors, f"bytes, seed {seed}")


@pytest.mark.usefixtures("traced")
def test_fuzz_safetensors_when_json_is_mutated_raises_only_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for seed in range(NUM_RANDOM):
        check_case(path, mutate_header(seed), read_safetensors, f"JSON, seed {seed}")


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 512,
        "head_dim": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": [2, 3],
        "rope_theta": 1e4, "partial_rotary_factor": 1.0, "quantization_config": None, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 131, "max_position_embeddings": 512,
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"], "dtype": "bfloat16", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True,
        },
    },
    "opt": {
        "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "vocab_size": 131, "max_position_embeddings": 512, "word_embed_proj_dim": 32,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "activation_function": "relu",
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "vocab_size": 131, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2,
        "multi_query": False, "parallel_attn": True, "alibi": False, "bias": False, "ffn_hidden_size": 100,
        "layer_norm_epsilon": 1e-5, "activation": "gelu", "max_position_embeddings": 512,
    },
}  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 7, -1, 2**31, 2**63, 2**64, 10**400, 0.0, 0.5, -1.0, 1e-320, 1e308, float("inf"),
    float("nan"), "", "7", "silu", "\ud800", [], [None], [1], [10**400], ["x"], [[]], {}, {"rope_type": []},
    {"rope_type": "linear", "factor": "2"}, {"a": {}},
)  # fmt: skip


def read_config(config: dict[str, Any]) -> None:
    """Either one of our errors or a spec whose numbers can be computed with."""
    try:
        spec = spec_from_hf(config)
    except AmbidexError:
        return
    assert isinstance(spec, ModelSpec)
    assert spec.group_size * spec.num_kv_heads == spec.num_q_heads
    assert len(spec.windows) == spec.num_layers <= 4096
    assert spec.rope is None or (0 < spec.rope.dim <= spec.head_dim and spec.rope.theta > 1)


@pytest.mark.parametrize("family", CONFIGS)
def test_fuzz_config_when_any_field_is_odd_raises_only_our_errors(family: str) -> None:
    base = CONFIGS[family]
    spec_from_hf(base)
    for name in base:
        for value in ODD_VALUES:
            read_config({**base, name: value})
        read_config({key: value for key, value in base.items() if key != name})


@pytest.mark.parametrize(("family", "group"), [("llama", "rope_scaling"), ("qwen3", "rope_parameters")])
def test_fuzz_config_when_any_rotary_field_is_odd_raises_only_our_errors(family: str, group: str) -> None:
    base = CONFIGS[family]
    for name in base[group]:
        for value in ODD_VALUES:
            read_config({**base, group: {**base[group], name: value}})


@settings(max_examples=1000)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(
        st.sampled_from(sorted({name for config in CONFIGS.values() for name in config})),
        st.one_of(st.sampled_from(ODD_VALUES), st.integers(), st.floats(), st.text(max_size=5)),
        max_size=4,
    ),
)
def test_fuzz_config_when_fields_are_replaced_raises_only_our_errors(family: str, changes: dict[str, Any]) -> None:
    read_config({**CONFIGS[family], **changes})
