"""From answers and their seconds to what `decode_cpu.py` says: speed, floor, ratios, and the tables that show them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ambidex.core.kv_spec import KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.locate import ModelSource
from decode_engines import BLOCK_SIZE, VARIANTS, Kind, Variant
from harness import QUIET_CORES, Quantiles, significant

REFERENCE: Final = "transformers-fp32"
"""The others' tokens are compared with its. They need not be equal: llama.cpp rounds activations to 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a decode step must read at least: every weight once, and K and V of the context."""

    weights: int
    kv_per_token: int

    def bytes_per_step(self, context_len: float) -> float:
        """Bytes read by a step at a context of this many tokens."""
        return self.weights + self.kv_per_token * context_len


@dataclass(slots=True)
class Outcome:
    """All answers of one variant, by context; `failure` says why there are none."""

    about: Mapping[str, object]
    answers: dict[int, list[dict[str, Any]]]
    failure: str | None = None


def make_points(
    outcomes: Mapping[str, Outcome], spec: ModelSpec, source: ModelSource, *, bytes_per_s: float
) -> list[dict[str, Any]]:
    """One figure for each context and variant, contexts first."""
    reference = outcomes[REFERENCE].answers if REFERENCE in outcomes else {}
    traffic = {name: make_traffic(VARIANTS[name], spec, source) for name in outcomes}
    return [
        make_point(name, context, answers, traffic[name], reference=reference.get(context, []), bytes_per_s=bytes_per_s)
        for context in sorted({context for outcome in outcomes.values() for context in outcome.answers})
        for name, outcome in outcomes.items()
        if (answers := outcome.answers[context])
    ]


def make_traffic(variant: Variant, spec: ModelSpec, source: ModelSource) -> Traffic:
    """What a step of this variant must read."""
    tensors = GGUFFile(source.files[0]).tensors
    is_looked_up = "output.weight" in tensors  # untied: a step reads one row of the embedding
    read = [info for name, info in tensors.items() if not (is_looked_up and name == "token_embd.weight")]
    stored = sum(info.num_bytes for info in read)
    count = sum(math.prod(info.shape) for info in read)
    return Traffic(
        weights=stored if variant.dtype is None else count * variant.dtype.num_bytes,
        kv_per_token=KVSpec.of(spec, dtype=variant.kv_dtype, block_size=BLOCK_SIZE).bytes_per_token,
    )


def make_point(
    name: str,
    context: int,
    answers: Sequence[dict[str, Any]],
    traffic: Traffic,
    *,
    reference: Sequence[dict[str, Any]],
    bytes_per_s: float,
) -> dict[str, Any]:
    """Speeds from medians over all rounds; the floor is for the context in the middle of the decode."""
    prefill = Quantiles.of([answer["prefill_s"] for answer in answers])
    steps = [seconds for answer in answers for seconds in answer["step_s"]]
    step = Quantiles.of(steps)
    num_steps = len(answers[0]["step_s"])
    bytes_per_step = traffic.bytes_per_step(context + num_steps / 2)
    predicted_s = bytes_per_step / bytes_per_s
    others = max((answer["others"] for answer in answers), key=lambda others: others["busy_cores"])
    return {
        "variant": name,
        "context": context,
        "prefill_tokens_per_s": significant(context / prefill.median),
        "prefill_s": prefill.record(),
        "decode_tokens_per_s": significant(1 / step.median),
        "step_s": step.record(),
        "decode_s": significant(sum(steps) / len(answers)),
        "bytes_per_step": round(bytes_per_step),
        "weight_bytes": traffic.weights,
        "predicted_step_s": significant(predicted_s),
        "share_of_ceiling": significant(predicted_s / step.median, 3),
        "num_same_tokens": count_same(answers[0]["token_ids"], reference[0]["token_ids"]) if reference else None,
        "num_tokens": num_steps + 1,
        "lane_bytes": answers[0]["lane_bytes"],
        "others": others,
        "is_quiet": others["busy_cores"] < QUIET_CORES,
    }


def make_ratios(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed of ours over speed of each peer, at each context: above 1 we are faster."""
    ours = [point for point in points if VARIANTS[point["variant"]].kind is Kind.AMBIDEX]
    peers = [point for point in points if VARIANTS[point["variant"]].kind is not Kind.AMBIDEX]
    return [
        {
            "context": own["context"],
            "ours": own["variant"],
            "peer": peer["variant"],
            "prefill": significant(own["prefill_tokens_per_s"] / peer["prefill_tokens_per_s"], 3),
            "decode": significant(own["decode_tokens_per_s"] / peer["decode_tokens_per_s"], 3),
        }
        for own in ours
        for peer in peers
        if own["context"] == peer["context"]
    ]


def count_same(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((idx for idx, (a, b) in pairs if a != b), min(len(left), len(right)))


def print_tables(record: Mapping[str, Any]) -> None:
    """Speeds with their floor, then our speed over each peer's."""
    print(f"\n{record['machine']['note']}; read bandwidth GB/s (1 thread, all): " + "; ".join(
        f"{probe['one_thread']['median'] / 1e9:.1f}, {probe['all_threads']['median'] / 1e9:.1f} {probe['when']}"
        for probe in record["read_bandwidth"]
    ))  # fmt: skip
    print("\ncontext  engine              prefill   decode tok/s          step ms    floor  share  same    others")
    print("           tokens            tok/s   median (q20-q80)      median       ms         tokens   cores")
    for point in record["points"]:
        step = point["step_s"]
        print(f"{point['context']:7d}  {point['variant']:<18s} {point['prefill_tokens_per_s']:8.1f} "
              f"{point['decode_tokens_per_s']:8.2f} ({1 / step['q80']:6.2f}-{1 / step['q20']:6.2f}) "
              f"{step['median'] * 1e3:9.2f} {point['predicted_step_s'] * 1e3:8.2f} {point['share_of_ceiling']:6.2f} "
              f"{same_text(point):>7s} {point['others']['busy_cores']:7.2f}"
              + ("" if point["is_quiet"] else "  not quiet"))  # fmt: skip
    print_ratios(record["ratios"])
    for name, why in {**record["missing"], **record["failed"]}.items():
        print(f"not measured: {name}: {why if isinstance(why, str) else 'not installed: ' + ', '.join(why)}")
    print()


def print_ratios(ratios: Sequence[Mapping[str, Any]]) -> None:
    """One line for each context and variant of ours: decode / prefill ratio to each peer."""
    peers = list(dict.fromkeys(ratio["peer"] for ratio in ratios))
    if not peers:
        return
    print("\nours / peer: decode, prefill (above 1: ours is faster)")
    print("context  ours               " + "".join(f"{peer:>20s}" for peer in peers))
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for ratio in ratios:
        cell = f"{ratio['decode']:.2f}, {ratio['prefill']:.2f}"
        rows.setdefault((ratio["context"], ratio["ours"]), {})[ratio["peer"]] = cell
    for (context, name), cells in rows.items():
        print(f"{context:7d}  {name:<19s}" + "".join(f"{cells.get(peer, '-'):>20s}" for peer in peers))


def same_text(point: Mapping[str, Any]) -> str:
    """How many tokens equal the reference's, e.g. 40/65."""
    return "-" if point["num_same_tokens"] is None else f"{point['num_same_tokens']}/{point['num_tokens']}"
