"""Spans of OpenTelemetry: one a request, with its stages, and never a prompt."""

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ambidex import ConfigError
from ambidex.server.tracing import Tracing, open_tracing
from live_server import LiveServer, maker, wait_until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_each_request_is_a_span_with_its_stages(folder: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with LiveServer(maker(folder), tracing=Tracing(provider)) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
        body = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True, "stream": True}
        server.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        server.http.post("/v1/completions", json={"prompt": "x", "wrong": 1})
        wait_until(lambda: len(exporter.get_finished_spans()) == 2)
    answered, refused = exporter.get_finished_spans()
    assert answered.name == "POST /v1/completions"
    assert answered.context is not None
    assert f"{answered.context.trace_id:032x}" == TRACE_ID
    assert answered.attributes is not None
    assert answered.attributes["gen_ai.usage.input_tokens"] == 8
    assert answered.attributes["gen_ai.usage.output_tokens"] == 3
    assert answered.attributes["gen_ai.response.finish_reasons"] == "length"
    assert answered.attributes["http.response.status_code"] == 200
    assert [event.name for event in answered.events] == ["queued", "first token"]
    times = [answered.start_time, *(event.timestamp for event in answered.events), answered.end_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert "secret" not in answered.to_json()
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.status_code is StatusCode.UNSET


def test_tracing_is_off_without_an_endpoint_and_refuses_what_is_no_url() -> None:
    assert open_tracing(None, version="0") is None
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        open_tracing("collector:4318", version="0")
