"""`LLM`: prompts in, answers out, on a tiny model with one token per character."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ambidex import LLM, EngineConfig, FinishReason, SamplingParams
from ambidex.core.errors import CallerError, ConfigError, ContextLengthError, RequestError
from ambidex.core.ids import Lane, Tier
from tiny_engine import ids_of, make_engine_folder
from tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("llm"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), block_size=4, max_context_len=96, num_threads=1) as model:
        yield model
        model.close()
        assert sum(model.stats().kv_bytes.values()) == 0


def make_params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_output_tokens": 12, "temperature": 0.0, "ignore_eos": True} | changes)  # type: ignore[arg-type]


def test_generate_with_text_equals_generate_with_its_ids(llm: LLM) -> None:
    assert llm.generate("hello", GREEDY)[0].token_ids == llm.generate([ids_of("hello")], GREEDY)[0].token_ids


def test_generate_with_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    assert len(llm.generate(ids_of("hello"), GREEDY)) == 1


def test_generate_many_keeps_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "a long prompt that takes more steps", "b"]
    each = [make_params(max_output_tokens=n) for n in (9, 2, 5)]
    outputs = llm.generate(prompts, each)
    assert [len(output.token_ids) for output in outputs] == [9, 2, 5]
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 3


def test_stream_deltas_join_to_the_whole_text(llm: LLM) -> None:
    outputs = list(llm.stream("hello", GREEDY))
    assert "".join(output.delta for output in outputs) == outputs[-1].text == llm.generate("hello", GREEDY)[0].text
    assert [output.is_finished for output in outputs] == [False] * 11 + [True]


def test_stream_gives_an_output_for_each_chunk_of_a_long_prompt(folder: Path) -> None:
    with LLM(str(folder), max_tokens_per_step=10) as llm:
        outputs = list(llm.stream("x" * 45, GREEDY))
    assert [len(output.token_ids) for output in outputs] == [0, 0, 0, 0, *range(1, 13)]


def test_two_streams_in_turn_give_each_its_own_answer(llm: LLM) -> None:
    wanted = [llm.generate(prompt, GREEDY)[0].text for prompt in ("first", "second")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("first", "second")]
    texts = ["", ""]
    for pair in zip(*streams, strict=True):
        texts = [text + output.delta for text, output in zip(texts, pair, strict=True)]
    assert texts == wanted


def test_stream_closed_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert sum(llm.stats().kv_bytes.values()) > 0
    stream.close()
    assert sum(llm.stats().kv_bytes.values()) == 0


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].text
    stop = whole[4:6]
    output = llm.generate("hello", make_params(stop=(stop,)))[0]
    assert output.text == whole[: whole.index(stop)]
    assert output.finish_reason is FinishReason.STOP


def test_stop_string_with_include_stop_is_shown(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].text
    stop = whole[4:6]
    output = llm.generate("hello", make_params(stop=(stop,), include_stop=True))[0]
    assert output.text == whole[: whole.index(stop) + 2]


def test_stop_string_before_the_minimum_length_does_not_end_the_answer(llm: LLM) -> None:
    """The minimum was kept for stop ids alone."""
    whole = llm.generate("hello", GREEDY)[0]
    stop = whole.text[2]
    output = llm.generate("hello", make_params(stop=(stop,), min_output_tokens=5))[0]
    later = whole.text.find(stop, 5)
    assert output.text == (whole.text if later < 0 else whole.text[:later])
    assert len(output.token_ids) >= 5


def test_stop_token_id_ends_the_answer_and_is_not_shown(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY)[0]
    stop_id = free.token_ids[3]
    output = llm.generate("hello", make_params(stop_token_ids=(stop_id,)))[0]
    first = free.token_ids.index(stop_id)
    assert output.token_ids == free.token_ids[: first + 1]
    assert output.text == free.text[:first]
    assert output.finish_reason is FinishReason.STOP


def test_answer_at_the_context_limit_ends_with_length(llm: LLM) -> None:
    output = llm.generate("x" * 90, make_params(max_output_tokens=None))[0]
    assert len(output.token_ids) == 6
    assert output.finish_reason is FinishReason.LENGTH


def test_logprobs_are_given_for_each_token(llm: LLM) -> None:
    output = llm.generate("hello", make_params(logprobs=3))[0]
    assert output.logprobs is not None
    assert [token.token_id for token in output.logprobs] == list(output.token_ids)
    assert all(token.top_logprobs[0] == (token.token_id, token.logprob) for token in output.logprobs)


def test_seed_repeats_a_random_answer_whoever_shares_the_step(llm: LLM) -> None:
    params = make_params(temperature=1.0, seed=11)
    alone = llm.generate("hello", params)[0].token_ids
    together = llm.generate(["other", "hello", "third"], [make_params(temperature=1.0), params, GREEDY])[1].token_ids
    assert together == alone


def test_chat_uses_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt_token_ids == (1, *ids_of("u:hi;a:"))


def test_chat_template_of_the_user_replaces_the_models(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    with LLM(str(folder), chat_template=str(file)) as llm:
        assert llm.chat([{"role": "user", "content": "hi"}], GREEDY).prompt_token_ids == tuple(ids_of("hi!"))


def test_chat_template_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`chat_template` .* cannot be read"):
        LLM(str(folder), chat_template=str(tmp_path / "none"))


def test_model_without_chat_template_generates_and_refuses_only_chat(folder: Path, tmp_path: Path) -> None:
    """A base model could not be loaded at all."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(tmp_path)) as llm:
        assert len(llm.generate("hi", GREEDY)[0].token_ids) == 12
        with pytest.raises(RequestError, match="chat template"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_eos_id_outside_the_vocabulary_is_left_out(folder: Path, tmp_path: Path) -> None:
    """It was masked like the others, beyond the end of the logits."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path)) as llm:
        output = llm.generate("hi", SamplingParams(max_output_tokens=3, min_output_tokens=2, temperature=0.0))[0]
    assert output.error is None


@pytest.mark.parametrize("prompts", [["ab", 7, "cd"], [1, "cd"], None, 5, [None], [True], [[1, True]]])
def test_prompts_of_a_wrong_kind_are_refused_not_dropped(llm: LLM, prompts: list[str]) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


def test_stream_after_close_ends_with_abort(folder: Path) -> None:
    llm = LLM(str(folder))
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    assert next(stream).finish_reason is FinishReason.ABORT
    assert sum(llm.stats().kv_bytes.values()) == 0


def test_generate_each_gives_every_prompt_its_answer_or_its_error(llm: LLM) -> None:
    items = [("a", GREEDY), ("", GREEDY), ("x" * 200, GREEDY), ("b", GREEDY)]
    outputs = dict(llm.generate_each(items))
    assert sorted(outputs) == [0, 1, 2, 3]
    assert outputs[1].error == "the prompt is empty: give at least one token"
    assert "200 tokens" in (outputs[2].error or "")
    assert outputs[3].token_ids == llm.generate("b", GREEDY)[0].token_ids


def test_generate_each_when_all_held_prompts_are_refused_goes_on(folder: Path) -> None:
    """A run ended early when the first prompts that it held were all refused."""
    with LLM(str(folder), max_running_requests=1, max_context_len=20) as llm:
        outputs = dict(llm.generate_each([("x" * 30, GREEDY)] * 5 + [("ok", GREEDY)]))
    assert sorted(outputs) == [0, 1, 2, 3, 4, 5]
    assert outputs[5].error is None


def test_generate_each_reads_its_input_only_as_fast_as_it_answers(folder: Path) -> None:
    taken = []

    def prompts() -> Iterator[tuple[str, SamplingParams]]:
        for number in range(50):
            taken.append(number)
            yield "hello", GREEDY

    with LLM(str(folder), max_running_requests=2) as llm:
        next(llm.generate_each(prompts()))
    assert len(taken) == 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5, VOCAB_SIZE], f"{VOCAB_SIZE} is no token id"),
        ([-1], "-1 is no token id"),
        ("half \ud83d of a pair", "surrogate"),
    ],
)
def test_bad_prompt_is_refused_with_its_reason(llm: LLM, prompt: str | list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY)


def test_prompt_over_the_limit_is_refused_with_both_counts(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="96 tokens does not fit into the context limit of 96"):
        llm.generate("x" * 96, GREEDY)


def test_wrong_number_of_parameters_is_refused(llm: LLM) -> None:
    with pytest.raises(CallerError, match="2 sampling parameters for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])


def test_bad_prompt_among_good_ones_starts_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["good", ""], GREEDY)
    assert llm.stats().num_steps == 0


def test_stats_say_where_the_cache_lay_and_what_lanes_read(folder: Path) -> None:
    with LLM(str(folder), block_size=4, kv_gpu_tokens=16, num_sink_tokens=4, recent_window=8) as llm:
        llm.generate("x" * 60, GREEDY)
        stats = llm.stats()
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 heads of 16, fp32
    assert stats.peak_kv_bytes[Tier.GPU] <= 16 * bytes_per_token
    assert stats.peak_kv_bytes[Tier.DRAM] >= (60 - 16) * bytes_per_token
    assert stats.num_moves > 0
    assert stats.lane_bytes[Lane.CPU] > 0
    visible = sum(range(60, 72)) - 60 + 60  # keys a decode step reads, and the prompt's own
    assert sum(stats.lane_bytes.values()) == pytest.approx(visible * bytes_per_token, rel=0.02)


def test_report_names_every_setting_and_the_ledger(llm: LLM) -> None:
    rows = llm.report.rows()
    assert {"model", "compute", "kv", "memory gpu", "memory dram", "settings"} == {row[0] for row in rows}
    assert ("settings", "block_size", "4", "") in rows


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with LLM(str(tmp_path), load_format="dummy") as llm:
        assert len(llm.generate("hello", GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory": 1000}, "`gpu_memory` .* is too small: weights take"),
        ({"max_context_len": 1000}, "made for at most 128 tokens"),
        ({"kv_gpu_tokens": 0, "dram_memory": 4096, "max_context_len": 100}, "a context of 100 tokens needs"),
        ({"dram_memory": 1 << 60}, "are free on this machine"),
    ],
)
def test_budget_that_cannot_work_is_refused_with_what_is_needed(
    folder: Path, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(EngineConfig(model=str(folder), **settings))  # type: ignore[arg-type]
