"""The file of records, where it cannot be written."""

from pathlib import Path

import pytest

from ambidex.bench.record import append_record
from ambidex.core.errors import ConfigError


def test_append_record_to_a_full_disk_names_the_flag() -> None:
    """It came up as an OSError of Python, as if it were a mistake of the program."""
    with pytest.raises(ConfigError, match="--output /dev/full cannot be written: No space left on device"):
        append_record(Path("/dev/full"), {"a": 1})
