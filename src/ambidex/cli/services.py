"""What the verbs get from outside, as values that a test replaces: the engine, and what they look at of the machine."""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ambidex.core.config import EngineConfig
from ambidex.core.request import SamplingParams
from ambidex.core.sparsity import OFF

if TYPE_CHECKING:
    from ambidex.engine.outputs import RequestOutput
    from ambidex.engine.report import EngineReport
    from ambidex.engine.run_plan import DecodeOutcome
    from ambidex.engine.stats import EngineStats
    from ambidex.hw.profile import Machine
    from ambidex.server.config import ServerConfig

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while weights load."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: `role` and `content` of each message."""


class LLMService(Protocol):
    """The part of `ambidex.LLM` that the verbs use."""

    @property
    def report(self) -> "EngineReport":
        """What the settings became."""

    def stats(self) -> "EngineStats":
        """Counters."""

    def compare_decode(self) -> tuple[float, float] | None:
        """Seconds of a decode step, predicted and measured, or None."""

    def decode_outcome(self) -> "DecodeOutcome | None":
        """Decode steps so far beside what was predicted of them."""

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> "Generator[RequestOutput, None, None]":
        """Answer one prompt, piece by piece; closing the iterator ends the request."""

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> "Generator[RequestOutput, None, None]":
        """Answer a conversation, piece by piece."""

    def render_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation."""

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text."""

    def generate_each(
        self, prompts: Iterable[tuple[str | Sequence[int], SamplingParams]]
    ) -> "Generator[tuple[int, RequestOutput], None, None]":
        """Answer many prompts, each as soon as it is ready."""

    def close(self) -> None:
        """End all requests."""


def make_llm(config: EngineConfig, progress: Progress | None) -> LLMService:
    """Build the engine; imported here because it brings in torch, which `--help` does not need."""
    rest_between_ops(config)
    from ambidex.engine.sync import LLM

    return LLM(config, progress=progress)


def run_server(config: "ServerConfig", engine: EngineConfig, shows_plan: bool) -> None:
    """Serve until a signal; imported here because it brings in torch and FastAPI, which `--help` does not need.

    Args:
        shows_plan: say what lies where, if not all lies on the accelerator, and at the end what came of it.
    """
    rest_between_ops(engine)
    from ambidex.cli.run_plan import show_outcome, show_run_plan
    from ambidex.cli.show import say
    from ambidex.server.main import serve

    has_plan = False

    def on_ready(report: "EngineReport") -> None:
        nonlocal has_plan
        has_plan = shows_plan and report.plan is not None
        if has_plan and report.plan is not None:
            show_run_plan(report.plan)

    serve(
        config,
        engine,
        version=package_version("ambidex") or "0",
        on_bound=lambda url: say(f"{url} listens, {engine.model} is loading"),
        on_ready=on_ready,
        on_end=lambda outcome: show_outcome(outcome) if has_plan else None,
    )


def rest_between_ops(config: EngineConfig) -> None:
    """Where neurons are left out, torch's threads work between native calls: they shall sleep when they have nothing to
    do, not spin on the cores that the native threads need. OpenMP reads this once, when torch is loaded; what the user
    has set stays."""
    if config.mlp_sparsity != OFF:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def describe_gpus() -> Sequence[Any]:
    """The GPUs that torch sees, as dataclasses; imported here for the same reason."""
    from ambidex.runner.device import describe_gpus

    return describe_gpus()


def describe_machine() -> "Machine":
    """What a profile of this machine belongs to; imported here for the same reason."""
    from ambidex.hw.profile import Machine
    from ambidex.hw.topology import read_topology
    from ambidex.runner.device import describe_gpus

    topology, gpus = read_topology(), describe_gpus()
    return Machine(cpu=topology.cpu_model, cores=topology.num_usable_cores, gpu=gpus[0].name if gpus else None)


def native_isa() -> str:
    """The instruction set of the native module.

    Raises:
        NativeModuleError: it is missing or does not run here.
    """
    from ambidex.kernels.cpu.native import isa

    return isa()


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """All of them; `root` is where `/proc` and `/sys` lie, `hub_cache` the Hub's cache (None: the usual place)."""

    make_llm: Callable[[EngineConfig, Progress | None], LLMService] = make_llm
    serve: Callable[["ServerConfig", EngineConfig, bool], None] = run_server
    describe_gpus: Callable[[], Sequence[Any]] = describe_gpus
    describe_machine: Callable[[], "Machine"] = describe_machine
    native_isa: Callable[[], str] = native_isa
    package_version: Callable[[str], str | None] = package_version
    root: Path = field(default=Path("/"))
    hub_cache: Path | None = None
