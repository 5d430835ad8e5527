"""`AsyncLLM`: several tasks share one engine."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from torch import Tensor

from ambidex import LLM, AsyncLLM, EngineConfig, FinishReason, SamplingParams
from ambidex.core.config import Graphs
from ambidex.core.errors import InternalError, RequestError
from ambidex.engine.compose import build_engine
from ambidex.engine.outputs import RequestOutput
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from tiny_engine import make_engine_folder

GREEDY = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
WAIT_S = 60.0
LONG = SamplingParams(max_output_tokens=100, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("async"))


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params)][-1]


def test_async_with_closes_the_engine(folder: Path) -> None:
    async def main() -> AsyncLLM:
        async with AsyncLLM(str(folder)) as llm:
            await last(llm, "hello")
        return llm

    with pytest.raises(InternalError, match="closed"):
        asyncio.run(last(asyncio.run(main()), "hello"))


def test_tasks_side_by_side_get_what_they_get_alone(folder: Path) -> None:
    prompts = ["hello", "a longer prompt than that", "x"]
    with LLM(str(folder)) as offline:
        wanted = [output.text for output in offline.generate(list(prompts), GREEDY)]

    async def main() -> list[str]:
        llm = AsyncLLM(str(folder))
        outputs = await asyncio.gather(*(last(llm, prompt) for prompt in prompts))
        await llm.close()
        return [output.text for output in outputs]

    assert asyncio.run(main()) == wanted


def test_bad_prompt_raises_in_its_own_task_only(folder: Path) -> None:
    async def main() -> tuple[object, object]:
        llm = AsyncLLM(str(folder))
        results = await asyncio.gather(last(llm, ""), last(llm, "hello"), return_exceptions=True)
        await llm.close()
        return results[0], results[1]

    bad, good = asyncio.run(main())
    assert isinstance(bad, RequestError)
    assert isinstance(good, RequestOutput)


def test_leaving_the_stream_frees_the_request(folder: Path) -> None:
    async def main() -> int:
        llm = AsyncLLM(str(folder))
        stream = llm.generate("hello", LONG)
        await anext(stream)
        await stream.aclose()
        await last(llm, "x")
        engine = llm._engine
        await llm.close()
        return sum(engine.stats.kv_bytes.values())

    assert asyncio.run(main()) == 0


def test_cancelled_task_frees_the_request(folder: Path) -> None:
    async def main() -> int:
        llm = AsyncLLM(str(folder))
        task = asyncio.create_task(last(llm, "hello", LONG))
        await last(llm, "x")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await last(llm, "y")
        engine = llm._engine
        await llm.close()
        return sum(engine.stats.kv_bytes.values())

    assert asyncio.run(main()) == 0


def test_abort_ends_the_stream_with_reason_abort(folder: Path) -> None:
    may_go_on, num_steps = threading.Event(), 0

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        nonlocal num_steps
        num_steps += 1
        assert num_steps == 1 or may_go_on.wait(WAIT_S)
        return call_model(model, batch, attention)

    async def main() -> RequestOutput:
        llm = AsyncLLM(build_engine(EngineConfig(model=str(folder), graphs=Graphs.OFF), forward=forward))
        output = None
        async for output in llm.generate("hello", LONG):
            await llm.abort(output.request_id)
            may_go_on.set()
        await llm.close()
        assert output is not None
        return output

    output = asyncio.run(main())
    assert output.finish_reason is FinishReason.ABORT
    assert num_steps <= 2, "the one that was being computed was the last"


def test_chat_gives_the_answer_of_the_offline_chat(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with LLM(str(folder)) as offline:
        wanted = offline.chat(messages, GREEDY).text

    async def main() -> str:
        llm = AsyncLLM(str(folder))
        text = ""
        async for output in llm.chat(messages, GREEDY):
            text += output.delta
        await llm.close()
        return text

    assert asyncio.run(main()) == wanted


@pytest.mark.parametrize("prompt", [None, 5, ["text"], object()])
def test_wrong_argument_is_its_callers_error_and_others_go_on(folder: Path, prompt: str) -> None:
    """It ended the engine's thread, and with it every other request."""

    async def main() -> list[object]:
        llm = AsyncLLM(str(folder))
        tasks = [last(llm, "hello"), last(llm, prompt), last(llm, "world")]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await llm.close()
        return list(results)

    good, bad, other = asyncio.run(main())
    assert isinstance(bad, RequestError)
    assert isinstance(good, RequestOutput)
    assert isinstance(other, RequestOutput)


def test_task_cancelled_before_its_first_output_frees_the_request(folder: Path) -> None:
    """The request id had not reached the caller, so nobody ended the request."""

    async def main() -> int:
        llm = AsyncLLM(str(folder))
        task = asyncio.create_task(last(llm, "hello", LONG))
        await asyncio.sleep(0)
        time.sleep(0.1)  # the loop is busy while the engine queues the request
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await last(llm, "x")
        num_live = len(llm._engine._live)
        await llm.close()
        return num_live

    assert asyncio.run(main()) == 0


def test_call_after_close_raises_instead_of_waiting(folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(folder))
        await llm.close()
        await asyncio.wait_for(last(llm, "hello"), timeout=10)

    with pytest.raises(InternalError, match="closed"):
        asyncio.run(main())
