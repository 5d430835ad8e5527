"""How much faster than exact attention is the bounded op, and at what share of the memory's read rate does it run?

    python bench/ops/cpu_bounded.py [--gib 4] [--threads 8,15] [--out bench/results/cpu_bounded.jsonl]
    python bench/ops/cpu_bounded.py --quick --tunings "code_pieces_ahead=0;keep_far_keys=96+keep_near_keys=8"

One call is one layer's decode step, its arrays checked beforehand, as native programs call the ops. Keys are random
with scores of one nat's spread, but for planted ones, a share of the keys for each query head, that hold 99.5 % of its
softmax together: so many are kept at a dropped mass of 0.01 (the union over the heads of a group is larger, and is what
is read). As many layers as `--gib` GiB hold are read in turn, as a model's are. A round is a plain read of 1 GiB, a
pass of exact attention and a pass of the bounded op, so that what else the machine does meets all three; ratios are of
a round, and their median is given.

With `--tunings`, each is measured beside the defaults in the same rounds: fields of the op's `BoundedTuning`, by `+`.

Printed are the bytes that the op must read, their share of the plain read rate (best round of each), how many times
faster than exact attention it is, and where its threads' time goes: the scan, with the rate at which it reads alone,
the thresholds, the kept keys, waiting, and what is in none of them. The last line is a JSON record.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ambidex.core.kv_spec import SCALE_WORD_BYTES
from ambidex.hw.topology import read_topology
from ambidex.kernels import api
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.bounded import NUM_FIGURES, PHASES, BoundedPool, ScannedLayer, make_arrays
from ambidex.storage.huge_pages import advise_huge_pages
from harness import REPO, Quantiles, append_record, environment, measure_seconds, significant, watch_others

BLOCK_SIZE: Final = 64
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
NUM_ROUNDS: Final = 7
MAX_MASS: Final = 0.01
PLANTED_MASS: Final = 0.995
LINE: Final = 64
READ_BYTES: Final = 2**30
"""Of the plain reads that predictions go by; in huge pages, as pools are."""
NUMBERS: Final = {"bf16": torch.bfloat16, "int8": torch.int8}
DEFAULTS: Final = "defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: number type of the pool, query heads a KV head, keys, planted share, threads."""

    number: str
    group: int
    context: int
    planted: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A pool in tile order of one layer, and what the bounded op reads beside it."""

    k: Tensor
    k_scales: Tensor | None
    scanned: ScannedLayer

    def clone(self) -> "Layer":
        """The same content in other memory."""
        k = clone(self.k)
        scales = None if self.k_scales is None else clone(self.k_scales)
        old = self.scanned
        is_int8 = scales is not None
        return Layer(
            k=k,
            k_scales=scales,
            scanned=replace(
                old,
                scanned=k if is_int8 else clone(old.scanned),
                scales=scales if scales is not None else clone(old.scales),
                rows=None if old.rows is None else clone(old.rows),
                v=clone(old.v),
            ),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        parts = [self.k, self.scanned.v, *((self.scanned.scanned, self.scanned.rows) if self.k_scales is None else ())]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    threads = [n for n in options.threads if n <= read_topology().num_usable_cores]
    memory = clone(torch.ones(READ_BYTES, dtype=torch.uint8))
    with watch_others() as others:
        points = []
        for n in threads:
            pool = native.ThreadPool(n)
            points += [
                point
                for case in all_cases(n, options.contexts, quick=options.quick)
                for point in measure(case, pool, memory, int(options.gib * 2**30), [DEFAULTS, *options.tunings])
            ]
    record = environment() | {
        "bench": "cpu_bounded",
        "isa": native.isa(),
        "gib": options.gib,
        "block_size": BLOCK_SIZE,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_dropped_mass": MAX_MASS,
        "points": points,
        "others": asdict(others),
    }
    print(append_record(options.out, record))
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda s: [int(n) for n in s.split(",")]  # noqa: E731
    parser.add_argument("--gib", type=float, default=4.0, help="memory that is read through, GiB")
    parser.add_argument("--threads", type=numbers, default=[8, 15])
    parser.add_argument("--contexts", type=numbers, default=[8192, 32768, 131072], help="keys of the request")
    parser.add_argument("--quick", action="store_true", help="group 4, 1 %% planted only")
    parser.add_argument(
        "--tunings", type=lambda s: s.split(";"), default=[], help="field=number+field=number;… beside the defaults"
    )
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "cpu_bounded.jsonl")
    return parser.parse_args()


def all_cases(threads: int, contexts: Sequence[int], *, quick: bool) -> list[Case]:
    """Every context in both formats at group 4; other groups and planted shares at one context."""
    cases = [
        Case(number=number, group=4, context=context, planted=0.01, threads=threads)
        for number in NUMBERS
        for context in contexts
    ]
    if not quick:
        middle = contexts[len(contexts) // 2]
        cases += [
            Case(number=number, group=group, context=middle, planted=planted, threads=threads)
            for number in NUMBERS
            for group, planted in ((1, 0.03), (7, 0.01), (4, 0.03), (4, 0.1))
        ]
    return cases


def measure(
    case: Case, threads: native.ThreadPool, memory: Tensor, memory_bytes: int, tunings: Sequence[str]
) -> list[dict[str, object]]:
    """Time rounds over all layers and print the lines of a case, for each tuning."""
    attention, bounded = native.AttentionPool(threads), BoundedPool(threads)
    layer, q = make_layer(case, attention, bounded)
    layers = [layer, *(layer.clone() for _ in range(memory_bytes // layer.num_bytes - 1))]
    num_blocks = case.context // BLOCK_SIZE
    batch = native.KeyBatch(
        torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, num_blocks]), torch.tensor([0]), torch.tensor([case.context]), torch.tensor([0, 1]),
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    out, lse, figures = torch.empty_like(q), torch.empty(q.shape[:2]), torch.empty(*q.shape[:2], NUM_FIGURES)
    scale = HEAD_DIM**-0.5
    arrays = [
        make_arrays(q, each.scanned, scale=scale, max_mass=MAX_MASS, near=None, out=out, lse=lse, figures=figures)
        for each in layers
    ]
    exact_arrays = [exact_call(q, each, batch, scale, out, lse) for each in layers]
    phases: dict[str, dict[str, float]] = {tuning: dict.fromkeys(PHASES, 0.0) for tuning in tunings}

    def run_bounded(tuning: str) -> None:
        set_tuning(bounded, tuning)
        for each in arrays:
            bounded.native.attend(each, batch.native)
        for name, seconds in bounded.take_phase_seconds().items():
            phases[tuning][name] += seconds

    def run_exact() -> None:
        for each in exact_arrays:
            attention.native.attend_blocks(*each, slopes=None)

    rounds = []
    runs: dict[str, Callable[[], object]] = {"read": lambda: threads.read(memory), "exact": run_exact}
    runs |= {tuning: partial(run_bounded, tuning) for tuning in tunings}
    for number in range(NUM_ROUNDS + 1):
        rounds.append({name: measure_seconds(run, num_warmups=0, num_runs=1)[0] for name, run in runs.items()})
        if number == 0:  # the first one warms up
            rounds.clear()
            phases |= {tuning: dict.fromkeys(PHASES, 0.0) for tuning in tunings}
    num_calls = NUM_ROUNDS * len(layers)
    work = Work.of(case, figures, len(layers), max(READ_BYTES / r["read"] for r in rounds))
    for of_tuning in phases.values():
        for name in PHASES:
            of_tuning[name] /= num_calls
    return [
        report(case, work, tuning, phases[tuning], [r["exact"] / len(layers) for r in rounds],
               [r[tuning] / len(layers) for r in rounds])
        for tuning in tunings
    ]  # fmt: skip


def exact_call(
    q: Tensor, layer: Layer, batch: native.KeyBatch, scale: float, out: Tensor, lse: Tensor
) -> tuple[Any, ...]:
    """What the native exact op takes."""
    scales = (layer.k_scales, layer.scanned.v_scales)
    return (
        native.array_of(q), native.number_of(q), native.array_of(layer.k), native.array_of(layer.scanned.v),
        native.number_of(layer.k), *(None if part is None else native.array_of(part) for part in scales), batch.native,
        scale, out.numpy(), lse.numpy(),
    )  # fmt: skip


def set_tuning(bounded: BoundedPool, tuning: str) -> None:
    """Give the op's tuning the fields that are named, and all others their defaults."""
    defaults, own = BoundedPool(bounded.threads).native.tuning, bounded.native.tuning
    named = {} if tuning == DEFAULTS else dict(word.split("=") for word in tuning.split("+"))
    for field in (name for name in dir(own) if not name.startswith("_")):
        value = getattr(defaults, field)
        setattr(own, field, type(value)(int(named.pop(field))) if field in named else value)
    if named:
        raise SystemExit(f"--tunings: the op has no {', '.join(named)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call reads, and how fast plain reads are."""

    num_layers: int
    kept: float
    max_mass: float
    scan_bytes: int
    num_bytes: float
    read_rate: float

    @classmethod
    def of(cls, case: Case, figures: Tensor, num_layers: int, read_rate: float) -> "Work":
        """By what the last call said."""
        kept = float(figures[..., 4].mean()) / case.context
        size = NUMBERS[case.number].itemsize
        # Lines of V; rows of K and V.
        row_bytes = HEAD_DIM // 16 * LINE if case.number == "int8" else 2 * HEAD_DIM * size
        scan_bytes = NUM_KV_HEADS * case.context * (HEAD_DIM + SCALE_WORD_BYTES)
        return cls(
            num_layers=num_layers,
            kept=kept,
            max_mass=float(figures[..., 0].max()),
            scan_bytes=scan_bytes,
            num_bytes=scan_bytes + NUM_KV_HEADS * case.context * kept * row_bytes,
            read_rate=read_rate,
        )


def report(
    case: Case, work: Work, tuning: str, phases: dict[str, float], exact: list[float], seconds: list[float]
) -> dict[str, object]:
    """The lines of a case and tuning, and their record."""
    phases = phases | {"other": sum(seconds) / len(seconds) * case.threads - sum(phases.values())}
    ratios = Quantiles.of([a / b for a, b in zip(exact, seconds, strict=True)])
    scan_rate = work.scan_bytes / (phases["scan"] / case.threads)
    keep_ns = phases["keep"] / max(work.kept * case.context * NUM_KV_HEADS, 1) * 1e9
    best, predicted = min(seconds), work.num_bytes / work.read_rate
    print(
        f"{case.number} group {case.group} {case.context:6} keys {case.threads:2} threads, {work.num_layers} layers, "
        f"{tuning}: kept {work.kept:.1%} (mass at most {work.max_mass:.4f}); {work.num_bytes / 1e6:.0f} MB, predicted "
        f"{predicted * 1e6:.0f} µs, measured {best * 1e6:.0f} µs: {predicted / best:.0%} of plain reads "
        f"({work.read_rate / 1e9:.1f} GB/s); exact {min(exact) * 1e6:.0f} µs; {ratios.median:.2f} times faster "
        f"({ratios.q20:.2f} to {ratios.q80:.2f})\n"
        f"    thread-µs a call: {', '.join(f'{name} {s * 1e6:.0f}' for name, s in phases.items())}; the scan alone at "
        f"{scan_rate / work.read_rate:.0%} of plain reads; {keep_ns:.0f} ns a kept key",
        flush=True,
    )
    return asdict(case) | {
        "tuning": tuning,
        "num_layers": work.num_layers,
        "kept": significant(work.kept, 3),
        "max_dropped_mass": significant(work.max_mass, 3),
        "bytes": int(work.num_bytes),
        "read_bytes_per_s": significant(work.read_rate),
        "predicted_s": significant(predicted),
        "seconds": Quantiles.of(seconds).record(),
        "best_s": significant(best),
        "exact_seconds": Quantiles.of(exact).record(),
        "exact_best_s": significant(min(exact)),
        "times_faster": ratios.record(),
        "phase_thread_s": {name: significant(s) for name, s in phases.items()},
        "scan_bytes_per_s": significant(scan_rate),
        "huge_pages_bytes": huge_page_bytes(),
    }


def huge_page_bytes() -> int | None:
    """Bytes of this process that lie in huge pages; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:")), None)


def clone(tensor: Tensor) -> Tensor:
    """A copy in huge pages where the system gives them, as pools are."""
    copy = torch.empty_like(tensor)
    advise_huge_pages(copy)
    return copy.copy_(tensor)


def make_layer(case: Case, attention: native.AttentionPool, bounded: BoundedPool) -> tuple[Layer, Tensor]:
    """One layer and a query, as the module says."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = case.context // BLOCK_SIZE
    q = torch.randn((1, NUM_KV_HEADS * case.group, HEAD_DIM), generator=generator)
    k = torch.randn((NUM_KV_HEADS, case.context, HEAD_DIM), generator=generator)
    num_planted = max(1, int(case.planted * case.context))
    rise = math.log(PLANTED_MASS / (1 - PLANTED_MASS) * (1 - case.planted) / case.planted)
    for head in range(NUM_KV_HEADS * case.group):
        places = torch.randperm(case.context, generator=generator)[:num_planted]
        direction = q[0, head] / q[0, head].norm() ** 2 * HEAD_DIM**0.5
        k[head // case.group, places] += rise * direction
    v = torch.randn((NUM_KV_HEADS, case.context, HEAD_DIM), generator=generator)
    dtype = NUMBERS[case.number]
    shape = (NUM_KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM)
    pools, scales = [], []
    for part, rows in (("k", k), ("v", v)):
        numbers, row_scales = api.quantize_rows(rows) if dtype == torch.int8 else (rows.to(dtype), None)
        pool = torch.empty(shape, dtype=dtype)
        attention.pack_blocks(part, pool, torch.arange(num_blocks), numbers.contiguous())  # type: ignore[arg-type]
        pools.append(pool)
        scales.append(None if row_scales is None else row_scales.view(shape[:3]).contiguous())
    k_scales, v_scales = scales
    scanned = ScannedLayer(
        scanned=pools[0] if k_scales is not None else torch.empty(shape, dtype=torch.int8),
        scales=k_scales if k_scales is not None else torch.empty(shape[:3]),
        rows=None if k_scales is not None else torch.empty((*shape[:3], 2 * HEAD_DIM), dtype=dtype),
        v=pools[1],
        v_scales=v_scales,
        norms=torch.zeros(NUM_KV_HEADS, num_blocks, 2),
    )
    bounded.copy_for_scan(pools[0], pools[1], torch.arange(num_blocks), scanned, head_dim=HEAD_DIM, k_scales=k_scales)
    return Layer(k=pools[0], k_scales=k_scales, scanned=scanned).clone(), q


if __name__ == "__main__":
    sys.exit(main())
