"""The FastAPI application: routes, their description, and the gate before them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from ambidex.server.answers import Answers
from ambidex.server.config import ServerConfig
from ambidex.server.errors import answer_for
from ambidex.server.gate import Gate, error_response
from ambidex.server.handlers import Handlers
from ambidex.server.metrics import Metrics
from ambidex.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ambidex.server.service import EngineService
from ambidex.server.tracing import Tracing

PAGE_FILES: Final = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ServerApp:
    """One server's application and what it shares.

    Args:
        names: of the model, the first is shown.
        api_keys: accepted keys; none: no key is asked for.
        tracing: gets every request that has ended.
        on_failed: called when the engine cannot be mended.
    """

    def __init__(
        self,
        service: EngineService,
        config: ServerConfig,
        *,
        names: Sequence[str],
        api_keys: Sequence[str],
        version: str = "0",
        tracing: Tracing | None = None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = service
        self.answers = Answers(config.max_queue)
        self.metrics = Metrics(self._gauges)
        self._on_failed = on_failed
        self._drain_s = config.drain_s
        self._handlers = Handlers(
            config=config,
            names=tuple(names),
            service=service,
            answers=self.answers,
            metrics=self.metrics,
            begun_s=time.monotonic(),
        )
        app = FastAPI(title="Ambidex", version=version, lifespan=self._life, docs_url=None, redoc_url=None)
        _add_routes(app, self._handlers)
        if config.web:
            _add_page(app)
        for kind in (Exception, 404, 405):
            app.add_exception_handler(kind, _show_error)
        self.fastapi = app
        self.asgi: ASGIApp = Gate(
            ShortWay(app),
            api_keys=api_keys,
            open_prefixes=tuple(PAGE_FILES) if config.web else (),
            allowed_hosts=config.allowed_hosts,
            origins=config.cors_origins,
            max_body=config.max_body,
            metrics=self.metrics,
            log_format=config.log_format,
            tracing=tracing,
        )

    def end_by(self, seconds: float) -> None:
        """Be told, once, how long the end of the server may take from now on: saving ends then."""
        if self.service.end_s is None:
            self.service.end_s = time.monotonic() + seconds

    @contextlib.asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        del app
        task = asyncio.create_task(self._run_engine())
        try:
            yield
        finally:
            self.answers.fail_all()
            self.end_by(self._drain_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run_engine(self) -> None:
        await self.service.run()
        self._on_failed()

    def _gauges(self) -> dict[str, float]:
        return {
            "engine_restarts": float(self.service.num_restarts),
            "answers_open": float(self.answers.num_choices),
        }


class ShortWay:
    """ASGI: requests of routes whose path is one text go straight to what handles them, all others to FastAPI.

    Its layers solve dependencies, of which there are none here, for 0.2 ms a request. Errors are the gate's affair
    either way.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._routes = {
            (method, route.path): route
            for route in app.routes
            if isinstance(route, APIRoute) and "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None or not route.include_in_schema:  # the page's files take no request
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(HttpRequest(scope, receive))
        await response(scope, receive, send)


async def _show_error(request: HttpRequest, error: Exception) -> Response:
    del request
    return error_response(answer_for(error))


def _add_routes(app: FastAPI, handlers: Handlers) -> None:
    bodies: dict[str, type[BaseModel]] = {}

    def post(path: str, handle: Any, body: type[BaseModel]) -> None:
        bodies[path] = body
        app.add_api_route(path, handle, methods=["POST"], response_model=None, name=handle.__name__)

    def get(path: str, handle: Any) -> None:
        app.add_api_route(path, handle, methods=["GET"], response_model=None, name=handle.__name__)

    post("/v1/chat/completions", handlers.chat, ChatRequest)
    post("/v1/completions", handlers.completions, CompletionRequest)
    post("/tokenize", handlers.tokenize, TokenizeRequest)
    post("/detokenize", handlers.detokenize, DetokenizeRequest)
    post("/v1/abort", handlers.abort, AbortRequest)
    app.add_api_route("/v1/embeddings", handlers.embeddings, methods=["POST"], response_model=None)
    get("/v1/models", handlers.models)
    get("/v1/models/{name:path}", handlers.model)
    get("/health", handlers.health)
    get("/ready", handlers.ready)
    get("/metrics", handlers.metrics_text)
    get("/v1/ambidex/status", handlers.status)
    get("/v1/ambidex/cache", handlers.cache)
    app.add_api_route("/v1/ambidex/cache", handlers.drop_cache, methods=["DELETE"], response_model=None)
    app.openapi = lambda: _describe(app, bodies)  # type: ignore[method-assign]


def _describe(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> dict[str, Any]:
    """The OpenAPI file: FastAPI's, with the bodies, which are read by hand so that wrong ones are named well."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(model, "validation") for model in bodies.values()]
        refs, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, model in bodies.items():
            content = {"application/json": {"schema": refs[model, "validation"]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema


def _add_page(app: FastAPI) -> None:
    folder = files("ambidex.server") / "web"

    def add(path: str, name: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        kind = _TYPES[name.rpartition(".")[2]]

        async def page() -> Response:
            return Response(text, media_type=kind, headers=dict(_PAGE_HEADERS))

        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, response_model=None)

    for path, name in PAGE_FILES.items():
        add(path, name)
