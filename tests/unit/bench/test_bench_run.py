"""Whole runs of the user-facing benchmarks on a tiny model: what the records say, and what is refused beforehand."""

import json
from pathlib import Path

import pytest

from ambidex.bench import links, run
from ambidex.bench.decode import measure_decode
from ambidex.bench.run import run_decode, run_links, run_prefill
from ambidex.bench.workload import NUM_WARMUP_STEPS, Point
from ambidex.core.config import EngineConfig, LoadFormat
from ambidex.core.errors import ConfigError, MachineError
from ambidex.hw.topology import read_topology
from tiny_engine import make_engine_folder


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory delivers is not the question here."""
    monkeypatch.setattr(links, "probe_bytes", lambda: 1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("model"))


def make_config(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), num_threads=1, device="cpu", **{"block_size": 4, **settings})  # type: ignore[arg-type]


def decode(config: EngineConfig, *points: Point, steps: int = 3, text: Path | None = None):
    return run_decode(config, points, steps=steps, text=text, progress=None)


@pytest.mark.skipif(read_topology().max_threads < 2, reason="needs two processors")
def test_links_record_has_each_number_of_threads():
    finished = run_links(num_threads=2)
    record = json.loads(json.dumps(finished.record, allow_nan=False))
    assert list(record["links"]["dram_read"]) == ["1", "2"]
    assert all(rate["median"] > 0 for rate in record["links"]["dram_read"].values())
    assert finished.rows[0][0] == "DRAM read, 1 thread"


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts_double_and_end_at_all(most: int, counts: list[int]):
    assert list(links.thread_counts(most)) == counts


def test_links_without_memory_to_measure_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "probe_bytes", lambda: 100)
    with pytest.raises(MachineError, match="only 100 B of memory"):
        run_links(num_threads=1)


def test_decode_record_holds_floor_bytes_and_quantiles_of_each_point(folder: Path):
    config = make_config(folder, kv_gpu_tokens=32, num_sink_tokens=4, recent_window=8)
    points = (Point(context=20, batch=1), Point(context=40, batch=2))
    record = json.loads(json.dumps(decode(config, *points).record, allow_nan=False))
    assert [(point["context"], point["batch"]) for point in record["points"]] == [(20, 1), (40, 2)]
    for point in record["points"]:
        assert point["step_s"]["num"] == 3
        assert point["lane_bytes"]["cpu"] > 0  # old keys lie in DRAM
        assert point["kv_bytes"]["dram"] > 0
        assert point["floor_s"] == pytest.approx(
            (point["weight_bytes"] + sum(point["lane_bytes"].values()))
            / max(rates["dram_read"]["1"]["median"] for rates in record["rates"]),
            rel=1e-3,
        )
        assert point["share_of_floor"] == pytest.approx(point["floor_s"] / point["step_s"]["median"], rel=1e-2)
    assert record["memory"]["host_predicted_bytes"] > 0
    assert record["settings"]["engine"]["kv_gpu_tokens"] == 32


def test_decode_reads_the_keys_of_the_context(folder: Path):
    """All on one tier: bytes of a step are those of the tokens that the measured steps see, in the middle of them."""
    record = decode(make_config(folder), Point(context=30, batch=1), steps=5).record
    finished = record["points"][0]
    tokens_read = 30 + 1 + NUM_WARMUP_STEPS + 2  # the middle one of the five measured steps
    per_token = finished["kv_bytes"]["gpu"] // (4 * -(-(tokens_read + 2) // 4))
    assert finished["lane_bytes"]["gpu"] == pytest.approx(per_token * tokens_read, abs=2 * per_token)


def test_decode_with_dummy_weights_and_a_given_text(folder: Path, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("abcdefghij" * 4)
    config = make_config(folder, load_format=LoadFormat.DUMMY)
    record = decode(config, Point(context=24, batch=2), text=text).record
    assert record["settings"]["tokens"] == "text"
    with pytest.raises(ConfigError, match=r"--text has 40 tokens: the longest context has 41"):
        decode(config, Point(context=41, batch=1), text=text)
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        decode(config, Point(context=4, batch=1), text=tmp_path / "none")


def test_decode_beyond_a_limit_is_refused_and_the_limit_named(folder: Path):
    config = make_config(folder, max_context_len=64, max_running_requests=2)
    with pytest.raises(ConfigError, match=r"--contexts 60 at batch 1 needs 70 tokens .* the limit is 64 \(asked for\)"):
        decode(config, Point(context=20, batch=1), Point(context=60, batch=1))
    with pytest.raises(ConfigError, match="--batch 3 is more than a step computes"):
        decode(config, Point(context=20, batch=3))
    small = make_config(folder, max_context_len=64, kv_gpu_tokens=64, dram_memory=0)
    with pytest.raises(
        ConfigError, match=r"--batch 4 at --contexts 20 needs .* KV blocks of 4 tokens: the tiers hold 16"
    ):
        decode(small, Point(context=20, batch=4))


def test_prefill_record_counts_steps_and_operations(folder: Path):
    config = make_config(folder, max_tokens_per_step=16)
    record = run_prefill(config, (8, 40), rounds=2, text=None, progress=None).record
    assert [(point["prompt"], point["num_steps"]) for point in record["points"]] == [(8, 1), (40, 3)]
    short, long = record["points"]
    assert long["flops"] > 4 * short["flops"]
    assert short["seconds"]["num"] == 2
    assert short["tokens_per_s"] == pytest.approx(8 / short["seconds"]["median"], rel=1e-2)


def test_prefill_beyond_the_limit_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"--prompts 63 .* the limit is 64"):
        run_prefill(make_config(folder, max_context_len=64), (63,), rounds=1, text=None, progress=None)


def test_figures_are_kept_when_the_rates_cannot_be_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    sizes = iter([1 << 20, 1 << 20, 100, 100])  # the probe's, of the first measurement and of the second
    monkeypatch.setattr(links, "probe_bytes", lambda: next(sizes))
    record = decode(make_config(folder), Point(context=8, batch=1)).record
    assert len(record["rates"]) == 1
    assert record["points"][0]["floor_s"] > 0
    assert "rates were not measured again" in caplog.text


def test_points_measured_before_an_interrupt_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt_at_batch_of_two(engine, config, point, *args, **settings):
        if point.batch == 2:
            raise KeyboardInterrupt
        return measure_decode(engine, config, point, *args, **settings)

    monkeypatch.setattr(run, "measure_decode", interrupt_at_batch_of_two)
    finished = decode(make_config(folder), Point(context=8, batch=1), Point(context=8, batch=2))
    assert (len(finished.rows), finished.num_left_out, finished.record["num_left_out"]) == (1, 1, 1)
    with pytest.raises(KeyboardInterrupt):
        decode(make_config(folder), Point(context=8, batch=2), Point(context=8, batch=1))
