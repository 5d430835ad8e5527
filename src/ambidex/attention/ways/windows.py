"""`WindowsWay`: the first keys and the newest, side by side (StreamingLLM); its attention: `windows_fixed.py`. What is
chosen follows from places alone, so that nothing is kept on the accelerator."""

from collections.abc import Sequence
from dataclasses import fields
from typing import ClassVar, cast

import torch

from ambidex.attention.select.streaming_llm import FirstAndLast, StreamingLLM, WindowPlan
from ambidex.attention.ways.way import DecodeWork, FixedForm, StepParts, StepRequests, Way, WayNumbers, far_but_own
from ambidex.attention.windows_fixed import WindowAttention
from ambidex.kernels.early_rows import WindowRows
from ambidex.layers.rope import compute_inv_freq


class WindowsWay(Way):
    """By places.

    Args:
        policy: whose selectors are `FirstAndLast`, in all layers alike.
        device: the accelerator.
    """

    names: ClassVar[Sequence[str]] = tuple(item.name for item in fields(WindowRows))

    def __init__(self, policy: StreamingLLM, device: torch.device) -> None:
        spec = policy.spec
        self._scale = spec.head_dim**-0.5
        self._device = device
        self._inv_freq = None if spec.rope is None else compute_inv_freq(spec.rope).to(device)

    def find_form(self, works: Sequence[DecodeWork]) -> FixedForm:
        num_far = far_but_own(works)
        return FixedForm(
            num_far=num_far,
            num_selected=[num - _plan_of(work).gap for num, work in zip(num_far, works, strict=True)],
        )

    def plan(self, requests: StepRequests, form: FixedForm) -> WayNumbers:
        del form
        plans = [_plan_of(work) for work in requests.works]
        return WayNumbers(
            of_requests={
                "sink_end": [plan.sink_end for plan in plans],
                "window_first": [plan.window_first for plan in plans],
                "gap": [plan.gap for plan in plans],
            }
        )

    def attention(self, parts: StepParts) -> WindowAttention:
        return WindowAttention(parts.near, parts.rows, WindowRows(**parts.own), self._inv_freq, scale=self._scale)

    def keep_new(self, works: Sequence[DecodeWork]) -> None:
        for work in works:
            for selector in work.selectors:
                cast("FirstAndLast", selector).place(work.start + 1, self._device)


def _plan_of(work: DecodeWork) -> WindowPlan:
    """The windows of all layers."""
    return cast("FirstAndLast", work.selectors[0]).plan_windows(work.start + 1)
