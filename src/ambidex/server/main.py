"""From settings to a server that runs until it is told to stop."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
import uvloop

from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, ConfigError, InternalError
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.sessions import check_session_folder
from ambidex.server.app import ServerApp
from ambidex.server.config import LogFormat, ServerConfig
from ambidex.server.connection import Connection
from ambidex.server.service import EngineService, Progress
from ambidex.server.tracing import open_tracing
from ambidex.server.worker.client import WorkerEngine

logger = logging.getLogger(__name__)

INTERRUPT_DRAIN_S: Final = 1.0
"""Ctrl-C: whoever pressed it waits."""
CLOSE_S: Final = 5
"""After the answers have been ended, for their last bytes to leave."""
BACKLOG: Final = 2048


def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    *,
    version: str = "0",
    on_bound: Callable[[str], None] = lambda _: None,
    on_ready: Callable[[EngineReport], None] = lambda _: None,
    on_end: Callable[[DecodeOutcome | None], None] = lambda _: None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; its engine runs in a process of its own.

    Args:
        on_bound: called with the URL when the port is taken, before the model loads.
        on_ready, on_end: as in `EngineService`.
    Raises:
        ConfigError: the settings are not safe, another engine uses the session folder, or the address cannot be
            listened on.
        AmbidexError: the model cannot be loaded, or the engine failed and could not be built anew.
    """
    api_keys = config.read_api_keys()
    tracing = open_tracing(config.otlp_endpoint, version=version)
    check_session_folder(engine_config)
    listener = bind(config)
    set_up_log(config.log_format)

    async def start_engine(progress: Progress) -> WorkerEngine:
        return await WorkerEngine.start(engine_config.keeping_prefixes(), progress=progress, silence_s=config.stall_s)

    service = EngineService(start_engine, stall_s=config.stall_s, on_ready=on_ready, on_end=on_end)
    app = ServerApp(
        service,
        config,
        names=config.served_model_name or (engine_config.model,),
        api_keys=api_keys,
        version=version,
        tracing=tracing,
        on_failed=lambda: server.stop(),
    )
    server = DrainingServer(app, drain_s=config.drain_s)
    with listener:
        on_bound(url_of(listener))
        uvloop.run(server.serve(sockets=[listener]))
    if tracing is not None:
        tracing.close()
    if isinstance(service.error, AmbidexError):
        raise service.error
    if service.error is not None:
        raise InternalError(f"the engine could not be built: {type(service.error).__name__}: {service.error}")


class DrainingServer(uvicorn.Server):
    """uvicorn, which on a signal takes no more requests and lets the open answers run on for a while."""

    def __init__(self, app: ServerApp, *, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                proxy_headers=False,  # nobody looks at where a client says that it comes from
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=round(drain_s) + CLOSE_S,
            )
        )
        self._app = app
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, which is how a server ends (exit code 0); a second Ctrl-C ends at once."""
        del frame
        is_second = self.should_exit
        drain_s = INTERRUPT_DRAIN_S if sig == signal.SIGINT else self._drain_s
        if self._loop is not None and not is_second:
            logger.info("%s: open answers may run on for %g s", signal.Signals(sig).name, drain_s)
            self._loop.call_soon_threadsafe(self._drain, drain_s)
        self.force_exit = is_second and sig == signal.SIGINT
        self.should_exit = True

    def stop(self) -> None:
        """End the server: its engine cannot be mended."""
        self._app.answers.fail_all()
        self.should_exit = True

    def _drain(self, drain_s: float) -> None:
        self._app.end_by(drain_s)
        self._app.answers.close()
        asyncio.get_running_loop().call_later(drain_s, self._app.answers.fail_all)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, before anything is loaded.

    Raises:
        ConfigError: it is taken, or the address is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{config.host}:{config.port} cannot be listened on ({error.strerror or error}): end what holds it, or "
            f"choose another --port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _LineFormatter(logging.Formatter):
    """Time, level, message; the time's text is made once a second."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._second, self._text = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's
        """As `logging` has it: local time with milliseconds."""
        del datefmt
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime(self.default_time_format, time.localtime(second))
        return f"{self._text},{record.msecs:03.0f}"


def set_up_log(log_format: LogFormat) -> None:
    """Events of the server go to stderr; a request's line is its own JSON object with `--log-format json`."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format is LogFormat.JSON
    handler.setFormatter(logging.Formatter("%(message)s") if is_json else _LineFormatter())
    for name in ("ambidex.server", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
    logging.getLogger("ambidex.server").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
