import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_tree import write_machine

from ambidex.core.errors import MachineError
from ambidex.hw.numa import parse_list, read_nodes
from ambidex.hw.topology import Topology, read_topology

NODE = "sys/devices/system/node"


def make_node(node_id: int, cores: str, *, total_kib: int = 1024, free_kib: int = 512) -> dict[str, str]:
    """The files of a node."""
    lines = f"Node {node_id} MemTotal:  {total_kib} kB\nNode {node_id} MemFree:  {free_kib} kB\n"
    return {f"{NODE}/node{node_id}/cpulist": f"{cores}\n", f"{NODE}/node{node_id}/meminfo": lines}


def read(tmp_path: Path, *nodes: Mapping[str, str], files: Mapping[str, str] | None = None) -> Topology:
    written: dict[str, str] = {}
    for node in nodes:
        written |= node
    return read_topology(write_machine(tmp_path, {**written, **(files or {})}))


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), ("3\n", (3,)), ("0-2,8", (0, 1, 2, 8)), ("0,2-3", (0, 2, 3)), ("4,0-1", (0, 1, 4))]
)
def test_parse_list_gives_every_number_in_order(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-99999999", "1 2", "0x3", "0;3", "9" * 30])
def test_parse_list_of_something_else_names_where_it_stood(text: str) -> None:
    with pytest.raises(MachineError, match="cpulist says"):
        parse_list(text, "/sys/cpulist")


def test_cores_of_two_nodes_may_alternate(tmp_path: Path) -> None:
    topology = read(tmp_path, make_node(0, "0,2"), make_node(1, "1,3"))
    assert [node.cores for node in topology.numa_nodes] == [(0, 2), (1, 3)]
    assert topology.cxl_nodes == ()


def test_node_whose_cores_are_offline_is_no_memory_only_node(tmp_path: Path) -> None:
    topology = read(tmp_path, make_node(0, "0-3"), make_node(1, "4-5"))
    assert (topology.numa_nodes[1].cores, topology.numa_nodes[1].offline_cores) == ((), (4, 5))
    assert topology.cxl_nodes == ()


def test_local_node_is_the_one_with_most_allowed_cores(tmp_path: Path) -> None:
    files = {"proc/self/status": "Cpus_allowed_list:\t1,3,2\n"}
    topology = read(tmp_path, make_node(0, "0,2"), make_node(1, "1,3"), make_node(2, ""), files=files)
    assert topology.local_node is not None
    assert topology.local_node.node_id == 1


def test_no_node_is_local_when_none_names_an_allowed_core(tmp_path: Path) -> None:
    topology = read(tmp_path, make_node(0, ""), make_node(1, ""))
    assert topology.local_node is None
    assert [node.node_id for node in topology.cxl_nodes] == [0, 1]


def test_cxl_nodes_are_the_nearest_first(tmp_path: Path) -> None:
    nodes = make_node(0, "0-3"), make_node(2, "", free_kib=900), make_node(5, "", free_kib=100)
    files = {f"{NODE}/online": "0,2,5\n", f"{NODE}/node0/distance": "10 40 20\n"}
    topology = read(tmp_path, *nodes, files=files)
    assert [node.node_id for node in topology.cxl_nodes] == [5, 2]
    assert topology.numa_nodes[0].distances == {0: 10, 2: 40, 5: 20}


def test_of_cxl_nodes_that_are_as_near_the_one_with_most_free_memory_is_first(tmp_path: Path) -> None:
    topology = read(tmp_path, make_node(0, "0-3"), make_node(1, "", free_kib=100), make_node(2, "", free_kib=900))
    assert [node.node_id for node in topology.cxl_nodes] == [2, 1]


def test_node_outside_of_the_cpuset_is_no_cxl_node(tmp_path: Path) -> None:
    files = {"proc/self/status": "Cpus_allowed_list:\t0-3\nMems_allowed:\t5\nMems_allowed_list:\t0,2\n"}
    topology = read(tmp_path, make_node(0, "0-3"), make_node(1, ""), make_node(2, ""), files=files)
    assert [node.is_allowed for node in topology.numa_nodes] == [True, False, True]
    assert [node.node_id for node in topology.cxl_nodes] == [2]


def test_node_without_memory_is_no_cxl_node(tmp_path: Path) -> None:
    assert read(tmp_path, make_node(0, "0-3"), make_node(1, "", total_kib=0)).cxl_nodes == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({f"{NODE}/node1/cpulist": "all\n"}, "node1/cpulist says 'all'"),
        ({f"{NODE}/node1/meminfo": "Node 1 MemFree: 5 kB\n"}, "node1/meminfo: MemTotal is missing"),
        ({f"{NODE}/node1/meminfo": "Node 1 MemTotal: lots\n"}, "node1/meminfo: MemTotal is 'lots'"),
        ({f"{NODE}/node1/meminfo": "Node 1 MemTotal: -4 kB\n"}, "MemTotal is '-4 kB'"),
        ({f"{NODE}/node1/meminfo": "\0\0\0"}, "MemTotal is missing"),
        ({f"{NODE}/node0/distance": "10\n"}, "node0/distance says '10': expected 2 numbers"),
        ({f"{NODE}/node0/distance": "10 far\n"}, "node0/distance says '10 far'"),
        ({f"{NODE}/online": "0-\n"}, "node/online says '0-'"),
        ({"proc/self/status": "Cpus_allowed_list: 0-3\nMems_allowed_list: x\n"}, "Mems_allowed_list of .* says 'x'"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(MachineError, match=said):
        read(tmp_path, make_node(0, "0-3"), make_node(1, ""), files=files)


def test_node_that_went_while_it_was_read_is_named(tmp_path: Path) -> None:
    root = write_machine(tmp_path, {**make_node(0, "0-3"), **make_node(1, "")})
    (root / NODE / "node1/meminfo").unlink()
    with pytest.raises(MachineError, match=r"node1/meminfo cannot be read: .* went while it was looked at"):
        read_nodes(root, (0, 1, 2, 3))


LINES = st.text(alphabet="0123456789-, \n:NodeMmTtalFrkB\0x", max_size=60)


@given(st.lists(LINES, min_size=5, max_size=5))
def test_whatever_the_files_say_is_read_or_named(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = ("node0/cpulist", "node0/meminfo", "node0/distance", "online", "node1/meminfo")
        files = {f"{NODE}/{name}": text for name, text in zip(names, texts, strict=True)}
        said = ""
        try:
            assert len(read_topology(write_machine(Path(folder), files)).numa_nodes) == 2
        except MachineError as error:
            said = str(error)
        assert not said or folder in said or "allowed_list" in said
