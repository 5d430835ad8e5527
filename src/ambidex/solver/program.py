"""The program that is solved: a mixed-integer linear one, small whatever the number of layers.

Layers that cost the same and are pinned alike form a group. A placement's time is convex in each layer's fractions, so
that the layers of a group that have work for the CPU in the same phases (a class) have equal fractions in some best
placement: then sums over the class are all that matters, and those are the variables. For each group and class

    n                      layers, an integer
    attention, mlp         Σ of fractions on GPU, on CPU, streamed; their sum is n
    time of the phase      ≥ GPU's, ≥ CPU's + n · handover

and for all layers the shares of keys, the head's shares, and the step's time T, which is to be least:

    T ≥ path,   T ≥ link,   T ≥ dram      (cost/step.py)
    bytes on the GPU ≤ budget,   bytes in DRAM ≤ budget

What costs as a whole or not at all is no variable but part of the question (`Form`). Solver: HiGHS, through scipy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.units import GIB
from ambidex.cost.units import LayerUnits
from ambidex.cost.workload import KVShares
from ambidex.solver.problem import MARGIN_BYTES, PlacementProblem

MS: Final = 1e3
"""Times are in milliseconds and memory in GiB: numbers near 1, as solvers like them."""
TIE: Final = 1e-6
"""Weight of what breaks ties: of two placements as fast, the one with less work for CPU and link."""
RELATIVE_GAP: Final = 1e-6
SECONDS: Final = 10.0
"""A program takes milliseconds; a limit for the one that does not."""
LANES: Final = ("gpu", "cpu", "stream")

Row = dict[str, float]
"""Coefficients of a constraint by the names of variables."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that cost the same and are pinned alike."""

    units: LayerUnits
    attention: WeightSplit | None
    mlp: WeightSplit | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is allowed, and paid for, in a program.

    `cpu_attends`: the CPU attends over keys in DRAM, for a handover a layer. `weights_leave`: weights may lie in DRAM,
    for buffers on the GPU through which they travel.
    """

    cpu_attends: bool
    weights_leave: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A placement that the program found, and its own T in seconds; `slack_bytes` by capacity if it was relaxed."""

    placement: Placement
    kv: KVShares
    step_s: float
    slack_bytes: Mapping[str, float]


def find_groups(problem: PlacementProblem) -> tuple[Group, ...]:
    """Groups of layers, in the order of their first layers."""
    pins, found = problem.pins, dict[tuple[LayerUnits, WeightSplit | None, WeightSplit | None], list[int]]()
    for idx, units in enumerate(problem.units.layers):
        found.setdefault((units, pins.attention.get(idx), pins.mlp.get(idx)), []).append(idx)
    return tuple(Group(*key, tuple(layers)) for key, layers in found.items())


def solve_program(
    problem: PlacementProblem,
    groups: tuple[Group, ...],
    form: Form,
    *,
    is_relaxed: bool = False,
) -> Answer | None:
    """Solve a program; None if nothing fits.

    Args:
        is_relaxed: budgets may be exceeded; by how much is then what is made least.
    """
    return _Program(problem, groups, form, is_relaxed=is_relaxed).solve()


