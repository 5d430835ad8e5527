"""Ambidex: LLM inference with both hands. GPU and CPU attend together over a KV cache larger than GPU memory.

from ambidex import LLM, SamplingParams

with LLM("smollm2", kv_gpu_tokens=256) as llm:
    print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_output_tokens=50)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ambidex.core.config import EngineConfig
from ambidex.core.errors import (
    AmbidexError,
    CallerError,
    ConfigError,
    MachineError,
    ModelError,
    RequestError,
    RequestFailedError,
)
from ambidex.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from ambidex.engine.async_ import AsyncLLM
    from ambidex.engine.outputs import RequestOutput
    from ambidex.engine.sync import LLM

__all__ = [
    "LLM",
    "AmbidexError",
    "AsyncLLM",
    "CallerError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "MachineError",
    "ModelError",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
]

_LAZY = {
    "LLM": "ambidex.engine.sync",
    "AsyncLLM": "ambidex.engine.async_",
    "RequestOutput": "ambidex.engine.outputs",
}


def __getattr__(name: str) -> object:
    """Import the engine on first use: it brings in torch, which `ambidex --help` and the control plane do not need."""
    if name not in _LAZY:
        raise AttributeError(f"module 'ambidex' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
