"""The engines that `decode_cpu.py` compares, each behind the same few lines; this file is also the process that one of
them runs in, so that no two share cores, threads or a heap.

    python bench/decode_engines.py JOB.json RESULT.json

One request at a time, greedy, prompts in chunks of 512 tokens, nothing kept from one prompt to the next.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, assert_never

import ambidex  # loads torch when LLM is asked for, not before
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.dtypes import DType
from harness import wait_until_quiet, watch_others

CHUNK_LEN: Final = 512
"""Tokens of a prompt computed at once: llama.cpp's default and ours."""
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
    and recent window, instead of all on the accelerator tier.
    """

    kind: Kind
    dtype: DType | None
    kv_dtype: DType
    is_split: bool = False
    flash_attention: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one engine process does: each prompt once, `num_steps` decode steps after it."""

    variant: str
    model_file: str
    prompts: list[list[int]]
    num_steps: int
    num_threads: int
    longest_wait_s: float


@dataclass(slots=True)
class Generation:
    """One answer: when it began, and each of its tokens with the moment at which the caller had it (seconds).

    `lane_bytes` are bytes of K and V that each attention lane read in the decode steps, where the engine counts them.
    """

    start: float
    token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    lane_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def prefill_s(self) -> float:
        """Seconds to the first token."""
        return self.moments[0] - self.start

    @property
    def step_s(self) -> list[float]:
        """Seconds between tokens: one decode step each."""
        return [later - sooner for sooner, later in pairwise(self.moments)]


class DecodeEngine(Protocol):
    """A loaded model."""

    def about(self) -> dict[str, object]:
        """What a reader of the record should know of this build."""
        ...

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """Answer a prompt with exactly `num_tokens` greedy tokens."""
        ...


class Ambidex:
    """This engine through its public API; a moment includes detokenisation, which the peers are spared."""

    def __init__(self, variant: Variant, job: Job) -> None:
        longest = max(len(prompt) for prompt in job.prompts) + job.num_steps + 1
        resident = NUM_SINK_TOKENS + RECENT_WINDOW + BLOCK_SIZE  # the window need not begin at a block's edge
        self._llm = ambidex.LLM(
            job.model_file,
            device=DeviceKind.CPU,
            dtype=DTypeChoice.AUTO if variant.dtype is None else DTypeChoice(variant.dtype.value),
            kv_dtype=KVDTypeChoice(variant.kv_dtype.value),
            block_size=BLOCK_SIZE,
            max_context_len=longest,
            max_tokens_per_step=CHUNK_LEN,
            max_running_requests=1,
            num_threads=job.num_threads,
            num_sink_tokens=NUM_SINK_TOKENS,
            kv_gpu_tokens=resident if variant.is_split else longest,
            recent_window=RECENT_WINDOW if variant.is_split else None,
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


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C calls: no Python sampler between the steps."""

    def __init__(self, variant: Variant, job: Job) -> None:
        package = importlib.import_module("llama_cpp")
        self._numpy = importlib.import_module("numpy")
        self._c = package.llama_cpp
        self._folder = Path(str(package.__file__)).parent
        longest = max(len(prompt) for prompt in job.prompts) + job.num_steps + 1
        self._llama = package.Llama(
            job.model_file,
            n_ctx=longest,
            n_batch=CHUNK_LEN,
            n_ubatch=CHUNK_LEN,
            n_threads=job.num_threads,
            n_threads_batch=job.num_threads,
            flash_attn=variant.flash_attention,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._vocab_size: int = self._llama.n_vocab()

    def about(self) -> dict[str, object]:
        # GCC links libgomp, clang libomp; the wheel keeps no other trace of its compiler.
        library = (self._folder / "lib" / "libggml-cpu.so").read_bytes()
        openmp = [name for name in ("libomp", "libgomp") if f"{name}.so".encode() in library]
        return {"system_info": self._c.llama_print_system_info().decode(), "openmp": openmp}

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        answer = Generation(time.perf_counter())
        for begin in range(0, len(token_ids), CHUNK_LEN):
            self._decode(token_ids[begin : begin + CHUNK_LEN])
        while True:
            answer.token_ids.append(self._best_token())
            answer.moments.append(time.perf_counter())
            if len(answer.token_ids) == num_tokens:
                return answer
            self._decode(answer.token_ids[-1:])

    def _decode(self, token_ids: Sequence[int]) -> None:
        tokens = (self._c.llama_token * len(token_ids))(*token_ids)
        code = self._c.llama_decode(self._context, self._c.llama_batch_get_one(tokens, len(token_ids)))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(token_ids)} tokens")

    def _best_token(self) -> int:
        logits = self._c.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


class Transformers:
    """Hugging Face transformers with torch's fused attention and its own growing cache, as its `generate` uses it."""

    def __init__(self, variant: Variant, job: Job) -> None:
        self._torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._torch.set_num_threads(job.num_threads)
        file = Path(job.model_file)
        dtype = self._torch.float32 if variant.dtype is DType.FP32 else self._torch.bfloat16
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    def about(self) -> dict[str, object]:
        return {"attention": self._model.config._attn_implementation, "threads": self._torch.get_num_threads()}

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        answer = Generation(time.perf_counter())
        cache = None
        with self._torch.inference_mode():
            for begin in range(0, len(token_ids), CHUNK_LEN):
                out = self._forward(self._torch.tensor([token_ids[begin : begin + CHUNK_LEN]]), cache)
                cache = out.past_key_values
            while True:
                best = out.logits[:, -1:].argmax(-1)  # [1, 1]
                answer.token_ids.append(int(best))
                answer.moments.append(time.perf_counter())
                if len(answer.token_ids) == num_tokens:
                    return answer
                out = self._forward(best, out.past_key_values)

    def _forward(self, token_ids: Any, cache: Any) -> Any:
        return self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def load_engine(variant: Variant, job: Job) -> DecodeEngine:
    """Load the model into the engine of a variant."""
    match variant.kind:
        case Kind.AMBIDEX:
            return Ambidex(variant, job)
        case Kind.LLAMA_CPP:
            return LlamaCpp(variant, job)
        case Kind.TRANSFORMERS:
            return Transformers(variant, job)
        case _:
            assert_never(variant.kind)


def run_job(job: Job) -> dict[str, object]:
    """Load, warm up (one short answer, not counted), then answer each prompt once."""
    start = time.perf_counter()
    engine = load_engine(VARIANTS[job.variant], job)
    load_s = time.perf_counter() - start
    engine.generate(job.prompts[0][:WARMUP_PROMPT_LEN], WARMUP_TOKENS)
    answers = [_run_prompt(engine, prompt, job) for prompt in job.prompts]
    return {"load_s": load_s, "about": engine.about(), "answers": answers}


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