class _Program:
    """Variables by name, rows, and the objective."""

    def __init__(
        self,
        problem: PlacementProblem,
        groups: tuple[Group, ...],
        form: Form,
        *,
        is_relaxed: bool,
    ) -> None:
        self._problem, self._groups, self._units, self._form = problem, groups, problem.units, form
        self._names: dict[str, int] = {}
        self._bounds: list[tuple[float, float]] = []
        self._integer: list[int] = []
        self._rows: list[tuple[Row, float, float]] = []
        self._path: Row = {}
        self._idle: Row = {}
        self._read: Row = {}
        self._streamed: Row = {}
        self._gpu: Row = {}
        self._dram: Row = {}
        self._objective: Row = {}
        self._add("T")
        for idx, group in enumerate(groups):
            self._add_group(idx, group)
        self._add_keys()
        self._add_head()
        self._add_budgets(is_relaxed)
        self._add_times()

    def solve(self) -> Answer | None:
        """Call the solver."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # a second or more, and few engines solve anything

        cost = np.zeros(len(self._names))
        for name, value in self._objective.items():
            cost[self._names[name]] = value
        matrix, low, high = self._matrix()
        found = milp(
            cost,
            integrality=np.array(self._integer),
            bounds=Bounds(np.array([b[0] for b in self._bounds]), np.array([b[1] for b in self._bounds])),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": SECONDS},
        )
        if found.x is None:
            return None
        values = {name: float(found.x[place]) for name, place in self._names.items()}
        slack = {name: values.get(f"slack.{name}", 0.0) * GIB for name in ("gpu", "dram")}
        return Answer(self._placement(values), self._keys(values), values["T"] / MS, slack)

    def _add(self, name: str, low: float = 0.0, high: float = np.inf, *, is_integer: bool = False) -> str:
        self._names[name] = len(self._names)
        self._bounds.append((low, high))
        self._integer.append(int(is_integer))
        return name

    def _row(self, row: Row, low: float = -np.inf, high: float = np.inf) -> None:
        self._rows.append((row, low, high))

    def _matrix(self) -> tuple[Any, NDArray[np.float64], NDArray[np.float64]]:
        from scipy.sparse import csr_array

        entries = [
            (r, self._names[name], value) for r, (row, *_) in enumerate(self._rows) for name, value in row.items()
        ]
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._names)))
        low, high = (np.array([row[place] for row in self._rows]) for place in (1, 2))
        return matrix, low, high

    def _add_group(self, idx: int, group: Group) -> None:
        num_layers = len(group.layers)
        counts = []
        for name, split_cpu in _classes(idx):
            pinned = (group.attention, group.mlp)
            is_possible = (self._form.weights_leave or not any(split_cpu)) and all(
                split is None or (split.on_cpu > 0) == has_cpu for split, has_cpu in zip(pinned, split_cpu, strict=True)
            )
            num = self._add(f"{name}.n", 0, num_layers if is_possible else 0, is_integer=True)
            counts.append(num)
            u = group.units
            self._add_part(
                f"{name}.attention",
                num,
                u.attention_bytes,
                (u.gpu_attention_s, u.cpu_attention_s),
                self._units.attention_handover_s,
                has_cpu=split_cpu[0],
                pinned=group.attention,
            )
            self._add_part(
                f"{name}.mlp",
                num,
                u.mlp_bytes,
                (u.gpu_mlp_s, u.cpu_mlp_s),
                self._units.mlp_handover_s,
                has_cpu=split_cpu[1],
                pinned=group.mlp,
                cpu_read=u.cpu_mlp_read,
            )
        self._row(dict.fromkeys(counts, 1.0), num_layers, num_layers)  # fmt: skip

    def _add_part(
        self,
        name: str,
        num: str,
        num_bytes: int,
        seconds: tuple[float, float],
        handover_s: float,
        *,
        has_cpu: bool,
        pinned: WeightSplit | None,
        cpu_read: float = 1.0,
    ) -> None:
        """Attention or MLP of a class; `cpu_read`: the share of its bytes that the CPU reads."""
        allowed = {"gpu": True, "cpu": has_cpu, "stream": self._form.weights_leave}
        gpu, cpu, stream = (self._add(f"{name}.{lane}", 0, np.inf if allowed[lane] else 0.0) for lane in LANES)
        self._row({gpu: 1.0, cpu: 1.0, stream: 1.0, num: -1.0}, 0.0, 0.0)
        if pinned is not None:
            for variable, share in ((gpu, pinned.on_gpu), (cpu, pinned.on_cpu), (stream, pinned.streamed)):
                self._row({variable: 1.0, num: -share}, 0.0, 0.0)
        phase = self._add(f"{name}.time")
        self._row({phase: 1.0, gpu: -seconds[0] * MS, stream: -seconds[0] * MS}, low=0.0)
        self._path[phase] = 1.0
        if has_cpu:
            self._row({phase: 1.0, cpu: -seconds[1] * MS, num: -handover_s * MS}, low=0.0)
            self._idle[num] = self._idle.get(num, 0.0) + handover_s * MS
        else:
            self._idle[phase] = 1.0
        self._count_bytes(gpu, cpu, stream, num_bytes, cpu_read=cpu_read)

    def _count_bytes(self, gpu: str, cpu: str, stream: str, num_bytes: float, *, cpu_read: float = 1.0) -> None:
        self._gpu[gpu] = num_bytes / GIB
        self._dram |= {cpu: num_bytes / GIB, stream: num_bytes / GIB}
        self._read[cpu] = cpu_read * num_bytes
        self._streamed[stream] = num_bytes

    def _add_keys(self) -> None:
        units, pinned = self._units, self._problem.pins.kv
        gpu, cpu, stream = (
            self._add(f"kv.{lane}", 0.0, 1.0 if lane != "cpu" or self._form.cpu_attends else 0.0) for lane in LANES
        )
        self._row({gpu: 1.0, cpu: 1.0, stream: 1.0}, 1.0, 1.0)
        if pinned is None:
            self._row({gpu: 1.0}, low=units.least_kv_on_gpu)
            self._row({stream: 1.0}, high=self._problem.most_kv_streamed)
        else:
            for variable, share in ((gpu, pinned.on_gpu), (cpu, pinned.on_cpu), (stream, pinned.streamed)):
                self._row({variable: 1.0}, share, share)
        for idx, group in enumerate(self._groups):
            num, u = len(group.layers), group.units
            phase = self._add(f"kv.time.{idx}")
            self._row({phase: 1.0, gpu: -num * u.gpu_kv_s * MS, stream: -num * u.gpu_kv_s * MS}, low=0.0)
            self._path[phase] = 1.0
            if self._form.cpu_attends:
                handover = num * units.kv_handover_s * MS
                self._row({phase: 1.0, cpu: -num * u.cpu_kv_s * MS}, low=handover)
            else:
                self._idle[phase] = 1.0
        read = sum(layer.kv_bytes for layer in units.layers)
        self._gpu[gpu] = units.kv_gpu_bytes / GIB
        self._dram |= {cpu: units.kv_dram_bytes / GIB, stream: units.kv_dram_bytes / GIB}
        self._read[cpu], self._streamed[stream] = read, read

    def _add_head(self) -> None:
        """The last projection."""
        units, pinned = self._units, self._problem.pinned_head
        allowed = {"gpu": True, "cpu": self._form.weights_leave, "stream": self._form.weights_leave}
        gpu, cpu, stream = (self._add(f"head.{lane}", 0.0, float(allowed[lane])) for lane in LANES)
        has_cpu = self._add("head.has_cpu", 0, 1, is_integer=True)
        self._row({gpu: 1.0, cpu: 1.0, stream: 1.0}, 1.0, 1.0)
        self._row({cpu: 1.0, has_cpu: -1.0}, high=0.0)
        if pinned is not None:
            for variable, share in ((gpu, pinned.on_gpu), (cpu, pinned.on_cpu), (stream, pinned.streamed)):
                self._row({variable: 1.0}, share, share)
        phase, idle = self._add("head.time"), self._add("head.idle")
        gpu_ms, cpu_ms, handover = (s * MS for s in (units.gpu_head_s, units.cpu_head_s, units.head_handover_s))
        self._row({phase: 1.0, gpu: -gpu_ms, stream: -gpu_ms}, low=0.0)
        self._row({phase: 1.0, cpu: -cpu_ms, has_cpu: -handover}, low=0.0)
        self._row({idle: 1.0, has_cpu: -handover}, low=0.0)
        self._row({idle: 1.0, phase: -1.0, has_cpu: gpu_ms + cpu_ms + handover}, low=0.0)
        self._path[phase], self._idle[idle] = 1.0, 1.0
        self._count_bytes(gpu, cpu, stream, units.head_bytes)

    def _add_budgets(self, is_relaxed: bool) -> None:
        problem = self._problem
        ring = problem.ring_bytes if self._form.weights_leave else 0
        room = problem.gpu_bytes - problem.gpu_fixed_bytes - ring - MARGIN_BYTES
        slack: Row = {}
        if is_relaxed:
            slack = {self._add(f"slack.{name}"): -1.0 for name in ("gpu", "dram")}
        more = {name: value for name, value in slack.items() if "gpu" in name}
        self._row(self._gpu | more, high=room / GIB)
        if problem.least_kv_bytes:
            weights = {name: value for name, value in self._gpu.items() if name != "kv.gpu"}
            self._row(weights | more, high=(room - problem.least_kv_bytes) / GIB)
        if problem.dram_bytes is not None:
            more = {name: value for name, value in slack.items() if "dram" in name}
            self._row(self._dram | more, high=(problem.dram_bytes - MARGIN_BYTES) / GIB)
        # What either tier could hold is said to be missing in DRAM, the cheaper one.
        self._objective = {name: 2e6 if "gpu" in name else 1e6 for name in slack}

    def _add_times(self) -> None:
        units = self._units
        copies = {name: num * units.link_s_per_byte * MS for name, num in self._streamed.items()}
        reads = {name: num * units.beside_s_per_byte * MS for name, num in (self._read | self._streamed).items()}
        idle_share = 1 - units.copies_share
        fixed = units.fixed_s * MS
        idle = {name: value * idle_share for name, value in self._idle.items()}
        idle_fixed = fixed
        if self._form.cpu_attends:
            idle_fixed += len(units.layers) * units.kv_handover_s * MS
        self._row({"T": 1.0} | {name: -value for name, value in self._path.items()}, low=fixed)
        self._row({"T": 1.0} | {name: -value for name, value in copies.items()}, low=0.0)
        dram = {name: -idle.get(name, 0.0) - reads.get(name, 0.0) for name in idle | reads}
        self._row({"T": 1.0} | dram, low=idle_fixed * idle_share)
        ties = {name: TIE * value for name, value in reads.items()}
        for name, value in copies.items():
            ties[name] = ties.get(name, 0.0) + TIE * value
        self._objective = ties | self._objective | {"T": 1.0}

    def _placement(self, values: Mapping[str, float]) -> Placement:
        layers: dict[int, LayerPlacement] = {}
        for idx, group in enumerate(self._groups):
            made = []
            for name, _ in _classes(idx):
                num = round(values[f"{name}.n"])
                attention, mlp = (_split(values, f"{name}.{part}", num) for part in ("attention", "mlp"))
                made.append((num, LayerPlacement(attention=group.attention or attention, mlp=group.mlp or mlp)))
            layers |= zip(group.layers, _spread([item for item in made if item[0]]), strict=True)
        head = self._problem.pinned_head or _split(values, "head", 1)
        return Placement(layers=tuple(layers[idx] for idx in range(len(layers))), head=head)

    def _keys(self, values: Mapping[str, float]) -> KVShares:
        if self._problem.pins.kv is not None:
            return self._problem.pins.kv
        split = _split(values, "kv", 1)
        return KVShares(on_gpu=split.on_gpu, on_cpu=split.on_cpu, streamed=split.streamed)


def _classes(group_idx: int) -> Iterator[tuple[str, tuple[bool, bool]]]:
    """Names of a group's classes, and whether the CPU has a part of their attention's and MLP's weights."""
    for attention, mlp in product((False, True), repeat=2):
        yield f"g{group_idx}.{'c' if attention else '-'}{'c' if mlp else '-'}", (attention, mlp)


def _split(values: Mapping[str, float], name: str, num: int) -> WeightSplit:
    """Mean fractions of a class; what is less than a row of any matrix is none."""
    if num == 0:
        return WeightSplit()
    on_cpu, streamed = (min(1.0, max(0.0, values[f"{name}.{lane}"] / num)) for lane in LANES[1:])
    on_cpu, streamed = (0.0 if share < 1e-6 else 1.0 if share > 1 - 1e-6 else share for share in (on_cpu, streamed))
    on_gpu = max(0.0, 1.0 - on_cpu - streamed)
    return WeightSplit(on_gpu=0.0 if on_gpu < 1e-6 else on_gpu, on_cpu=on_cpu, streamed=streamed)


def _spread(made: list[tuple[int, LayerPlacement]]) -> list[LayerPlacement]:
    """The layers of all classes, each class at even distances, so that copies have an even stream of work."""
    places = sorted(
        ((place + 0.5) / num, order, layer) for order, (num, layer) in enumerate(made) for place in range(num)
    )  # fmt: skip
    return [layer for _, _, layer in places]
