"""How a plan looks: tables for people, one object for scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ambidex.core.placement import LayerPlacement, WeightSplit
from ambidex.core.units import format_size
from ambidex.cost.step import predict_step
from ambidex.cost.workload import KVShares
from ambidex.hw.profile import HardwareProfile
from ambidex.solver.baselines import simple_placements
from ambidex.solver.placement_file import placement_json
from ambidex.solver.planning import Plan
from ambidex.solver.problem import fits, measure_memory

WHERE = ("part", "bytes", "on the GPU", "by the CPU", "over the link")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def plan_tables(model: str, plan: Plan) -> list[Table]:
    """Machine, placement, memory, prediction, and how to run it."""
    request, workload = plan.request, plan.request.workload
    tables = [Table("", ("plan", ""), [
        ("model", f"{model}: {request.spec.architecture}, {request.spec.num_layers} layers, "
         f"{format_size(request.weights.num_bytes)} of weights"),
        ("matrices", ", ".join(f"{format_size(size)} of {kind}" for kind, size in request.weights.bytes_by_kind.items())
         + " in memory" + _dequantised(plan)),
        ("workload", f"{workload.batch} x {workload.context} tokens in the cache, prompt {workload.prompt}"),
        *_machine_rows(request.profile),
    ])]  # fmt: skip
    if request.profile.gpu is not None:
        tables.append(Table("", WHERE, list(_place_rows(plan))))
    tables += [
        Table("", ("memory", "", "bytes"), list(_memory_rows(plan))),
        Table("", ("predicted", ""), list(_prediction_rows(plan))),
    ]
    return tables


def explain_tables(plan: Plan) -> list[Table]:
    """What the step's time consists of, and what simpler placements would take."""
    step = plan.solution.step
    bounds = [
        ("path: phases of all layers, each as long as the slower of GPU and CPU", step.path_s),
        ("link: bytes that travel over the rate of copies", step.link_s),
        ("DRAM: what the CPU reads and what travels over what DRAM gives both", step.dram_s),
    ]
    rows = [(name, _ms(seconds), "← the step" if seconds == step.step_s else "") for name, seconds in bounds]
    tables = [
        Table("", ("a step takes the longest of", "", ""), rows),
        Table("", ("work", "", "of the step"),
              [(name, _ms(seconds), f"{100 * seconds / step.step_s:.1f} %") for name, seconds in step.terms]),
    ]  # fmt: skip
    if plan.request.profile.gpu is not None:
        tables.append(Table("", ("simple placements", "step", "beside this plan"), list(_simple_rows(plan))))
    return tables


def plan_json(model: str, plan: Plan) -> dict[str, Any]:
    """The same for a script; bytes, seconds, tokens."""
    request, solution, step = plan.request, plan.solution, plan.solution.step
    workload, profile = request.workload, request.profile
    return {
        "model": model,
        "weights_bytes": request.weights.num_bytes,
        "matrices_bytes": request.weights.bytes_by_kind,
        "machine": {
            "gpu": profile.gpu.name if profile.gpu else None,
            "cpu": profile.cpu.name,
            "link": profile.link.name if profile.link else None,
            "source": profile.source,
            "date": profile.date,
        },
        "workload": {name: getattr(workload, name) for name in ("batch", "context", "prompt", "chunk")},
        "placement": placement_json(solution.placement, solution.kv),
        "kv_gpu_tokens": plan.kv_gpu_tokens,
        "stream_percent": plan.stream_percent,
        "found_by": solution.how,
        "memory": {
            "gpu": dict(solution.memory.gpu),
            "dram": dict(solution.memory.dram),
            "gpu_budget": plan.problem.gpu_bytes if profile.gpu else None,
            "dram_budget": plan.problem.dram_bytes if profile.gpu else request.dram_bytes,
        },
        "decode": {
            "step_s": step.step_s,
            "tokens_per_s": step.tokens_per_s,
            "binds": step.binds,
            "path_s": step.path_s,
            "link_s": step.link_s,
            "dram_s": step.dram_s,
            "gpu_s": step.gpu_s,
            "cpu_s": step.cpu_s,
            "terms_s": dict(step.terms),
            "cpu_reads_of_mlps": None if request.mlp_reads is None else request.mlp_reads.at(workload.batch),
        },
        "prefill": {
            "prompt_s": plan.prefill.seconds,
            "tokens_per_s": plan.prefill.tokens_per_s,
            "binds": plan.prefill.binds,
            "cpu_weights_multiplied_by": plan.prefill.how,
        },
        "one_more_gib_saves_s": plan.gain_s,
    }


