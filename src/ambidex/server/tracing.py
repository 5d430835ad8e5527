"""Traces of requests for OpenTelemetry: one span a request, made when it has ended from what was noted meanwhile.

Attributes are named as OpenTelemetry's conventions for HTTP and for generative AI have it; none holds a prompt or an
answer.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ambidex.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ATTRIBUTES: Final = {
    "answer": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "user": "enduser.id",
}
"""Field of a request's log line → attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that has been answered; times are of `time.monotonic`.

    `stages` are those that it has reached, with the time; `fields` are what its log line says.
    """

    method: str
    route: str
    status: int
    begun_s: float
    ended_s: float
    stages: Sequence[tuple[str, float]]
    fields: Mapping[str, Any]
    headers: Mapping[str, str]


class Tracing:
    """Hands ended requests to a provider of OpenTelemetry's SDK."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ambidex.server")
        self._propagator = TraceContextTextMapPropagator()

    def note(self, request: EndedRequest) -> None:
        """Make the span of a request; a child of the client's own, if it sent a `traceparent`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        offset_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(seconds: float) -> int:
            return round(seconds * 1e9) + offset_ns

        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            start_time=wall_ns(request.begun_s),
            attributes={
                "http.request.method": request.method,
                "http.route": request.route,
                "http.response.status_code": request.status,
                **{name: request.fields[field] for field, name in _ATTRIBUTES.items() if field in request.fields},
            },
        )
        for stage, since_s in request.stages:
            span.add_event(stage, timestamp=wall_ns(since_s))
        if request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=wall_ns(request.ended_s))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def open_tracing(endpoint: str | None, *, version: str) -> Tracing | None:
    """What sends spans to an OTLP collector over HTTP; None if there is no endpoint.

    Raises:
        ConfigError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint is {endpoint!r}: it must begin with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs OpenTelemetry ({error}): pip install 'ambidex[otel]'") from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": "ambidex", "service.version": version}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
