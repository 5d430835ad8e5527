"""How many threads torch computes with on a CPU, step by step."""

import torch

from ambidex.kernels.linear import MOST_NATIVE_TOKENS


class TorchThreads:
    """All threads for steps of many tokens, one for the others.

    In a step of few tokens the native ops' threads do the work, and torch has small things between. Its own threads
    would spin for milliseconds after each of those, on the cores that the native threads need. Measured on 2 cores,
    SmolLM2 in bf16, 64 tokens of context: 28 ms a step with one torch thread, 34 ms with two.

    Args:
        num_threads: of a step of many tokens.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def choose(self, num_tokens: int) -> None:
        """Set the number for a step of so many tokens."""
        wanted = self._num_threads if num_tokens > MOST_NATIVE_TOKENS else 1
        if wanted != torch.get_num_threads():  # another engine of the process may have changed it
            torch.set_num_threads(wanted)
