"""The import contract of pyproject.toml: kept by the source tree, and able to see each kind of violation."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLANTED = {
    "control plane imports torch": ("sched/planted.py", "import torch", "ambidex.sched.planted -> torch"),
    "plain value imports torch": ("core/ids.py", "import torch", "ambidex.core.ids -> torch"),
    "control plane sees data plane": (
        "kv/planted.py",
        "import ambidex.storage",
        "ambidex.kv.planted -> ambidex.storage",
    ),
    "data plane sees control plane": ("runner/planted.py", "import ambidex.kv", "ambidex.runner.planted -> ambidex.kv"),
    "import upwards": ("text/planted.py", "import ambidex.engine", "ambidex.text.planted -> ambidex.engine"),
    "siblings": ("hw/planted.py", "import ambidex.formats", "ambidex.hw.planted -> ambidex.formats"),
    "core out of order": ("core/units.py", "import ambidex.core.step", "ambidex.core.units -> ambidex.core.step"),
    "kernel reads a value": (
        "kernels/planted.py",
        "import ambidex.core.ids",
        "ambidex.kernels.planted -> ambidex.core.ids",
    ),
    "engine sees data plane": (
        "engine/planted.py",
        "import ambidex.models",
        "ambidex.engine.planted -> ambidex.models",
    ),
    "oracle in the product": ("models/planted.py", "import transformers", "ambidex.models.planted -> transformers"),
    "undeclared folder": ("planted_layer/__init__.py", "", "ambidex.planted_layer"),
    "undeclared core module": ("core/planted_value.py", "", "ambidex.core.planted_value"),
}  # kind -> (file, line added to it, what must be reported)


def check_contract(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over `root`; `-S` keeps the editable install out, so that `root` is what it reads."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache', '--no-logo'])"
    path = os.pathsep.join([str(root / "src"), sysconfig.get_path("purelib")])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-S", "-c", command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What import-linter says of a copy of the source tree with every violation planted in it."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for file, line, _ in PLANTED.values():
        path = root / "src" / "ambidex" / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as source:
            source.write(f"\n{line}\n")
    result = check_contract(root)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def test_import_contract_source_tree_keeps_it() -> None:
    result = check_contract(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize("kind", PLANTED)
def test_import_contract_planted_violation_is_reported(report: str, kind: str) -> None:
    assert PLANTED[kind][2] in report
