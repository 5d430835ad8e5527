"""The harness: quantiles, who else was busy, what the record says, and that record files only grow."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import harness
from ambidex.bench import machine
from harness import CpuSeconds, Others, Quantiles


def test_quantiles_of_eleven_samples_are_exact():
    samples = [float(n) for n in (10, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5)]
    assert Quantiles.of(samples) == Quantiles(median=5.0, q20=2.0, q80=8.0, num=11)


def test_quantiles_between_two_samples_interpolate():
    found = Quantiles.of([1.0, 2.0])
    assert (found.q20, found.median, found.q80) == pytest.approx((1.2, 1.5, 1.8))


def test_quantiles_of_one_sample_are_the_sample():
    assert Quantiles.of([3.5]) == Quantiles(median=3.5, q20=3.5, q80=3.5, num=1)


def test_quantiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        Quantiles.of([])


def test_quantiles_record_keeps_four_digits():
    record = Quantiles(median=0.0123456, q20=0.01, q80=1234.56, num=3).record()
    assert record == {"median": 0.01235, "q20": 0.01, "q80": 1235.0, "num": 3}


def test_measure_seconds_counts_runs_without_warmups():
    calls = []
    seconds = harness.measure_seconds(lambda: calls.append(1), num_warmups=2, num_runs=3)
    assert len(calls) == 5
    assert len(seconds) == 3
    assert all(s >= 0 for s in seconds)


def test_others_are_the_machines_seconds_without_ours():
    others = Others()
    others.set_from(CpuSeconds(wall=1, busy=10, stolen=0, own=5), CpuSeconds(wall=3, busy=14, stolen=0.5, own=8))
    assert others == Others(busy_cores=0.5, stolen_cores=0.25)


def test_others_when_ticks_run_behind_are_never_negative():
    others = Others()
    others.set_from(CpuSeconds(wall=1, busy=10, stolen=0, own=5), CpuSeconds(wall=2, busy=10.99, stolen=0, own=6))
    assert others.busy_cores == 0


def test_watch_others_when_a_foreign_process_works_counts_it():
    command = [
        sys.executable,
        "-c",
        "import time\nwhile time.process_time() < 0.6: pass\nprint('done', flush=True); input()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as foreign:
        assert foreign.stdout is not None
        with harness.watch_others() as others:  # it is not waited for within the section, so it counts as another
            foreign.stdout.readline()
        foreign.communicate(b"\n")
    assert others.busy_cores > 0.1


def test_wait_until_quiet_with_no_time_left_returns_after_one_sample():
    start = time.monotonic()
    assert harness.wait_until_quiet(longest_s=0, sample_s=0.05) >= 0
    assert time.monotonic() - start < 10


def test_read_bandwidth_of_a_small_buffer_is_positive():
    found = harness.read_bandwidth(num_threads=1, num_bytes=1 << 20, num_runs=3)
    assert 0 < found.q20 <= found.median <= found.q80


def test_probe_bytes_exceed_the_last_level_cache():
    assert harness.probe_bytes() > 2 * harness.last_level_cache_bytes()


def test_describe_cpu_names_what_the_machine_lacks():
    assert harness.describe_cpu("AMD EPYC", 2, ["avx2", "fma"]) == "AMD EPYC, 2 cores: AVX2, no AVX-512, no AMX"


def test_describe_cpu_with_all_units_lacks_none():
    assert harness.describe_cpu("Xeon", 1, ["avx2", "avx512f", "amx_tile"]) == "Xeon, 1 core: AVX2, AVX-512, AMX"


def test_environment_is_json_and_names_machine_and_versions():
    record = json.loads(json.dumps(harness.environment()))
    assert {"commit", "is_dirty", "date", "machine", "versions"} == set(record)
    assert record["machine"]["cores"] >= 1
    assert set(record["versions"]) == {"python", *harness.PACKAGES}


def test_environment_of_an_installed_package_names_no_commit_of_the_tree_around_it(tmp_path):
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    installed = tmp_path / "site" / "machine.py"
    installed.parent.mkdir()
    installed.write_text(Path(machine.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("installed_machine", installed)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.environment()["commit"], module.environment()["is_dirty"]) == (None, None)


def test_package_version_of_an_absent_package_is_none():
    assert harness.package_version("no-such-package-of-ours") is None


def test_append_record_to_a_file_adds_a_line_after_the_old_ones(tmp_path):
    path = tmp_path / "results" / "x.jsonl"
    harness.append_record(path, {"a": 1})
    harness.append_record(path, {"b": "μs"})
    assert path.read_text(encoding="utf-8") == '{"a": 1}\n{"b": "μs"}\n'


def test_append_record_with_infinity_changes_nothing(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(ValueError, match="JSON compliant"):
        harness.append_record(path, {"seconds": float("inf")})
    assert not path.exists()
