"""Copies of hot blocks on the accelerator under the bounded policy, in whole engines: answers, bounds, budgets."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.attention import contexts
from ambidex.attention.contexts import Context
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.errors import BoundError, ConfigError, CopyError
from ambidex.core.hot import HotFigures
from ambidex.core.ids import Lane, Tier
from ambidex.core.policy import PolicyName
from ambidex.core.step import BlockRef, StepPlan, StepResult
from ambidex.engine.compose import build_engine, choices, lanes
from ambidex.engine.compose.control import replay
from ambidex.engine.engine import Engine
from ambidex.kv.manager import KVManager
from ambidex.runner.decode import DecodeForm
from ambidex.runner.runner import ModelRunner
from ambidex.sched import hot
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool
from fault_runs import run, tokens
from tiny_engine import make_engine_folder

TEXT: Final = (
    "what the lighthouse keeper said to the fishing boats that night was not heard by any of them for the wind had "
    "risen and the sea was white as far as the eye could follow it along the shore of the bay and out beyond the reef"
)
PROMPTS: Final = (TEXT[:150], TEXT[40:] + TEXT[:10], TEXT[::-1][:120])
GREEDY: Final = SamplingParams(max_output_tokens=40, temperature=0.0, ignore_eos=True)
SPLIT: Final[dict[str, Any]] = {"kv_gpu_tokens": 320, "num_sink_tokens": 0, "recent_window": 16}
INT8: Final = {"kv_dtype": KVDTypeChoice.INT8}
CUDA: Final[dict[str, Any]] = {"device": DeviceKind.CUDA, "dtype": DTypeChoice.BF16}
FORMS: Final = [
    pytest.param(DecodeForm.FIXED, {}, id="cpu lane"),
    pytest.param(DecodeForm.FIXED, {"stream_percent": 50}, id="both lanes"),
    pytest.param(DecodeForm.FIXED, INT8, id="int8"),
    pytest.param(None, {**CUDA, "stream_percent": 0}, id="cuda, cpu lane", marks=pytest.mark.gpu),
    pytest.param(None, {**CUDA, "stream_percent": 50}, id="cuda, both lanes", marks=pytest.mark.gpu),
    pytest.param(None, {**CUDA, **INT8}, id="cuda, int8", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def hasty_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are short: looks come often, and copies never count as slow, which by chance those of a tiny model may
    be; steps of fixed form have a scan lane without a GPU, too."""
    monkeypatch.setattr(hot, "LEAST_INTERVAL", 3)
    monkeypatch.setattr(hot, "SLOWER", 1e9)
    monkeypatch.setattr(choices, "why_no_stream", lambda *_: None)
    monkeypatch.setattr(lanes, "find_no_stream", lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model for longer contexts than the others'."""
    path = make_engine_folder(tmp_path_factory.mktemp("hot"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return path


def make_engine(
    folder: Path, form: DecodeForm | None, mass: float = 0.3, copy: Any = copy_block, **settings: Any
) -> Engine:
    common: dict[str, Any] = {
        "device": DeviceKind.CPU, "max_context_len": 256, "num_threads": 1, "block_size": 16, "dtype": DTypeChoice.FP32,
        "dram_memory": 2**23, "max_running_requests": 4, "policy": PolicyName.BOUNDED, "max_dropped_mass": mass,
        "stream_percent": 0, **SPLIT,
    }  # fmt: skip
    beside: dict[str, Any] = {"min_streamed": 10**9} if form is DecodeForm.FIXED and "kv_dtype" not in settings else {}
    if "kv_dtype" in settings:
        settings.setdefault("stream_percent", None)
    config = EngineConfig(model=str(folder), **common | settings)
    return build_engine(config, decode_form=form, min_scanned=1, copy=copy, **beside)


def step_to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def figures_of(engine: Engine) -> HotFigures:
    figures = engine.stats.hot
    assert figures is not None
    return figures


class Watch:
    """What steps read: the tokens of blocks on the accelerator that are copies."""

    def __init__(self, engine: Engine) -> None:
        self.num_copied_reads = 0
        self.num_looks = 0
        kv, steps = engine.core.scheduler._kv, engine.core.executor
        execute = steps.execute
        self.kv: KVManager = kv

        def watched(plan: StepPlan) -> StepResult:
            self._check(plan)
            result = execute(plan)
            assert not (plan.is_look and result.kept_keys is not None and not plan.requests)
            return result

        steps.execute = watched  # type: ignore[method-assign]

    def _check(self, plan: StepPlan) -> None:
        homes, copies = set(self.kv.copies), set(self.kv.copies.values())
        for request in plan.requests:
            read = set(request.blocks)
            assert len(read) == len(request.blocks)
            assert not read & (copies if plan.is_look else homes), "a block is read at its home and from its copy"
            self.num_copied_reads += len(read & copies)
        self.num_looks += plan.is_look
        self.kv.check()


@pytest.mark.parametrize(("form", "settings"), FORMS)
def test_answers_are_those_without_copies_when_hardly_anything_may_be_left_out(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    plain, engine = (make_engine(folder, form, 1e-4, **settings, hot_tokens=num) for num in (0, None))
    watch = Watch(engine)
    found, wanted = (tokens(run(each, PROMPTS, GREEDY)) for each in (engine, plain))
    assert watch.num_copied_reads > 50
    if settings.get("device") is DeviceKind.CUDA or "kv_dtype" in settings:  # numbers are rounded otherwise
        assert [answer[:1] for answer in found] == [answer[:1] for answer in wanted]
    else:
        assert found == wanted
    figures = figures_of(engine)
    assert figures.num_promoted == figures.num_dropped > 3
    assert plain.stats.hot is None
    selection = engine.stats.selection
    assert selection is not None
    assert selection.max_dropped_mass <= 1e-4


@pytest.mark.parametrize("mass", [0.3, 0.01])
@pytest.mark.parametrize("hot_tokens", [None, 32])
@pytest.mark.parametrize(("form", "settings"), FORMS)
def test_bounds_are_kept_where_blocks_have_copies(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any], hot_tokens: int | None, mass: float
) -> None:
    engine = make_engine(folder, form, mass, **settings, hot_tokens=hot_tokens, verify=True)
    watch = Watch(engine)
    run(engine, PROMPTS * 2, GREEDY)
    assert watch.num_copied_reads > 20
    selection, figures = engine.stats.selection, figures_of(engine)
    assert selection is not None
    assert selection.num_verified > 20
    assert selection.max_dropped_mass <= mass * 1.0001
    assert 0 < figures.num_hits < figures.num_kept
    assert figures.num_looks > 5


def test_a_block_that_were_scanned_beside_its_copy_would_break_the_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that count twice show: the check computes each of them once."""
    engine = make_engine(folder, DecodeForm.FIXED, 0.01, verify=True)
    kv, follow, num_twice = engine.core.scheduler._kv, contexts._follow, 0

    def follow_twice(context: Context, blocks: tuple[BlockRef, ...]) -> None:
        nonlocal num_twice
        follow(context, blocks)
        homes = {copy: block for block, copy in kv.copies.items()}
        for place, block in enumerate(blocks):
            if block in homes:
                context.tiers[Tier.DRAM].append(homes[block].block_id, place)
                num_twice += 1

    monkeypatch.setattr(contexts, "_follow", follow_twice)
    with pytest.raises(BoundError, match="differs from the exact one"):
        run(engine, PROMPTS, GREEDY)
    assert num_twice > 0


def test_the_budget_is_never_passed_and_copies_give_way(folder: Path) -> None:
    engine = make_engine(folder, DecodeForm.FIXED, hot_tokens=48, kv_gpu_tokens=240)
    kv, most = engine.core.scheduler._kv, 0
    for prompt in PROMPTS * 3:
        engine.add(prompt, GREEDY)
    while engine.has_work:
        engine.step()
        most = max(most, len(kv.copies))
        assert len(kv.copies) <= 3
        kv.check()
    assert most == 3
    assert kv.usage()[Tier.GPU].free == kv.usage()[Tier.GPU].total


@pytest.mark.parametrize(("form", "settings"), FORMS[:2])
def test_requests_that_end_or_yield_while_blocks_are_copied_leave_nothing(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    engine = make_engine(folder, form, **settings, dram_memory=None, hot_tokens=None)
    wanted = tokens(run(make_engine(folder, form, 1e-4, hot_tokens=0, **settings), PROMPTS[:1], GREEDY))
    kv = engine.core.scheduler._kv
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    aborted, preempted = False, False
    while engine.has_work:
        engine.step()
        kv.check()
        if kv.copies and not aborted:
            engine.abort(ids[1])
            aborted = True
            kv.check()
        elif kv.copies and not preempted and engine.core.scheduler.num_running == 2:
            scheduler = engine.core.scheduler
            scheduler._preempt(scheduler._queues.last_running)
            preempted = True
            kv.check()
    assert aborted
    assert preempted
    assert not kv.copies
    assert kv.num_free_blocks == kv.num_blocks
    careful = make_engine(folder, form, 1e-4, **settings)
    run(careful, PROMPTS, GREEDY)
    assert tokens(run(careful, PROMPTS[:1], GREEDY)) == wanted


def test_copies_that_fail_are_none(folder: Path) -> None:
    def broken(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        if target.tier is Tier.GPU:
            raise CopyError("the link is down, says the test")
        copy_block(source, source_id, target, target_id)

    wanted = tokens(run(make_engine(folder, DecodeForm.FIXED, 1e-4, hot_tokens=0), PROMPTS, GREEDY))
    engine = make_engine(folder, DecodeForm.FIXED, 1e-4, copy=broken)
    assert tokens(run(engine, PROMPTS, GREEDY)) == wanted
    assert engine.stats.num_failed_moves > 0
    assert figures_of(engine).num_promoted == 0


def test_a_step_that_breaks_off_waits_for_its_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, DecodeForm.FIXED)
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner)
    compute, kv = ModelRunner._compute, engine.core.scheduler._kv

    def interrupted(self: ModelRunner, plan: StepPlan, clock: Any) -> Any:
        if any(move.keeps_source for move in plan.moves):
            raise KeyboardInterrupt
        return compute(self, plan, clock)

    monkeypatch.setattr(ModelRunner, "_compute", interrupted)
    engine.add(PROMPTS[0], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        step_to_the_end(engine)
    assert runner._promotions is not None
    assert not runner._promotions._begun
    kv.check()
    assert kv.num_moves == 0
    monkeypatch.setattr(ModelRunner, "_compute", compute)
    run(engine, PROMPTS, GREEDY)
    assert kv.num_free_blocks == kv.num_blocks


@pytest.mark.parametrize(("form", "settings"), FORMS)
def test_looks_count_the_keys_that_the_step_kept(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[StepResult] = []
    execute = ModelRunner.execute

    def kept(self: ModelRunner, plan: StepPlan) -> StepResult:
        results.append(execute(self, plan))
        return results[-1]

    monkeypatch.setattr(ModelRunner, "execute", kept)
    engine = make_engine(folder, form, 0.1, **settings)
    engine.add(PROMPTS[0], GREEDY)
    while engine.has_work:
        engine.step()
    spec = engine.figures.spec
    looks = [result for result in results if result.kept_keys is not None]
    assert len(looks) > 4
    most = 16 * spec.num_layers * spec.num_kv_heads
    for result in looks:
        assert result.kept_keys is not None
        assert result.selection is not None
        kept, attended = sum(result.kept_keys.values()), result.selection.num_attended // spec.group_size
        near = result.lane_bytes[Lane.GPU] // engine.figures.kv[Tier.GPU].bytes_per_token_layer * spec.num_kv_heads
        assert kept == attended - near, "of all keys attended, those that do not lie on the accelerator"
        assert kept > 0
        assert all(block.tier is Tier.DRAM for block in result.kept_keys)
        assert all(0 < num <= most for num in result.kept_keys.values())


def test_decisions_are_written_and_come_out_the_same(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "control.jsonl"
    engine = make_engine(folder, DecodeForm.FIXED, control_trace=str(path))
    run(engine, PROMPTS, GREEDY)
    lines = path.read_bytes().splitlines()
    found = replay(lines)
    assert found.num_hot == figures_of(engine).num_looks > 4
    assert found.num_different == 0
    changed = json.loads(next(line for line in reversed(lines) if json.loads(line)["after"].get("wanted")))
    changed["look"]["room"] = 0
    assert replay([json.dumps(changed).encode()]).num_different == 1


def test_the_report_and_the_ledger_say_what_there_is(folder: Path) -> None:
    report = make_engine(folder, DecodeForm.FIXED).report
    assert report.value("kv", "hot_blocks") == "copies of up to 20 blocks"
    assert report.why("kv", "hot_blocks") == "what is free beside sink and recent tokens"
    report = make_engine(folder, DecodeForm.FIXED, hot_tokens=40).report
    assert (report.value("kv", "hot_blocks"), report.why("kv", "hot_blocks")) == (
        "copies of up to 3 blocks",
        "asked for",
    )
    report = make_engine(folder, None).report
    assert report.value("kv", "hot_blocks") == "no copies"
    assert report.why("kv", "hot_blocks") == "without a GPU both tiers lie in host memory"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hot_tokens": 320}, "`hot_tokens` 320 are 20 blocks of 16: .* holds 20, .* need 3: ask for at most 272"),
        ({"hot_tokens": 16, "block_size": 8}, "`hot_tokens` 16 cannot be had, leave it out: .*reference form"),
        ({"hot_tokens": 16, "kv_gpu_tokens": 256, "dram_memory": 0}, "cannot be had, leave it out: no K and V lie in"),
    ],
)
def test_what_cannot_be_had_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, DecodeForm.FIXED, **settings)
    with pytest.raises(ConfigError, match="`hot_tokens` 16 cannot be had, leave it out: without a GPU"):
        make_engine(folder, None, hot_tokens=16)
    with pytest.raises(ConfigError, match="`hot_tokens` is an option of bounded"):
        make_engine(folder, None, policy=PolicyName.EXACT, max_dropped_mass=None, hot_tokens=16)
