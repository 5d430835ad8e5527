"""llama.cpp without a server: sequences that are computed side by side, as one batch a step.

`serve_peers.py` runs this with the peer's Python; a JSON object comes on stdin, one goes out on stdout.

Each sequence has a part of the cache of its own. With `state` only decode steps are measured: the first prompt is
computed and copied into each part, where it costs what the others would, and kept in that file for later runs.
"""

import ctypes
import json
import os
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

    def save(self, path: str) -> None:
        """Write all that is computed so far into a file."""
        if not c.llama_state_save_file(self._context, path.encode(), (c.llama_token * 1)(), 0):
            raise RuntimeError(f"llama.cpp cannot write {path}")

    def load(self, path: str) -> None:
        """Take it up again."""
        count = ctypes.c_size_t()
        if not c.llama_state_load_file(self._context, path.encode(), (c.llama_token * 1)(), 1, ctypes.byref(count)):
            raise RuntimeError(f"llama.cpp cannot read {path}")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts, greedy."""
    prompts, num = job["prompts"], len(job["prompts"])
    batches = Batches(job)
    state = job["state"]
    begun_s = time.perf_counter()
    if state is None:
        last = [
            batches.compute(
                [(token_id, position, idx, position == len(prompt) - 1) for position, token_id in enumerate(prompt)]
            )[0]
            for idx, prompt in enumerate(prompts)
        ]
    else:
        if os.path.exists(state):
            batches.load(state)
        else:
            batches.compute([(token_id, position, 0, False) for position, token_id in enumerate(prompts[0])])
            batches.copy_first(num)
            batches.save(state)
        last = [prompts[0][-1]] * num  # any token will do
    prompts_s = time.perf_counter() - begun_s
    first_s = time.perf_counter()
    for step in range(job["tokens"] - 1):
        last = batches.compute([(last[idx], len(prompts[idx]) + step, idx, True) for idx in range(num)])
    decode_s = time.perf_counter() - first_s
    return {
        "tokens_per_s": None if state is not None else num * job["tokens"] / (prompts_s + decode_s),
        "decode_tokens_per_s": num * (job["tokens"] - 1) / decode_s,
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
