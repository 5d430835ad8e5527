"""llama.cpp."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from peers.engine import Generation


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C calls: no Python sampler between the steps."""

    def __init__(
        self,
        model_file: str,
        *,
        max_len: int,
        chunk_len: int,
        num_threads: int,
        flash_attention: bool,
        on_gpu: bool,
        is_kv_on_gpu: bool,
    ) -> None:
        package = importlib.import_module("llama_cpp")
        self._numpy = importlib.import_module("numpy")
        self._c = package.llama_cpp
        self._folder = Path(str(package.__file__)).parent
        if on_gpu and not self._c.llama_supports_gpu_offload():
            raise RuntimeError("this llama-cpp-python is built without GPU support: build it with -DGGML_CUDA=on")
        self._chunk_len = chunk_len
        self._llama = package.Llama(
            model_file,
            n_ctx=max_len,
            n_batch=chunk_len,
            n_ubatch=chunk_len,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            n_gpu_layers=-1 if on_gpu else 0,
            offload_kqv=is_kv_on_gpu,
            flash_attn=flash_attention,
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
        for begin in range(0, len(token_ids), self._chunk_len):
            self._decode(token_ids[begin : begin + self._chunk_len])
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
