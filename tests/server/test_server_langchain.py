"""LangChain's client for OpenAI's API, where it is installed: `pip install langchain-openai`."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ambidex import LLM, SamplingParams
from live_server import LiveServer


@pytest.fixture(scope="module")
def chat(server: LiveServer) -> Iterator[Any]:
    package = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    with httpx.Client() as client:
        yield package.ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            model="tiny",
            temperature=0,
            max_tokens=20,
            max_retries=0,
            http_client=client,
        )


@pytest.fixture(scope="module")
def wanted(offline: LLM) -> str:
    return offline.chat(
        [{"role": "user", "content": "hello"}], SamplingParams(max_output_tokens=20, temperature=0.0)
    ).text


def test_chat_and_its_usage(chat: Any, wanted: str) -> None:
    message = chat.invoke("hello")
    assert message.content == wanted
    assert message.usage_metadata["output_tokens"] == 20
    assert message.response_metadata["finish_reason"] == "length"


def test_stream_is_the_same_text(chat: Any, wanted: str) -> None:
    assert "".join(chunk.content for chunk in chat.stream("hello")) == wanted


def test_several_at_once_are_each_their_own(chat: Any, wanted: str) -> None:
    assert [message.content for message in chat.batch(["hello", "hello", "hello"])] == [wanted] * 3


def test_refusal_is_the_clients_own_error(chat: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat.invoke("x" * 500)
