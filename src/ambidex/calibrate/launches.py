"""How fast the host launches a prompt's chunk, kernel by kernel: where its processor is slow, the GPU waits for it."""

import time
from typing import Any, Final

import torch

from ambidex.attention.tiered import TieredAttention
from ambidex.calibrate.figures import Quantiles
from ambidex.core.dtypes import DType
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.formats.hf_config import spec_from_hf
from ambidex.models.registry import build_model
from ambidex.models.weights import make_dummy_weights
from ambidex.storage.kv_pool import RowKVPool

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
"""A model whose kernels take a GPU less time than their launches; the number of launches does not depend on widths."""
BLOCK_SIZE: Final = 64
TOKENS: Final = 32
"""Of the chunk, behind a block of older keys: a layer attends over both."""
NUM_RUNS: Final = 9
NUM_WARMUPS: Final = 2


def measure_launches(device: torch.device) -> float:
    """Seconds that the calling thread takes to launch a layer of a chunk whose keys all lie on the accelerator.

    Cost: a second, of which most is the compilation of kernels.
    """
    spec, dtype = spec_from_hf(CONFIG), DType.BF16 if device.type == "cuda" else DType.FP32
    number = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(spec, device=device, dtype=number).eval()
    make_dummy_weights(model, spec, seed=0, device=device, dtype=number)
    kv = KVSpec.of(spec, dtype=dtype, block_size=BLOCK_SIZE)
    attention = TieredAttention(
        spec,
        {
            Tier.GPU: RowKVPool(kv, Tier.GPU, 2, device=device, pinned=False),
            Tier.DRAM: RowKVPool(kv, Tier.DRAM, 0, device=torch.device("cpu"), pinned=False),
        },
    )
    for part in attention.pools[Tier.GPU].tensors:
        part.zero_()  # what is attended over is a number
    request = ScheduledRequest(
        request_id=RequestId("launches"),
        token_ids=(3,) * TOKENS,
        start=BLOCK_SIZE,
        blocks=tuple(BlockRef(Tier.GPU, BlockId(block)) for block in range(2)),
        is_sampled=True,
    )
    token_ids = torch.full((TOKENS,), 3, device=device)
    positions = torch.arange(BLOCK_SIZE, BLOCK_SIZE + TOKENS, device=device)
    samples = []
    with torch.inference_mode():
        for _ in range(NUM_WARMUPS + NUM_RUNS):
            attention.begin((request,))
            _wait(device)
            start = time.perf_counter()
            model(token_ids, positions, attention)
            samples.append(time.perf_counter() - start)
            _wait(device)
    return Quantiles.of(samples[NUM_WARMUPS:]).median / spec.num_layers


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
