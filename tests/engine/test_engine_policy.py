"""An engine with a policy: what it reports, what it refuses, and that it answers as the definition does."""

from dataclasses import replace
from pathlib import Path

import pytest

from ambidex import LLM, SamplingParams
from ambidex.attention.select.policy import Need
from ambidex.attention.select.registry import make_policy
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, RequestError, UnsupportedModelError
from ambidex.core.ids import Tier
from ambidex.core.policy import PolicyName, resolve_policy
from ambidex.core.selection import StageTimes
from ambidex.engine.compose import build_engine
from ambidex.runner.runner import ModelRunner
from tiny_engine import make_engine_folder
from unit_specs import make_spec

GREEDY = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["what the lighthouse keeper said to the fishing boats that night", "hello", "one two three four five six"]
OPTIONS: dict[PolicyName, dict[str, object]] = {
    PolicyName.BOUNDED: {"max_dropped_mass": 0.1, "bounded_scores": "exact"},
    PolicyName.STREAMING_LLM: {"policy_tokens": 12},
    PolicyName.H2O: {},
    PolicyName.KEYFORMER: {},
    PolicyName.QINFER_WINDOWS: {},
    PolicyName.QUEST: {"policy_tokens": 12, "page_tokens": 4, "exact_layers": 0},
    PolicyName.INFINIGEN: {"exact_layers": 1},
    PolicyName.HYBRIDGEN: {"exact_layers": 1, "near_tokens": 3},
}
"""Such that a tiny model of two layers leaves out keys of short prompts."""
POLICIES = list(OPTIONS)
LOOKING_AHEAD = [policy for policy in POLICIES if policy.looks_ahead]
SETTINGS = {"max_context_len": 96, "num_threads": 1, "dtype": "fp32", "block_size": 16}
SPLIT = {"kv_gpu_tokens": 256, "num_sink_tokens": 4, "recent_window": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("policy"))


def test_exact_costs_nothing_and_says_so(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.report.value("compute", "policy") == "exact"
        assert llm.stats().selection is None
        runner = llm._engine.core.executor
        assert type(runner._attention).__name__ == "TieredAttention"  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_the_same_alone_and_together_whole_and_split_over_tiers(folder: Path, policy: PolicyName) -> None:
    with LLM(str(folder), policy=policy, **OPTIONS[policy], **SETTINGS) as llm:
        assert set(OPTIONS) == {name for name in PolicyName if not name.attends_all}
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    with LLM(str(folder), policy=policy, max_tokens_per_step=23, **OPTIONS[policy], **SETTINGS, **SPLIT) as llm:
        together = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        figures = llm.stats().selection
        assert figures is not None
        assert figures.attended_share < 0.95, "the policy leaves out nothing: the test would prove nothing"
        llm.close()
        assert not llm._engine.core.executor._selective._states.by_id, "a request that ended is remembered"  # type: ignore[attr-defined]
    assert together == alone


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", [SPLIT, SPLIT | {"kv_gpu_tokens": 16}], ids=["split", "dram"])
def test_answers_on_a_gpu_are_those_on_a_cpu(folder: Path, policy: PolicyName, split: dict[str, int]) -> None:
    """With both tiers, and with a GPU tier of one block, so that a request's rows may all be in DRAM."""
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), policy=policy, device=device, **OPTIONS[policy], **SETTINGS, **split) as llm:
            answers.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if not policy.looks_ahead])
def test_answers_when_blocks_run_out_are_those_of_an_undisturbed_run(folder: Path, policy: PolicyName) -> None:
    """A preempted answer is computed again, as decode queries."""
    prompts = [f"hello {letter}" for letter in "abcdefgh"]
    params = SamplingParams(max_output_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), policy=policy, **OPTIONS[policy], **SETTINGS) as llm:
        wanted = [output.token_ids for output in llm.generate(prompts, params)]
    block_bytes = 2 * 2 * 16 * 4 * 2 * 4  # K and V, heads, head_dim, fp32, layers, tokens
    tight = SETTINGS | {"block_size": 4, "kv_gpu_tokens": 16, "dram_memory": 22 * block_bytes}
    with LLM(str(folder), policy=policy, **OPTIONS[policy], **tight) as llm:
        got = [output.token_ids for output in llm.generate(prompts, params)]
        assert llm.stats().num_preemptions > 0, "nothing was preempted: the test would prove nothing"
    assert got == wanted


SCORE_BYTES = 2 * 6 * 4
"""Of a token: early scores of 6 heads, in fp32, twice."""


