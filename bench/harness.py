"""What every benchmark of this repository shares. It is the package's own, `ambidex.bench`, which users run too; here
only the peers' versions and the folder of records are added.
"""

from pathlib import Path
from typing import Final

from ambidex.bench import machine
from ambidex.bench.figures import Quantiles, measure_seconds, significant
from ambidex.bench.machine import PACKAGES as OWN_PACKAGES
from ambidex.bench.machine import describe_cpu, gpu_name, last_level_cache_bytes, package_version
from ambidex.bench.memory_rate import gpu_read_rate, probe_bytes, read_bandwidth
from ambidex.bench.others import QUIET_CORES, CpuSeconds, Others, wait_until_quiet, watch_others
from ambidex.bench.record import append_record

__all__ = [
    "PACKAGES", "QUIET_CORES", "REPO", "CpuSeconds", "Others", "Quantiles", "append_record", "describe_cpu",
    "environment", "gpu_name", "gpu_read_rate", "last_level_cache_bytes", "measure_seconds", "package_version",
    "probe_bytes", "read_bandwidth", "significant", "wait_until_quiet", "watch_others",
]  # fmt: skip

REPO: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = (*OWN_PACKAGES, "transformers", "accelerate", "optimum-quanto", "hqq", "llama-cpp-python", "gguf")


def environment() -> dict[str, object]:
    """The record's opening; the records themselves may differ from the commit."""
    return machine.environment(packages=PACKAGES, except_for=["bench/results"])
