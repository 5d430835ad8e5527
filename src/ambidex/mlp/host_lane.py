"""The CPU lane of weights: rows in DRAM are multiplied there; x goes to them, and only what they give comes back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ambidex.kernels.linear import LinearOp
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.parts import Part, join

Answer = tuple[range, Tensor]
"""Rows of a place, and what they give on the accelerator."""


class HostSide:
    """The rows of a place that the CPU multiplies.

    Args:
        parts: with the numbers in DRAM; products of an fp32 x are fp32.
    """

    def __init__(self, shape: SiteShape, parts: Sequence[Part]) -> None:
        self.shape = shape
        self.parts = tuple(parts)
        self.rows = range(parts[0].rows.start, parts[-1].rows.stop)
        self.answer_width = shape.num_out or len(self.rows)
        self._weights = [weight for part in parts for weight in part.numbers.ins]
        self._multiply_ins = LinearOp(parts[0].linear)

    @property
    def num_bytes(self) -> int:
        """Of its rows."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def is_recordable(self) -> bool:
        """Whether the same ops compute every step, so that they can be recorded."""
        return True

    def compute(self, x: Tensor) -> Tensor:
        """x [T, K] fp32 in DRAM → [T, n] or, of neurons, [T, num_out]; fp32."""
        biases = [bias for part in self.parts for bias in part.biases]
        inner = self._multiply_ins(x, self._weights, biases)  # one call: x is laid out once
        if not self.shape.num_out:
            return join(
                self.shape, [(part.rows, rows) for part, rows in zip(self.parts, inner, strict=True)], torch.float32
            )
        num_ins, total = self.shape.num_ins, None
        for place, part in enumerate(self.parts):
            total = part.finish(inner[place * num_ins : (place + 1) * num_ins], total=total)
        assert total is not None, "a side has parts"
        return total


class HostLane:
    """Brings x to the CPU and the answers back, one place after the other.

    With a GPU, the thread that launches the step computes, while the GPU has its own part to do. The buffers serve
    every place: x is copied behind the last answer, so who has x on the host knows that the answer was taken.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._x = self._answer = torch.empty(0)
        self._sent = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here

    def begin(self, side: HostSide, x: Tensor) -> Callable[[], Answer]:
        """Send x [T, K] on its way.

        Returns:
            What gives the answer, once: it waits for x and computes. Other work may be launched before.
        """
        if self._sent is None:
            return lambda: (side.rows, side.compute(x))
        if self._x.numel() < x.numel() or self._x.dtype != x.dtype:
            self._x = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        arrived = self._x[: x.numel()].view(x.shape)
        arrived.copy_(x, non_blocking=True)
        self._sent.record()
        return lambda: (side.rows, self._compute(side, arrived, x.device))

    def _compute(self, side: HostSide, x: Tensor, device: torch.device) -> Tensor:
        assert self._sent is not None, "with a CPU nothing is sent"
        self._sent.synchronize()
        product = side.compute(x.float())
        if self._answer.numel() < product.numel():
            self._answer = torch.empty(product.numel(), pin_memory=True)
        answer = self._answer[: product.numel()].view(product.shape).copy_(product)
        return answer.to(device, non_blocking=True)