@pytest.mark.parametrize(
    ("options", "score_bytes"),
    [
        ({"policy": "hybridgen", "min_selected_tokens": 4}, SCORE_BYTES),
        ({"policy": "hybridgen", "min_selected_tokens": 4, "hybridgen_mode": "pre"}, 0),
        ({"policy": "infinigen"}, 0),
    ],
    ids=["post", "pre", "infinigen"],
)
def test_requests_wait_where_there_is_no_room_for_the_rows_of_all_their_tokens(
    folder: Path, options: dict[str, object], score_bytes: int
) -> None:
    """Policies that look ahead keep rows of K and V beside the blocks: what is started has room for them to its end."""
    prompts = [f"hello {letter}" for letter in "abcdefgh"]
    params = SamplingParams(max_output_tokens=16, temperature=0.0, ignore_eos=True)
    options = options | OPTIONS[PolicyName(str(options["policy"]))]
    with LLM(str(folder), **options, **SETTINGS) as llm:
        wanted = [output.token_ids for output in llm.generate(prompts, params)]
    tight = SETTINGS | {"block_size": 4, "kv_gpu_tokens": 16, "max_context_len": 40, "dram_memory": 48_000}
    engine = build_engine(EngineConfig(model=str(folder), **options, **tight))  # type: ignore[arg-type]
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner)
    assert runner.selective is not None
    assert runner.selective.early is not None
    store = runner.selective.early.requests.row_store
    held = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.DRAM)}
    outputs, num_rows, num_running = {}, 0, 0
    ids = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        num_rows = max(num_rows, store.num_rows)
        num_running = max(num_running, engine.core.scheduler.num_running)
    engine.close()
    assert [outputs[request_id].token_ids for request_id in ids] == wanted
    assert 1 < num_running < len(prompts), "all ran together, or none did: the test would prove nothing"
    assert engine.stats.num_preemptions == 0
    row_bytes = 2 * 2 * 16 * 4 * 2 + score_bytes  # K and V, heads, head_dim, fp32, layers
    assert 0 < num_rows <= store.max_rows == held["rows"] // row_bytes
    assert sum(held.values()) <= 48_000


def test_a_budget_without_room_for_rows_is_refused_at_start(folder: Path) -> None:
    tight = SETTINGS | {"kv_gpu_tokens": 96, "dram_memory": 32_000}
    LLM(str(folder), **tight).close()
    for policy in LOOKING_AHEAD:
        with pytest.raises(ConfigError, match="keeps K and V of each token as rows in host memory, too"):
            LLM(str(folder), policy=policy, **OPTIONS[policy], **tight)


def test_policies_that_look_ahead_need_to() -> None:
    for policy in POLICIES:
        needs = make_policy(resolve_policy(EngineConfig(model="m", policy=policy)), make_spec()).needs
        assert (Need.LOOK_AHEAD in needs) is policy.looks_ahead


@pytest.mark.parametrize("policy", LOOKING_AHEAD)
def test_without_a_dram_budget_a_policy_keeps_no_rows_and_answers_the_same(folder: Path, policy: PolicyName) -> None:
    options = {"policy": policy, **OPTIONS[policy], **SETTINGS}
    with LLM(str(folder), **options) as llm:
        wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with LLM(str(folder), dram_memory=0, **options) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert llm.report.value("compute", "policy_rows") == "none"


