"""The benchmarks are scripts, not a package: their folder goes on the path, as Python does when it runs one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
