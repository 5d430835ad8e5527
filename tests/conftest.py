"""What all tests share: hypothesis' profiles, PyTorch's share of the cores, real English text."""

import os
import signal
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import settings

MIN_REAL_TEXT_CHARS = 200_000
"""40,000 tokens at up to 5 characters each (SmolLM2 on this text: 4.1)."""


def pytest_configure(config: pytest.Config) -> None:
    """Set what must stand before the first test module is imported."""
    if not config.getoption("hypothesis_profile", None):
        # No deadline: the cores are shared. A failure prints the line that reproduces it; CI draws the same examples.
        settings.register_profile("ambidex", deadline=None, print_blob=True, derandomize="CI" in os.environ)
        settings.load_profile("ambidex")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background hands that on to what it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers > 1:  # torch reads this when it is imported: the workers share the cores instead of fighting
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    import torch  # only now: see above

    if not torch.cuda.is_available():  # Triton reads this when a kernel is defined: without a GPU it interprets them
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers, whichever ran before it: with several workers that changes."""
    import torch  # as above

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_text() -> str:
    """English text of at least 40,000 tokens: the file AMBIDEX_TEST_TEXT, else Python's own documentation."""
    path = os.environ.get("AMBIDEX_TEST_TEXT")
    text = Path(path).read_text(encoding="utf-8") if path else "\n\n".join(topics[name] for name in sorted(topics))
    if len(text) < MIN_REAL_TEXT_CHARS:
        raise pytest.UsageError(f"AMBIDEX_TEST_TEXT={path}: needs {MIN_REAL_TEXT_CHARS} characters, has {len(text)}")
    return text