def test_bounded_that_drops_nothing_answers_as_exact(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with LLM(str(folder), policy="bounded", max_dropped_mass=0.0, **SETTINGS, **SPLIT) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
        figures = llm.stats().selection
    assert figures is not None
    assert figures.attended_share == 1.0
    assert figures.max_dropped_mass == figures.max_error_bound == 0.0


def test_bounded_reports_what_it_dropped(folder: Path) -> None:
    with LLM(str(folder), policy="bounded", max_dropped_mass=0.2, bounded_scores="exact", **SETTINGS) as llm:
        llm.generate(PROMPTS, GREEDY)
        figures = llm.stats().selection
        report = llm.report.value("compute", "policy")
        why = llm.report.why("compute", "decode")
    assert report == "bounded, max_dropped_mass 0.2, bounded_scores exact"
    assert why == "policy bounded chooses keys step by step"
    assert figures is not None
    assert figures.num_choices == figures.num_bounded == 3 * 11 * 2 * 6  # requests, decode steps, layers, heads
    assert 0 < figures.mean_dropped_mass <= figures.max_dropped_mass <= 0.2
    assert figures.max_error_bound > 0
    assert 0.2 < figures.attended_share < 1


def test_verify_computes_a_sample_again_and_finds_its_bounds_kept(folder: Path) -> None:
    for scores in ("exact", "int8"):
        settings = {**SETTINGS, "max_dropped_mass": 0.3, "bounded_scores": scores, "verify": True}
        with LLM(str(folder), policy="bounded", **settings) as llm:
            llm.generate(PROMPTS * 4, GREEDY)
            figures = llm.stats().selection
        assert figures is not None
        assert figures.num_verified == figures.num_choices // 6 // 61 * 6
        assert 0 < figures.max_error <= figures.max_error_bound


def test_policies_that_choose_read_less(folder: Path) -> None:
    def read(**settings: object) -> int:
        with LLM(str(folder), **SETTINGS, **settings) as llm:
            llm.generate("x" * 60, GREEDY)
            return sum(llm.stats().lane_bytes.values())

    exact = read()
    bounded = {"policy": "bounded", "bounded_scores": "exact"}
    assert read(max_dropped_mass=0.0, **bounded) == exact, "K once, V once"
    assert read(policy="streaming_llm", policy_tokens=12) < read(max_dropped_mass=0.3, **bounded) < exact


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_with_windows_is_refused_at_start(policy: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "mistral")
    with pytest.raises(
        UnsupportedModelError, match=rf"`policy` {policy} cannot serve this mistral model: 2 of its layers"
    ):
        LLM(str(folder), policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_with_biases_for_positions_is_refused_at_start(policy: PolicyName) -> None:
    spec = replace(make_spec(), alibi_slopes=(0.5,) * 6)
    with pytest.raises(UnsupportedModelError, match=rf"`policy` {policy} cannot serve .*alibi"):
        make_policy(resolve_policy(EngineConfig(model="m", policy=policy)), spec)


def test_option_of_another_policy_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`max_dropped_mass` is an option of bounded, not of `policy` h2o"):
        LLM(str(folder), policy="h2o", max_dropped_mass=0.1)


@pytest.mark.parametrize("feedback", ["mode", "full"])
def test_hybridgen_is_steered_by_the_times_of_its_steps(
    folder: Path, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"exact_layers": 1, "near_tokens": 3, "hybridgen_feedback": feedback, "min_selected_tokens": 4}
    with LLM(str(folder), policy="hybridgen", **options, **SETTINGS) as llm:
        steered = llm._engine.core.scheduler._feedback
        assert steered is not None
        before, update, cpu_s = steered.setting, steered.update, []

        def watch(times: StageTimes | None) -> None:
            update(times)
            if times is not None:
                cpu_s.append(times.cpu_s)

        monkeypatch.setattr(steered, "update", watch)
        llm.generate(PROMPTS, GREEDY)
        after = steered.setting
    assert after.times is not None, "no step was timed"
    assert max(cpu_s) > 0, "in mode pre, in which it may end, the CPU scores nothing"
    assert after.num_selected >= before.num_selected == 4
    assert (after.num_selected == 4) or feedback == "full", "mode changes the mode alone"


def num_threads_that_score() -> int:
    return sum(task.read_text().strip() == "ambidex-scores" for task in Path("/proc/self/task").glob("*/comm"))


def test_the_thread_that_scores_ahead_ends_with_the_engine(folder: Path) -> None:
    before = num_threads_that_score()
    llm = LLM(str(folder), policy="hybridgen", **OPTIONS[PolicyName.HYBRIDGEN], **SETTINGS)
    llm.generate(PROMPTS, GREEDY)
    assert num_threads_that_score() == before + 1, "nothing scored ahead: the test would prove nothing"
    llm.close()
    assert num_threads_that_score() == before
    llm.close()  # does nothing
    with pytest.raises(RequestError, match="the engine was closed"):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("options", [{"policy": "infinigen"}, {"policy": "hybridgen", "hybridgen_mode": "pre"}])
def test_a_policy_that_only_predicts_has_no_thread_that_scores(folder: Path, options: dict[str, str]) -> None:
    before = num_threads_that_score()
    with LLM(str(folder), exact_layers=1, **options, **SETTINGS) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert num_threads_that_score() == before
        assert "the CPU scores" not in llm.report.why("compute", "policy_rows")


def test_without_feedback_nothing_is_timed(folder: Path) -> None:
    with LLM(str(folder), policy="hybridgen", **OPTIONS[PolicyName.HYBRIDGEN], **SETTINGS) as llm:
        assert llm._engine.core.scheduler._feedback is None
