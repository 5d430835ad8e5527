"""The table of errors: what a client is told of each, with a code that is never null (docs/serving.md)."""

import re
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from ambidex.core.errors import (
    BoundError,
    ConfigError,
    ContextLengthError,
    EngineLostError,
    IntegrityError,
    InternalError,
    MachineError,
    RequestError,
    RequestFailedError,
)
from ambidex.server.errors import answer_for, bad_request, unavailable

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
TABLE = [
    (RequestError("top_p is 0: it must be above 0"), 400, "invalid_request_error", "invalid_value"),
    (ConfigError("a setting"), 400, "invalid_request_error", "invalid_value"),
    (ContextLengthError(200, 128), 400, "invalid_request_error", "context_length_exceeded"),
    (bad_request("the prompt is empty", param="prompt"), 400, "invalid_request_error", "invalid_value"),
    (bad_request("no such answer", code="not_found", status=404), 404, "invalid_request_error", "not_found"),
    (RequestFailedError("logits are NaN"), 500, "server_error", "request_failed"),
    (ValueError("a bug of the server"), 500, "server_error", "request_failed"),
    (EngineLostError("killed"), 500, "server_error", "engine_failed"),
    (InternalError("an invariant broke"), 500, "server_error", "engine_failed"),
    (BoundError("off by more"), 500, "server_error", "engine_failed"),
    (MachineError("no memory"), 503, "service_unavailable", "machine_error"),
    (IntegrityError("a bit flipped"), 503, "service_unavailable", "machine_error"),
    (unavailable("loading", code="engine_loading"), 503, "service_unavailable", "engine_loading"),
    (unavailable("full", code="queue_full", status=429), 429, "rate_limit_error", "queue_full"),
    (HTTPException(404), 404, "invalid_request_error", "not_found"),
    (HTTPException(405), 405, "invalid_request_error", "method_not_allowed"),
    (HTTPException(422), 422, "invalid_request_error", "invalid_value"),
    (HTTPException(502), 502, "server_error", "request_failed"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), TABLE, ids=lambda value: getattr(value, "code", None))
def test_each_error_has_its_status_type_and_code(error: Exception, status: int, kind: str, code: str) -> None:
    answer = answer_for(error)
    assert (answer.status, answer.type, answer.code) == (status, kind, code)
    assert answer.body()["error"].items() >= {"type": kind, "code": code, "param": answer.param}.items()
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


def test_codes_stand_in_the_documentation_by_their_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    promised = {(int(status), code) for status, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    assert {
        (status, code) for _, status, _, code in TABLE if status not in (422, 502)
    } <= promised  # nobody raises these
