import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.errors import NativeModuleError

MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1048576 kB\nMemAvailable: 6291456 kB\n"


@dataclass(frozen=True)
class Gpu:
    name: str = "Test GPU"
    total_bytes: int = 8 << 30


def raiser(error: Exception) -> Callable[[], Any]:
    """A function that raises."""

    def fail() -> Any:
        raise error

    return fail


def run_doctor(
    root: Path,
    *args: str,
    files: dict[str, str] | None = None,
    gpus: Callable[[], Sequence[Any]] = lambda: [],
    isa: Callable[[], str] = lambda: "avx2",
    version: Callable[[str], str | None] = lambda _: "1.0",
) -> Result:
    """Examine a machine that is described by files."""
    base = {
        "proc/cpuinfo": "model name : Test CPU\nflags : fpu avx2 fma f16c\n",
        "proc/meminfo": MEMINFO,
        "proc/self/status": "Cpus_allowed_list: 0-1\n",
        "sys/devices/system/cpu/online": "0-3\n",
    }
    for name, text in {**base, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    services = Services(describe_gpus=gpus, native_isa=isa, package_version=version, root=root)
    return CliRunner().invoke(AmbidexCommand(), ["doctor", *args], obj=services)


def rows_of(result: Result) -> list[str]:
    """The lines of a report, with single spaces."""
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def problems(result: Result) -> list[dict[str, Any]]:
    """The problems of a JSON report."""
    found: list[dict[str, Any]] = json.loads(result.stdout)["problems"]
    return found


def test_doctor_finds_no_problem_on_a_sound_machine(tmp_path: Path) -> None:
    result = run_doctor(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = rows_of(result)
    assert "processor Test CPU" in rows
    assert "flags +avx2 +fma +f16c -avx512f -avx512_bf16 -avx512_vnni -amx_tile -amx_bf16 -amx_int8" in rows
    assert "cores 2 allowed of 4 online" in rows
    assert "memory 6.0 GiB available of 8.0 GiB" in rows
    assert "native module uses avx2" in rows
    assert rows[-1] == "no problems found"


def test_doctor_json_has_all_findings(tmp_path: Path) -> None:
    report = json.loads(run_doctor(tmp_path, "--json", gpus=lambda: [Gpu()]).stdout)
    assert report["cpu"]["flags"]["avx2"]
    assert (report["cpu"]["allowed_cores"], report["cpu"]["usable_cores"]) == ([0, 1], 2)
    assert report["memory"]["usable_bytes"] == 6 << 30
    assert report["gpus"] == [{"name": "Test GPU", "total_bytes": 8 << 30}]
    assert (report["native_isa"], report["versions"]["torch"], report["problems"]) == ("avx2", "1.0", [])


def test_doctor_shows_each_gpu(tmp_path: Path) -> None:
    assert "GPU 0 Test GPU, total memory 8.0 GiB" in rows_of(run_doctor(tmp_path, gpus=lambda: [Gpu()]))


def test_doctor_without_the_native_module_says_how_to_build_it_and_exits_1(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, isa=raiser(NativeModuleError("ambidex._native is missing")))
    assert result.exit_code == 1
    assert "PROBLEM: the native module does not work: ambidex._native is missing" in result.stdout
    assert "pip install" in result.stdout


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'torch'"), OSError("libcudart.so"), RuntimeError("odd")]
)
def test_doctor_with_a_broken_torch_exits_1(tmp_path: Path, error: Exception) -> None:
    result = run_doctor(tmp_path, "--json", gpus=raiser(error))
    assert result.exit_code == 1
    assert [problem["what"] for problem in problems(result)] == [f"torch does not work: {error}"]


def test_doctor_names_missing_packages_and_exits_1(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, "--json", version=lambda name: None if name == "gguf" else "1.0")
    assert result.exit_code == 1
    assert problems(result) == [{"what": "not installed: gguf", "mend": "pip install gguf", "is_essential": True}]


def test_doctor_with_a_driver_but_no_gpu_in_torch_gives_advice(tmp_path: Path) -> None:
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24\nGCC version: 12\n"
    result = run_doctor(tmp_path, "--json", files={"proc/driver/nvidia/version": driver})
    assert result.exit_code == 0
    assert "the NVIDIA driver 575.57.08 is here, but torch 1.0 sees no GPU" in problems(result)[0]["what"]


def test_doctor_reads_the_version_of_the_open_driver(tmp_path: Path) -> None:
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n"
    result = run_doctor(tmp_path, "--json", files={"proc/driver/nvidia/version": driver}, gpus=lambda: [Gpu()])
    assert json.loads(result.stdout)["gpu_driver"] == "575.57.08"


def test_doctor_tells_of_a_cpu_quota_below_the_cores(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/cpu.max": "150000 100000",
    }
    result = run_doctor(tmp_path, files=files)
    assert "advice: the control group gives CPU time for 1.5 of 2 cores" in result.stdout
    assert "2 allowed of 4 online, quota 1.5 cores" in result.stdout


def test_doctor_tells_of_a_memory_limit_that_is_too_small(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/memory.max": str(1 << 30),
        "sys/fs/cgroup/memory.current": str(1 << 29),
    }
    result = run_doctor(tmp_path, files=files)
    assert "advice: 512.0 MiB of memory can be used, by the limit in" in result.stdout
    assert "1.0 GiB, 512.0 MiB free" in result.stdout


def test_doctor_tells_of_a_processor_without_avx2(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, "--json", files={"proc/cpuinfo": "model name : Old CPU\nflags : fpu sse2\n"})
    assert "has no AVX2" in problems(result)[0]["what"]


def test_doctor_shows_memory_only_numa_nodes(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node1"
    files = {f"{node}/cpulist": "\n", f"{node}/meminfo": "Node 1 MemTotal: 1048576 kB\n"}
    assert "NUMA node 1 1.0 GiB, memory only" in rows_of(run_doctor(tmp_path, files=files))


def test_doctor_shows_nodes_that_the_cpuset_leaves_out(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node1"
    files = {
        f"{node}/cpulist": "\n",
        f"{node}/meminfo": "Node 1 MemTotal: 1048576 kB\n",
        "proc/self/status": "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n",
    }
    rows = rows_of(run_doctor(tmp_path, files=files))
    assert "NUMA node 1 1.0 GiB, memory only, outside of this process's cpuset" in rows
