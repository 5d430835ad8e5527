"""The engines that `decode_cpu.py` compares, each behind the same few lines; this file is also the process that one of
them runs in, so that no two share cores, threads or a heap.

    python bench/decode_engines.py JOB.json RESULT.json

One request at a time, greedy, prompts in chunks of 512 tokens, nothing kept from one prompt to the next.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, assert_never

import ambidex  # loads torch when LLM is asked for, not before
from ambidex.bench.memory_use import resident_bytes
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.dtypes import DType
from ambidex.core.policy import PolicyName
from harness import wait_until_quiet, watch_others
from peers.engine import CHUNK_LEN, CacheKind, DecodeEngine, Generation
from peers.hugging_face import Transformers
from peers.llama import LlamaCpp

NUM_SINK_TOKENS: Final = 64
RECENT_WINDOW: Final = 256
BLOCK_SIZE: Final = 64
WARMUP_PROMPT_LEN: Final = 64
WARMUP_TOKENS: Final = 4


class Kind(StrEnum):
    """Whose code computes."""

    AMBIDEX = "ambidex"
    LLAMA_CPP = "llama.cpp"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An engine with its settings.

    `dtype` is the weights' format in memory, None for as stored in the file. `is_split`: KV lies in DRAM but for sink
    and recent window, instead of all on the accelerator tier. `policy` is ours, `cache` transformers'. On a GPU
    `recent_window` is larger, and `weights_on_gpu_bytes` of the weights stay there, None: all; `is_kv_on_gpu` is
    llama.cpp's.
    """

    kind: Kind
    dtype: DType | None
    kv_dtype: DType
    is_split: bool = False
    flash_attention: bool = False
    device: str = "cpu"
    recent_window: int = RECENT_WINDOW
    policy: str = "exact"
    cache: CacheKind = CacheKind.DYNAMIC
    weights_on_gpu_bytes: int | None = None
    is_kv_on_gpu: bool = True


VARIANTS: Final[Mapping[str, Variant]] = {
    "ambidex": Variant(kind=Kind.AMBIDEX, dtype=None, kv_dtype=DType.FP16),
    "ambidex-int8": Variant(kind=Kind.AMBIDEX, dtype=None, kv_dtype=DType.INT8),
    "ambidex-bf16-kv": Variant(kind=Kind.AMBIDEX, dtype=None, kv_dtype=DType.BF16),
    "ambidex-fp32": Variant(kind=Kind.AMBIDEX, dtype=DType.FP32, kv_dtype=DType.FP32),
    "ambidex-fp32-split": Variant(kind=Kind.AMBIDEX, dtype=DType.FP32, kv_dtype=DType.FP32, is_split=True),
    "ambidex-bf16": Variant(kind=Kind.AMBIDEX, dtype=DType.BF16, kv_dtype=DType.BF16),
    "ambidex-bf16-int8": Variant(kind=Kind.AMBIDEX, dtype=DType.BF16, kv_dtype=DType.INT8),
    "ambidex-bf16-split": Variant(kind=Kind.AMBIDEX, dtype=DType.BF16, kv_dtype=DType.BF16, is_split=True),
    "llama.cpp": Variant(kind=Kind.LLAMA_CPP, dtype=None, kv_dtype=DType.FP16),
    "llama.cpp-fa": Variant(kind=Kind.LLAMA_CPP, dtype=None, kv_dtype=DType.FP16, flash_attention=True),
    "transformers-fp32": Variant(kind=Kind.TRANSFORMERS, dtype=DType.FP32, kv_dtype=DType.FP32),
    "transformers-bf16": Variant(kind=Kind.TRANSFORMERS, dtype=DType.BF16, kv_dtype=DType.BF16),
}
"""What `decode_cpu.py` runs."""
GPU_WINDOW: Final = 1024
SHARED_OUT_BYTES: Final = 8 * 2**30
"""Of weights that accelerate, and this engine beside it, leave on the GPU: half of an 8B model's in 16 bits."""


def _on_gpu(kind: Kind, **settings: Any) -> Variant:
    return Variant(kind=kind, dtype=DType.BF16, kv_dtype=DType.BF16, device="cuda", **settings)


ALL_VARIANTS: Final[Mapping[str, Variant]] = {
    **VARIANTS,
    **{f"ambidex-{policy}": Variant(kind=Kind.AMBIDEX, dtype=DType.FP32, kv_dtype=DType.FP32, is_split=True,
                                    policy=policy) for policy in PolicyName},
    "transformers-quantized": Variant(
        kind=Kind.TRANSFORMERS, dtype=DType.FP32, kv_dtype=DType.FP32, cache=CacheKind.QUANTIZED
    ),
    **{f"gpu-ambidex-{policy}": _on_gpu(Kind.AMBIDEX, is_split=True, recent_window=GPU_WINDOW, policy=policy)
       for policy in PolicyName},
    "gpu-ambidex-all": _on_gpu(Kind.AMBIDEX),
    "gpu-ambidex-half-weights": _on_gpu(Kind.AMBIDEX, is_split=True, recent_window=GPU_WINDOW,
                                        weights_on_gpu_bytes=SHARED_OUT_BYTES),
    **{f"gpu-transformers-{cache}": _on_gpu(Kind.TRANSFORMERS, cache=cache) for cache in CacheKind},
    "gpu-accelerate": _on_gpu(
        Kind.TRANSFORMERS, cache=CacheKind.OFFLOADED, weights_on_gpu_bytes=SHARED_OUT_BYTES
    ),
    "gpu-llama.cpp": _on_gpu(Kind.LLAMA_CPP, flash_attention=True),
    "gpu-llama.cpp-kv-in-dram": _on_gpu(Kind.LLAMA_CPP, is_kv_on_gpu=False),
}  # fmt: skip
"""Besides, what `peers/compare.py` may run: each policy of ours with sink and recent window on the accelerator and the
rest in DRAM, and the peers' own ways to keep a cache; `gpu-…` on a GPU in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one engine process does: each prompt once, `num_steps` decode steps after it."""

    variant: str
    model_file: str
    prompts: list[list[int]]
    num_steps: int
    num_threads: int
    longest_wait_s: float
    chunk_len: int = CHUNK_LEN


