"""transformers and accelerate."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

from peers.engine import CacheKind, Generation


class Transformers:
    """transformers with torch's fused attention, its own caches, and accelerate where weights are shared out.

    Args:
        model: a GGUF file or a folder.
        dtype: torch's name of the weights' format.
        weights_on_gpu_bytes: accelerate leaves so many bytes of weights on the GPU and moves the others there and back
            in each step; None: all.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        device: str,
        cache: CacheKind,
        chunk_len: int,
        num_threads: int,
        weights_on_gpu_bytes: int | None,
    ) -> None:
        self._torch = importlib.import_module("torch")
        self._package = importlib.import_module("transformers")
        self._torch.set_num_threads(num_threads)
        self._device, self._cache, self._chunk_len = device, cache, chunk_len
        path = Path(model)
        where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        if weights_on_gpu_bytes is not None:
            where |= {"device_map": "auto", "max_memory": {0: weights_on_gpu_bytes, "cpu": 1 << 40}}
        elif device != "cpu":
            where["device_map"] = device
        self._model = self._package.AutoModelForCausalLM.from_pretrained(
            str(path.parent if path.is_file() else path),
            dtype=getattr(self._torch, dtype),
            attn_implementation="sdpa",
            **where,
        ).eval()

    def about(self) -> dict[str, object]:
        return {
            "attention": self._model.config._attn_implementation,
            "threads": self._torch.get_num_threads(),
            "cache": self._cache.value,
            "device_map": {str(key): str(value) for key, value in getattr(self._model, "hf_device_map", {}).items()},
        }

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        answer = Generation(time.perf_counter())
        cache = self._make_cache()
        with self._torch.inference_mode():
            for begin in range(0, len(token_ids), self._chunk_len):
                chunk = self._torch.tensor([token_ids[begin : begin + self._chunk_len]], device=self._device)
                out = self._forward(chunk, cache)
                cache = out.past_key_values
            while True:
                best = out.logits[:, -1:].argmax(-1)  # [1, 1]
                answer.token_ids.append(int(best))  # waits for the device
                answer.moments.append(time.perf_counter())
                if len(answer.token_ids) == num_tokens:
                    return answer
                out = self._forward(best, out.past_key_values)

    def _make_cache(self) -> Any:
        match self._cache:
            case CacheKind.DYNAMIC:
                return None
            case CacheKind.OFFLOADED:
                return self._package.DynamicCache(config=self._model.config, offloading=True)
            case CacheKind.QUANTIZED:
                return self._package.QuantizedCache(backend=self._quantizer(), config=self._model.config, nbits=4)
            case _:
                assert_never(self._cache)

    def _quantizer(self) -> str:
        for module, backend in (("optimum.quanto", "quanto"), ("hqq", "hqq")):
            try:
                importlib.import_module(module)
            except ImportError:
                continue
            return backend
        raise RuntimeError("a quantized cache needs optimum-quanto or hqq: pip install optimum-quanto")

    def _forward(self, token_ids: Any, cache: Any) -> Any:
        return self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
