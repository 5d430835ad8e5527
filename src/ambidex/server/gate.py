"""`Gate`: what every request passes before a route sees it. Its id, the host it calls, its origin, its key, its size.

Refusals and failures leave in OpenAI's error shape, and each request leaves one line in the log, never with a prompt.
"""

import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ambidex.core.errors import AmbidexError
from ambidex.server.config import LogFormat
from ambidex.server.errors import ErrorAnswer, answer_for, bad_request
from ambidex.server.metrics import Metrics
from ambidex.server.stream import SEND, ClientGoneError
from ambidex.server.tracing import EndedRequest, Tracing

logger = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Served without a key: they say nothing of prompts and answers."""
QUIET_PATHS: Final = OPEN_PATHS | {"/metrics", "/v1/ambidex/status"}
"""Asked again and again by machines: logged only when they fail."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CLIENT_CHARS: Final = 12
_CLIENT_GONE: Final = 499
"""Nobody reads it: for log and metrics."""


@dataclass(slots=True)
class Record:
    """What the log line of a request says."""

    request_id: str
    client: str = ""
    """Name of the key that was sent: a digest of it. Requests of another client cannot be aborted."""
    tenant: str = ""
    """The whole digest: what requests of different keys never share goes by it."""
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    stages: list[tuple[str, float]] = field(default_factory=list)
    """Stages that it has reached, with the time of `time.monotonic`."""


def record_of(request: Request) -> Record:
    """The record of a request that came through the gate."""
    record: Record = request.scope["ambidex.record"]
    return record


class Gate:
    """ASGI middleware.

    Args:
        api_keys: keys of which a client must send one; none: no key is asked for.
        open_prefixes: paths that need no key, beside `OPEN_PATHS`: the page's own files.
        allowed_hosts: names of this machine beside IP addresses, localhost and its own name.
        origins: web origins whose pages may call; `*` means all.
        max_body: bytes of a request body.
        tracing: gets every request that has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        open_prefixes: Sequence[str],
        allowed_hosts: Sequence[str],
        origins: Sequence[str],
        max_body: int,
        metrics: Metrics,
        log_format: LogFormat,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._open_prefixes = tuple(open_prefixes)
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in allowed_hosts)}
        self._origins = frozenset(origins)
        self._max_body = max_body
        self._metrics = metrics
        self._log_format = log_format
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = Record(_request_id(headers))
        scope["ambidex.record"] = record
        begun_s = time.monotonic()
        exchange = _Exchange(record, send, self._cors_headers(headers))
        scope[SEND] = exchange.send
        try:
            self._check(scope, headers, record)
            if not await self._answer_preflight(scope, receive, exchange, headers):
                await self._app(scope, self._limited(headers, receive), exchange.send)
        except ClientGoneError:
            record.status = _CLIENT_GONE
        except Exception as error:
            await exchange.fail(error, scope, receive)
        finally:
            self._note(scope, headers, record, begun_s)

    def _check(self, scope: Scope, headers: Headers, record: Record) -> None:
        host = _host_name(headers.get("host", ""))
        if host not in self._hosts and not _is_ip(host):
            raise bad_request(
                f"host {host!r:.80} is not known here: call the server by its address, or set --allowed-hosts",
                code="unknown_host",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, headers) and not self._origins & {origin, "*"}:
            raise bad_request(
                f"pages of {origin!r:.80} may not call this server: start it with --cors-origins",
                code="unknown_origin",
                status=403,
            )
        path = scope["path"]
        is_open = path in OPEN_PATHS or path in self._open_prefixes or scope["method"] == "OPTIONS"
        record.tenant = self._tenant(headers)
        record.client = record.tenant[:_CLIENT_CHARS]
        if self._keys and not record.client and not is_open:
            raise bad_request(
                "no valid API key: send the header Authorization: Bearer KEY", code="invalid_api_key", status=401
            )

    def _tenant(self, headers: Headers) -> str:
        """Digest of the key that was sent; empty if none of ours was. Each key is compared, in constant time."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._keys:
            return ""
        digest = hashlib.sha256(key.strip().encode()).digest()
        is_known = [hmac.compare_digest(digest, known) for known in self._keys]
        return digest.hex() if any(is_known) and scheme.lower() == "bearer" else ""

    def _is_own(self, origin: str, headers: Headers) -> bool:
        return origin.partition("://")[2] == headers.get("host", "")

    def _cors_headers(self, headers: Headers) -> dict[str, str]:
        origin = headers.get("origin")
        if origin is None or not self._origins & {origin, "*"}:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Vary": "Origin",
            "Access-Control-Expose-Headers": "X-Request-Id",
        }

    async def _answer_preflight(self, scope: Scope, receive: Receive, exchange: "_Exchange", headers: Headers) -> bool:
        if scope["method"] != "OPTIONS" or "access-control-request-method" not in headers:
            return False
        allowed = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id",
            "Access-Control-Max-Age": "600",
        }
        await Response(status_code=204, headers=allowed)(scope, receive, exchange.send)
        return True

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """A `receive` that refuses a body above the limit, before it is read where its length is stated."""
        too_large = bad_request(
            f"the body is larger than {self._max_body} bytes (--max-body)", code="body_too_large", status=413
        )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._max_body:
            raise too_large
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body:
                raise too_large
            return message

        return limited

    def _note(self, scope: Scope, headers: Headers, record: Record, begun_s: float) -> None:
        ended_s = time.monotonic()
        seconds = ended_s - begun_s
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.note_request(route, record.status, seconds)
        if scope["path"] in QUIET_PATHS and record.status in (200, 503):
            return
        if self._tracing is not None:
            ended = EndedRequest(
                method=scope["method"],
                route=route,
                status=record.status,
                begun_s=begun_s,
                ended_s=ended_s,
                stages=record.stages,
                fields=record.fields,
                headers=headers,
            )
            self._tracing.note(ended)
        values = {
            "id": record.request_id,
            "route": f"{scope['method']} {route}",
            "status": record.status,
            "seconds": round(seconds, 4),
            "client": record.client or None,
            **record.fields,
        }
        logger.info(_line({name: value for name, value in values.items() if value is not None}, self._log_format))


class _Exchange:
    """Sends a response once: adds headers of every response, and knows whether it has begun."""

    def __init__(self, record: Record, send: Send, headers: dict[str, str]) -> None:
        self._record = record
        self._send = send
        added = {"X-Request-Id": record.request_id, "X-Content-Type-Options": "nosniff", **headers}
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in added.items()]
        self._has_begun = False

    async def send(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self._has_begun = True
            self._record.status = self._record.status or message["status"]
            message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)

    async def fail(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Answer with an error, unless a response has begun."""
        answer = answer_for(error)
        if not isinstance(error, AmbidexError) and answer.status >= 500:
            logger.exception("request %s failed", self._record.request_id, exc_info=error)
        self._record.status = answer.status
        if not self._has_begun:
            await error_response(answer)(scope, receive, self.send)


def error_response(answer: ErrorAnswer) -> JSONResponse:
    """A response with an error."""
    return JSONResponse(answer.body(), status_code=answer.status, headers=dict(answer.headers))


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"


def _host_name(host: str) -> str:
    """`localhost:8000` → `localhost`, `[::1]:8000` → `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


@functools.lru_cache(maxsize=64)
def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _line(values: dict[str, Any], log_format: LogFormat) -> str:
    if log_format is LogFormat.JSON:
        return json.dumps(values)
    return " ".join(f"{name}={_word(value)}" for name, value in values.items())


def _word(value: object) -> str:
    text = str(value)
    return json.dumps(text) if " " in text else text
