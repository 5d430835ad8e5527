"""A real server on a free port of this machine, in a thread, over a tiny model."""

import asyncio
import threading
import time
from collections.abc import Callable
from inspect import iscoroutinefunction
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import uvloop
from openai import OpenAI

from ambidex import AsyncLLM, EngineConfig
from ambidex.engine.compose import build_engine
from ambidex.runner.runner import Forward, call_model
from ambidex.server.app import ServerApp
from ambidex.server.config import ServerConfig
from ambidex.server.main import DrainingServer, bind, url_of
from ambidex.server.service import EngineService, MakeEngine, Progress
from ambidex.server.tracing import Tracing
from ambidex.server.worker.client import WorkerEngine

MakeLLM = Callable[[Progress], AsyncLLM]
WAIT_S = 60.0
"""For what takes milliseconds, on a machine that does other things too: only a fault is cut off."""
START_S = 180.0
"""For a process to import torch and load, on such a machine."""
SMALL_POOL: dict[str, Any] = {
    "block_size": 4, "kv_gpu_tokens": 128, "num_sink_tokens": 4, "recent_window": 16, "prefix_cache_percent": 100
}  # fmt: skip
"""Settings of an engine so small that blocks move to DRAM; with a prefix cache, as `serve` has it."""


class LiveServer:
    """Entered, it serves; `url` is where.

    Args:
        make: builds the engine.
        settings: fields of `ServerConfig`.
    """

    def __init__(
        self,
        make: MakeEngine | MakeLLM,
        *,
        api_keys: tuple[str, ...] = (),
        is_awaited: bool = True,
        tracing: Tracing | None = None,
        **settings: Any,
    ):
        config = ServerConfig(port=0, **settings)
        self._is_awaited = is_awaited
        self._listener = bind(config)
        self._is_awaited = is_awaited
        self.url = url_of(self._listener)
        self.service = EngineService(make if iscoroutinefunction(make) else in_thread(make), stall_s=config.stall_s)
        self.app = ServerApp(
            self.service,
            config,
            names=("tiny",),
            api_keys=api_keys,
            tracing=tracing,
            on_failed=lambda: self.server.stop(),
        )
        self.server = DrainingServer(self.app, drain_s=config.drain_s)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._openai: OpenAI | None = None
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    @property
    def worker(self) -> WorkerEngine:
        """The engine, if it is in a process of its own."""
        engine = self.service.engine()
        assert isinstance(engine, WorkerEngine), "the test has built another one"
        return engine

    @property
    def openai(self) -> OpenAI:
        """OpenAI's own client."""
        if self._openai is None:
            self._openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        return self._openai

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        if self._is_awaited:
            wait_until(lambda: self.http.get("/ready").status_code == 200, timeout_s=START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self._openai is not None:
            self._openai.close()
        self.stop()

    def stop(self) -> None:
        """Shut down and wait for it."""
        self.server.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server does not end"

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        """One completion, greedy unless said otherwise."""
        return self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    def status(self) -> dict[str, Any]:
        """What `/v1/ambidex/status` says, once it says something: on a busy machine the engine may be late."""
        deadline = time.monotonic() + WAIT_S
        while (response := self.http.get("/v1/ambidex/status")).status_code != 200:
            assert time.monotonic() < deadline, response.text
        status: dict[str, Any] = response.json()
        return status

    def is_idle(self) -> bool:
        """No answer is open, and no tier holds KV."""
        status = self.status()
        return (
            status["num_open"] == status["num_running"] == status["num_waiting"] == 0
            and sum(tier["kv_bytes"] for tier in status["tiers"].values()) == 0
        )

    def _run(self) -> None:
        uvloop.run(self.server.serve(sockets=[self._listener]))


def in_thread(make: MakeLLM) -> MakeEngine:
    """The engine in a thread of the server's own process: what a test hands in can reach it."""

    async def make_there(progress: Progress) -> AsyncLLM:
        return await asyncio.to_thread(make, progress)

    return make_there


def maker(folder: Path, *, forward: Forward = call_model, **settings: Any) -> MakeLLM:
    """Builds the tiny engine; the model is called by `forward`, in every step where that is a test's own."""
    if forward is not call_model:
        settings = {"graphs": "off", **settings}  # a recorded step calls no model

    def make(_progress: object) -> AsyncLLM:
        return AsyncLLM(build_engine(EngineConfig(model=str(folder), **settings), forward=forward))

    return make


def in_worker(folder: Path, *, silence_s: float = 60.0, **settings: Any) -> MakeEngine:
    """The tiny engine in a process of its own, as `serve` has it."""

    async def start(progress: Progress) -> WorkerEngine:
        config = EngineConfig(model=str(folder), num_threads=1, **settings)
        return await WorkerEngine.start(config, progress=progress, silence_s=silence_s)

    return start


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Wait for a state that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
