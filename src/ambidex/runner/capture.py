"""How a step is captured: what it launches is recorded once and then launched again as one graph."""

from collections.abc import Callable

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches, without running it, and gives a function that launches the same again."""


class CudaCapture:
    """Captures CUDA graphs. They share one pool of memory, so no two may run at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body`, which must have run before: kernels are compiled then, and libraries ready."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            body()
        replay: Callable[[], None] = graph.replay
        return replay