def _dequantised(plan: Plan) -> str:
    """Which types of the files an engine does not keep."""
    kept = plan.request.weights.bytes_by_kind.keys()
    others = sorted({kind for _, kind in plan.request.spec.quantized} - kept)
    return f"; {', '.join(others)} of the files dequantised" if others else ""


def _machine_rows(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    if profile.gpu is not None:
        yield "GPU", f"{profile.gpu.name}, reads {_gb(profile.gpu.read_bytes_per_s)}"
    yield "CPU", f"{profile.cpu.name}, {profile.cpu.num_threads} threads read {_gb(profile.cpu.dram_bytes_per_s)}"
    if profile.link is not None:
        yield "link", f"{profile.link.name}, copies {_gb(profile.link.to_gpu_bytes_per_s)}"
    yield "rates", profile.source + (f", {profile.date}" if profile.date else "")


def _place_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    units, solution = plan.problem.units, plan.solution
    found: dict[LayerPlacement, list[int]] = {}
    for idx, layer in enumerate(solution.placement.layers):
        found.setdefault(layer, []).append(idx)
    for layer, places in found.items():
        label = f"{len(places)} layers" if len(places) > 1 else f"layer {places[0]}"
        for name, split in (("attention", layer.attention), ("MLP", layer.mlp)):
            size = sum(getattr(units.layers[idx], f"{name.lower()}_bytes") for idx in places)
            yield f"{label}, {name}", format_size(size), *_percents(split)
    yield "head", format_size(units.head_bytes), *_percents(solution.placement.head)
    yield "keys and values", format_size(units.kv_gpu_bytes), *_percents(solution.kv)


def _memory_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    memory, problem = plan.solution.memory, plan.problem
    has_gpu = plan.request.profile.gpu is not None
    tiers = [("GPU" if has_gpu else "DRAM", memory.gpu, problem.gpu_bytes if has_gpu else plan.request.dram_bytes)]
    if has_gpu:
        tiers.append(("DRAM", memory.dram, problem.dram_bytes))
    for tier, parts, budget in tiers:
        for name, size in parts.items():
            if size:
                yield tier, name, format_size(size)
        total = format_size(sum(parts.values()))
        yield tier, "together", total if budget is None else f"{total} of {format_size(budget)}"


def _prediction_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    step, prefill, batch = plan.solution.step, plan.prefill, plan.request.workload.batch
    each = f", {step.tokens_per_s / batch:.2f} each" if batch > 1 else ""
    yield "decode", f"{step.tokens_per_s:.1f} tokens/s{each}: {_ms(step.step_s)} a step"
    yield "decode waits for", step.binds
    if plan.request.mlp_reads is not None:
        share = 100 * plan.request.mlp_reads.at(batch)
        yield "neurons left out", f"the CPU reads {share:.0f} % of its part of MLPs that are not quantised"
    how = f"; the CPU's share of weights is multiplied by {prefill.how}" if "or" in prefill.how or "," in prefill.how \
        or prefill.how == "the CPU" else ""  # fmt: skip
    yield "prefill", f"{prefill.tokens_per_s:.0f} tokens/s: {prefill.seconds:.2f} s a prompt{how}"
    yield "prefill waits for", prefill.binds
    if plan.request.profile.gpu is not None:
        faster = step.step_s / (step.step_s - plan.gain_s) if plan.gain_s < step.step_s else 1.0
        yield "1 GiB more of GPU memory", f"saves {_ms(plan.gain_s)} a step, {100 * (faster - 1):.1f} % more tokens/s"
        yield (
            "to run it",
            f"--placement FILE (of plan --output) --kv-gpu-tokens {plan.kv_gpu_tokens} "
            + (f"--stream-percent {plan.stream_percent}" if plan.solution.kv.on_gpu < 1 else ""),
        )


def _simple_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    seen = set()
    for name, placement, kv in simple_placements(plan.problem):
        label = name.replace("_", " ") + (
            ", keys by the CPU" if kv.on_cpu else ", keys streamed" if kv.streamed else ""
        )
        if label in seen:
            continue
        seen.add(label)
        if not fits(plan.problem, placement, kv):
            use = measure_memory(plan.problem, placement, kv)
            yield (
                label,
                "does not fit",
                f"{format_size(use.gpu_bytes)} on the GPU, {format_size(use.dram_bytes)} in DRAM",
            )
            continue
        seconds = predict_step(plan.problem.units, placement, kv).step_s
        yield label, _ms(seconds), f"{seconds / plan.solution.step.step_s:.2f} times as long"


def _percents(split: WeightSplit | KVShares) -> tuple[str, str, str]:
    gpu, cpu, stream = (
        f"{100 * share:.1f} %" if share else "" for share in (split.on_gpu, split.on_cpu, split.streamed)
    )
    return gpu, cpu, stream


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"
