from pathlib import Path

import pytest
from machine_tree import GIB, V1_MOUNT, V2_MOUNT, write_machine

from ambidex.core.errors import MachineError
from ambidex.hw.memory import read_memory


def test_read_memory_without_a_group_takes_the_kernels_estimate(tmp_path: Path) -> None:
    memory = read_memory(write_machine(tmp_path))
    assert (memory.total_bytes, memory.available_bytes, memory.limit) == (8 * GIB, 6 * GIB, None)
    assert memory.usable_bytes == 6 * GIB


def test_limit_of_v1_counts_used_bytes_without_inactive_file_pages(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs/a"
    files = {
        "proc/self/cgroup": "4:memory:/jobs/a\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT,
        f"{group}/memory.limit_in_bytes": str(4 * GIB),
        f"{group}/memory.usage_in_bytes": str(3 * GIB),
        f"{group}/memory.stat": f"cache 1\ninactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    memory = read_memory(write_machine(tmp_path, files))
    assert memory.limit is not None
    assert (memory.limit.limit_bytes, memory.limit.used_bytes) == (4 * GIB, 2 * GIB)
    assert memory.limit.path == tmp_path / group / "memory.limit_in_bytes"
    assert memory.usable_bytes == 2 * GIB


@pytest.mark.parametrize("text", ["9223372036854771712", "max"])
def test_group_without_a_limit_is_no_limit(tmp_path: Path, text: str) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/\n",
        "proc/self/mountinfo": f"{V1_MOUNT}\n{V2_MOUNT}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory.max": text,
    }
    assert read_memory(write_machine(tmp_path, files)).limit is None


def test_limit_of_v2_is_the_one_with_fewest_bytes_free_up_to_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs/a\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/jobs/memory.max": str(5 * GIB),
        "sys/fs/cgroup/jobs/memory.current": str(4 * GIB),
        "sys/fs/cgroup/jobs/a/memory.max": str(3 * GIB),
        "sys/fs/cgroup/jobs/a/memory.current": str(GIB),
    }
    memory = read_memory(write_machine(tmp_path, files))
    assert memory.limit is not None
    assert (memory.limit.limit_bytes, memory.usable_bytes) == (5 * GIB, GIB)


def test_limit_above_what_the_machine_has_changes_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": str(100 * GIB),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert read_memory(write_machine(tmp_path, files)).usable_bytes == 6 * GIB


def test_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    assert read_memory(write_machine(tmp_path, files)).usable_bytes == 0


def test_container_that_sees_its_group_as_the_mount_finds_its_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": V1_MOUNT.replace(" / /sys", " /docker/abc /sys"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
    }
    assert read_memory(write_machine(tmp_path, files)).usable_bytes == 2 * GIB


def test_group_that_is_not_visible_is_read_at_the_mount_point(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../outside\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": str(2 * GIB),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert read_memory(write_machine(tmp_path, files)).usable_bytes == 2 * GIB


def test_read_memory_without_proc_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="proc/meminfo does not exist"):
        read_memory(tmp_path)


def test_read_memory_of_this_machine_is_plausible() -> None:
    memory = read_memory()
    assert 0 < memory.usable_bytes <= memory.available_bytes <= memory.total_bytes
