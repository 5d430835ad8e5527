import os
from pathlib import Path

import pytest
from machine_tree import V1_CPU_MOUNT, V2_MOUNT, write_machine

from ambidex.core.errors import ConfigError, MachineError
from ambidex.hw.numa import NumaNode
from ambidex.hw.topology import check_num_threads, read_topology


def test_read_topology_takes_model_and_flags_of_the_first_processor(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path))
    assert topology.cpu_model == "Test CPU 9000"
    assert topology.cpu_flags == {"fpu", "avx2", "fma"}


def test_read_topology_on_arm_takes_features(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, {"proc/cpuinfo": "Features\t: asimd bf16\nCPU part\t: 0xd4f\n"}))
    assert (topology.cpu_model, topology.cpu_flags) == ("0xd4f", {"asimd", "bf16"})


def test_allowed_cores_leave_out_cores_that_are_offline(tmp_path: Path) -> None:
    files = {"proc/self/status": "Cpus_allowed_list:\t2-63\n", "sys/devices/system/cpu/online": "0-3"}
    topology = read_topology(write_machine(tmp_path, files))
    assert (topology.online_cores, topology.allowed_cores, topology.num_usable_cores) == ((0, 1, 2, 3), (2, 3), 2)


def test_cpu_quota_of_v1_is_quota_over_period(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/jobs/a\n",
        "proc/self/mountinfo": V1_CPU_MOUNT,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/jobs/a/cpu.cfs_quota_us": "250000",
        "sys/fs/cgroup/cpu/jobs/a/cpu.cfs_period_us": "100000",
    }
    topology = read_topology(write_machine(tmp_path, files))
    assert (topology.cpu_quota, topology.num_usable_cores) == (2.5, 2)


def test_cpu_quota_of_v2_is_the_tightest_up_to_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs/a\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/jobs/cpu.max": "50000 100000",
        "sys/fs/cgroup/jobs/a/cpu.max": "max 100000",
    }
    topology = read_topology(write_machine(tmp_path, files))
    assert (topology.cpu_quota, topology.num_usable_cores) == (0.5, 1)


def test_threads_are_bounded_by_cores_and_a_begun_core_of_the_quota(tmp_path: Path) -> None:
    v2 = {"proc/self/cgroup": "0::/jobs\n", "proc/self/mountinfo": V2_MOUNT}
    for quota, wanted in (("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 4)):
        assert read_topology(write_machine(tmp_path, {**v2, "sys/fs/cgroup/jobs/cpu.max": quota})).max_threads == wanted


def test_more_threads_than_can_run_are_refused_with_the_limit() -> None:
    most = read_topology().max_threads
    check_num_threads(most)
    with pytest.raises(
        ConfigError, match=rf"`num_threads` is 4096: this process may use {most} .*ask for at most {most},"
    ):
        check_num_threads(4096)


def test_numa_node_without_cores_is_memory_only(tmp_path: Path) -> None:
    node = "sys/devices/system/node"
    files = {
        f"{node}/node0/cpulist": "0-3\n",
        f"{node}/node0/meminfo": "Node 0 MemTotal:  1024 kB\nNode 0 MemFree: 1 kB\n",
        f"{node}/node10/cpulist": "\n",
        f"{node}/node10/meminfo": "Node 10 MemTotal:  2048 kB\n",
        f"{node}/online": "0,10",
    }
    nodes = read_topology(write_machine(tmp_path, files)).numa_nodes
    assert nodes == (
        NumaNode(node_id=0, cores=(0, 1, 2, 3), memory_bytes=1 << 20, free_bytes=1 << 10),
        NumaNode(node_id=10, cores=(), memory_bytes=2 << 20),
    )
    assert [node.is_memory_only for node in nodes] == [False, True]


def test_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    nodes = read_topology(write_machine(tmp_path)).numa_nodes
    assert nodes == (NumaNode(node_id=0, cores=(0, 1, 2, 3), memory_bytes=8 << 30, free_bytes=1 << 30),)


def test_read_topology_without_proc_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="proc/self/status does not exist"):
        read_topology(tmp_path)


def test_read_topology_of_this_machine_agrees_with_the_affinity_mask() -> None:
    assert set(read_topology().allowed_cores) == os.sched_getaffinity(0)


def test_status_without_allowed_cores_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="status has no line Cpus_allowed_list"):
        read_topology(write_machine(tmp_path, {"proc/self/status": "Name:\tpython\n"}))


def test_online_cores_that_are_no_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cpu/online says '0-x'"):
        read_topology(write_machine(tmp_path, {"sys/devices/system/cpu/online": "0-x\n"}))
