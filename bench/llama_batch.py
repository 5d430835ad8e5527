"""llama.cpp without a server: sequences that are computed side by side, as one batch a step.

`serve_peers.py` runs this with the peer's Python; a JSON object comes on stdin, one goes out on stdout.

Each sequence has a part of the cache of its own. What all prompts begin with is computed once, before the clock starts,
and copied into each part.
"""

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as c
import numpy

CHUNK_LEN = 512
_SILENT = c.llama_log_callback(lambda *_: None)  # kept: llama.cpp calls it as long as it lives


class Batches:
    """A context of llama.cpp with one part for each sequence."""

    def __init__(self, job: dict[str, Any]) -> None:
        c.llama_backend_init()
        c.llama_log_set(_SILENT, ctypes.c_void_p(0))
        self._model = c.llama_model_load_from_file(job["model"].encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        num = len(job["prompts"])
        longest = max(map(len, job["prompts"])) + job["tokens"]
        params.n_ctx, params.n_seq_max = num * (longest + -longest % 256), num
        params.n_batch = params.n_ubatch = CHUNK_LEN
        params.n_threads = params.n_threads_batch = job["threads"]
        params.kv_unified = False
        self._context = c.llama_init_from_model(self._model, params)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(CHUNK_LEN, 0, 1)

    def compute(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token id, position, sequence, is the next one wanted); returns the likeliest next ones."""
        best = []
        for begin in range(0, len(tokens), CHUNK_LEN):
            part = tokens[begin : begin + CHUNK_LEN]
            for place, (token_id, position, sequence, is_wanted) in enumerate(part):
                self._batch.token[place] = token_id
                self._batch.pos[place] = position
                self._batch.n_seq_id[place] = 1
                self._batch.seq_id[place][0] = sequence
                self._batch.logits[place] = is_wanted
            self._batch.n_tokens = len(part)
            if (code := c.llama_decode(self._context, self._batch)) != 0:
                raise RuntimeError(f"llama_decode returned {code}")
            for place in (place for place, token in enumerate(part) if token[3]):
                logits = c.llama_get_logits_ith(self._context, place)
                best.append(int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))
        return best

    def copy_first(self, num: int) -> None:
        """Give every sequence what the first one holds."""
        memory = c.llama_get_memory(self._context)
        for sequence in range(1, num):
            c.llama_memory_seq_cp(memory, 0, sequence, -1, -1)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts, greedy."""
    prompts, num = job["prompts"], len(job["prompts"])
    batches = Batches(job)
    num_common = next(
        (idx for idx, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1), min(map(len, prompts)) - 1
    )
    common = prompts[0][:num_common]
    if common:
        batches.compute([(token_id, position, 0, False) for position, token_id in enumerate(common)])
        batches.copy_first(num)
    begun_s = time.perf_counter()
    last = [
        batches.compute(
            [(token_id, position, idx, position == len(prompt) - 1) for position, token_id in enumerate(prompt)][
                num_common:
            ]
        )[0]
        for idx, prompt in enumerate(prompts)
    ]
    first_s = time.perf_counter()
    for step in range(job["tokens"] - 1):
        last = batches.compute([(last[idx], len(prompts[idx]) + step, idx, True) for idx in range(num)])
    ended_s = time.perf_counter()
    return {
        "tokens_per_s": num * job["tokens"] / (ended_s - begun_s),
        "decode_tokens_per_s": num * (job["tokens"] - 1) / (ended_s - first_s),
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