class Ambidex:
    """This engine through its public API; a moment includes detokenisation, which the peers are spared."""

    def __init__(self, variant: Variant, job: Job) -> None:
        longest = longest_len(job)
        resident = NUM_SINK_TOKENS + variant.recent_window + BLOCK_SIZE  # the window need not begin at a block's edge
        self._llm = ambidex.LLM(
            job.model_file,
            device=DeviceKind(variant.device),
            policy=PolicyName(variant.policy),
            dtype=DTypeChoice.AUTO if variant.dtype is None else DTypeChoice(variant.dtype.value),
            kv_dtype=KVDTypeChoice(variant.kv_dtype.value),
            block_size=BLOCK_SIZE,
            max_context_len=longest,
            max_tokens_per_step=job.chunk_len,
            max_running_requests=1,
            num_threads=job.num_threads,
            num_sink_tokens=NUM_SINK_TOKENS,
            kv_gpu_tokens=resident if variant.is_split else longest,
            recent_window=variant.recent_window if variant.is_split else None,
            weights_gpu_memory=variant.weights_on_gpu_bytes,
        )

    def about(self) -> dict[str, object]:
        # A record names the model's file, not where it lay on one machine.
        rows = [{key: Path(text).name if key == "value" and "/" in text else text for key, text in row.items()}
                for row in self._llm.report.as_json()]  # fmt: skip
        return {"report": rows}

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        params = ambidex.SamplingParams(max_output_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        answer = Generation(time.perf_counter())
        before: dict[str, int] = {}
        for output in self._llm.stream(list(token_ids), params):
            if len(output.token_ids) == len(answer.token_ids):  # a chunk of the prompt
                continue
            answer.moments.append(time.perf_counter())
            answer.token_ids = list(output.token_ids)
            if len(answer.moments) == 1:
                before = self._lane_bytes()
        answer.lane_bytes = {lane: size - before.get(lane, 0) for lane, size in self._lane_bytes().items()}
        if len(answer.moments) != num_tokens or len(answer.token_ids) != num_tokens:
            raise RuntimeError(f"{len(answer.moments)} outputs, {len(answer.token_ids)} tokens: {num_tokens} expected")
        return answer

    def _lane_bytes(self) -> dict[str, int]:
        return {str(lane): size for lane, size in self._llm.stats().lane_bytes.items()}


def longest_len(job: Job) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(prompt) for prompt in job.prompts) + job.num_steps + 1


def load_engine(variant: Variant, job: Job) -> DecodeEngine:
    """Load the model into the engine of a variant."""
    match variant.kind:
        case Kind.AMBIDEX:
            return Ambidex(variant, job)
        case Kind.LLAMA_CPP:
            return LlamaCpp(
                job.model_file,
                max_len=longest_len(job),
                chunk_len=job.chunk_len,
                num_threads=job.num_threads,
                flash_attention=variant.flash_attention,
                on_gpu=variant.device != "cpu",
                is_kv_on_gpu=variant.is_kv_on_gpu,
            )
        case Kind.TRANSFORMERS:
            return Transformers(
                job.model_file,
                dtype="float32" if variant.dtype is DType.FP32 else "bfloat16",
                device=variant.device,
                cache=variant.cache,
                chunk_len=job.chunk_len,
                num_threads=job.num_threads,
                weights_on_gpu_bytes=variant.weights_on_gpu_bytes,
            )
        case _:
            assert_never(variant.kind)


def run_job(job: Job) -> dict[str, object]:
    """Load, warm up (one short answer, not counted), then answer each prompt once."""
    start = time.perf_counter()
    engine = load_engine(ALL_VARIANTS[job.variant], job)
    load_s = time.perf_counter() - start
    engine.generate(job.prompts[0][:WARMUP_PROMPT_LEN], WARMUP_TOKENS)
    answers = [_run_prompt(engine, prompt, job) for prompt in job.prompts]
    memory = peak_memory(ALL_VARIANTS[job.variant].device)
    return {"load_s": load_s, "about": engine.about(), "answers": answers, "memory": memory}


def peak_memory(device: str) -> dict[str, int | None]:
    """Bytes that this process had at most: resident on the host since it began (weights while they were read, too), and
    reserved by torch on the GPU, which does not see what llama.cpp takes there."""
    gpu = None
    if device != "cpu" and "torch" in sys.modules:
        gpu = int(sys.modules["torch"].cuda.max_memory_reserved())
    return {"host_peak_bytes": resident_bytes("VmHWM"), "gpu_peak_bytes": gpu or None}


def _run_prompt(engine: DecodeEngine, prompt: Sequence[int], job: Job) -> dict[str, object]:
    wait_until_quiet(longest_s=job.longest_wait_s)
    with watch_others() as others:
        answer = engine.generate(prompt, job.num_steps + 1)  # the first token ends prefill
    return {
        "context": len(prompt),
        "token_ids": answer.token_ids,
        "prefill_s": answer.prefill_s,
        "step_s": answer.step_s,
        "lane_bytes": answer.lane_bytes,
        "others": asdict(others),
    }


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(run_job(Job(**json.loads(job_file.read_text())))))
