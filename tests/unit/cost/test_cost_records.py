"""Predictions against the steps that were measured on an H200 machine (bench/results/), with the rates of each record.

Two coefficients were fitted to `FITTED` records (what a handover costs, and the share of the read rate that products of
one token reach); all others are held out.
"""

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import decode_gpu
from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.prefill import WITH_DRAM, predict_prefill
from ambidex.cost.step import predict_step
from ambidex.cost.units import make_units
from ambidex.cost.weights import PLAIN, count_weights
from ambidex.cost.workload import KVShares, Workload
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.hw import presets
from ambidex.hw.profile import CpuRates, Curve, GpuRates, HardwareProfile, LinkRates

RESULTS = Path(__file__).parents[3] / "bench" / "results"
FITTED = {("decode_gpu", 1), ("decode_hybrid", 8), ("decode_hybrid", 9)}
"""By name of the file and number of the line, from 0."""
FIRST_OF_THIS_STREAM_LANE = 8
"""Records of decode_hybrid before this line are of a stream lane that read over the link in kernels."""
BESIDE = 125e9
"""Bytes/s of DRAM to threads and copies together, where a record has not measured it: the median of those that have."""


@cache
def spec_of(shape: str) -> ModelSpec:
    with TemporaryDirectory() as folder:
        decode_gpu.make_model_folder(Path(folder), shape)
        return read_spec(find_model(folder))


def profile_of(record: dict[str, Any]) -> HardwareProfile:
    """The rates that a run measured, and the coefficients of the presets where it measured none."""
    gpu = (record.get("gpu_read_bandwidth") or record["read_bandwidth"])["median"]
    dram = record.get("dram_read_bandwidth", {"median": 95e9})["median"]
    beside = record.get("dram_read_bandwidth_beside_copies", {"median": BESIDE})["median"]
    found = re.search(r"at ([\d.]+) GB/s over the link", record["settings"].get("stream_why") or "")
    link = float(found[1]) * 1e9 if found else 49.6e9
    return HardwareProfile(
        machine=None,
        date="",
        source="",
        gpu=GpuRates(
            name="h200", memory_bytes=1, read_bytes_per_s=gpu,
            products=presets.roofline(gpu * presets.GPU_PRODUCT_READ / presets.GPU_READ, {"bf16": 775e12}),
            attention_bytes_per_s=gpu * presets.GPU_ATTENTION / presets.GPU_READ,
            layer_s=presets.GPU_LAYER_S, launch_s=presets.LAUNCH_S,
        ),
        cpu=CpuRates(
            name="xeon", num_threads=15, read_bytes_per_s=Curve(((15, dram),)),
            products=presets.roofline(dram, {"bf16": 1e13}),
            attention_bytes_per_s={"bf16": presets.CPU_ATTENTION["bf16"] * dram},
            layer_s=1e-6, step_s=presets.STEP_S, request_s=presets.REQUEST_S,
        ),
        link=LinkRates(
            name="pcie5x16", to_gpu_bytes_per_s=link, from_gpu_bytes_per_s=link, beside_bytes_per_s=beside,
            handover_s=presets.HANDOVER_S,
        ),
    )  # fmt: skip


def points() -> Iterator[tuple[bool, str, float, float]]:
    """(was fitted to, name, predicted, measured seconds) of every point."""
    for name in ("decode_gpu", "decode_hybrid"):
        for place, line in enumerate((RESULTS / f"{name}.jsonl").read_text().splitlines()):
            record = json.loads(line)
            if name == "decode_hybrid" and not FIRST_OF_THIS_STREAM_LANE <= place <= 16:
                continue
            if name == "decode_gpu" and place > 2:
                continue
            spec, profile = spec_of(record["settings"]["shape"]), profile_of(record)
            weights = count_weights(spec, residence=PLAIN, dtype=DType.BF16)
            for point in record["points"]:
                read = point.get("lane_bytes") or {"gpu": point["kv_bytes"]}
                total = sum(read.values())
                kv = KVShares(
                    on_gpu=read["gpu"] / total,
                    on_cpu=read.get("cpu", 0) / total,
                    streamed=read.get("stream", 0) / total,
                )
                workload = Workload(batch=point["batch"], context=point["context"])
                units = make_units(spec, weights, profile, workload, dtype=DType.BF16)
                step = predict_step(units, Placement.all_on_gpu(spec.num_layers), kv)
                label = f"{name} {place}: {point['batch']} x {point['context']}"
                yield (name, place) in FITTED, label, step.step_s, point["step_s"]["median"]


def test_held_out_steps_are_predicted_within_ten_percent_in_the_median() -> None:
    held_out = [(label, abs(got / took - 1)) for fitted, label, got, took in points() if not fitted]
    errors = sorted(error for _, error in held_out)
    assert len(errors) >= 14
    assert statistics.median(errors) <= 0.10, held_out
    assert errors[int(0.9 * len(errors)) - 1] <= 0.20, held_out
    assert errors[-1] <= 0.30, held_out


def test_fitted_steps_are_predicted_within_ten_percent_each() -> None:
    fitted = {label: got / took - 1 for was_fitted, label, got, took in points() if was_fitted}
    assert len(fitted) == 10
    assert max(abs(error) for error in fitted.values()) <= 0.10, fitted


def test_weights_of_a_step_are_the_records(subtests: pytest.Subtests) -> None:
    for name in ("decode_gpu", "decode_hybrid"):
        for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            shape = record["settings"]["shape"]
            if shape not in ("llama-3.1-8b", "opt-6.7b", "qwen2.5-7b"):
                continue
            weights = count_weights(spec_of(shape), residence=PLAIN, dtype=DType.BF16)
            read = sum(layer.num_bytes for layer in weights.layers) + weights.head.num_bytes
            with subtests.test(name, shape=shape):
                assert record["weight_bytes"] == pytest.approx(read, rel=2e-3)


def test_prompts_are_predicted_within_fifteen_percent() -> None:
    """Those whose keys all lie on the GPU were fitted to; with keys in DRAM they are held out.

    What the host takes to launch a layer no record has as such: it is at most what the same run's prompt of 8K spent in
    `forward`.
    """
    launches: dict[str, float] = {}
    for line in (RESULTS / "prefill_gpu.jsonl").read_text().splitlines():
        record = json.loads(line)
        settings = record["settings"]
        if settings["shape"] != "llama-3.1-8b":
            continue
        spec = spec_of(settings["shape"])
        if settings["prompt"] == 8192:
            num_layers = spec.num_layers * settings["prompt"] // settings["chunk"]
            launches[record["date"]] = record["variants"]["split"]["sections_s"]["forward"] / num_layers / WITH_DRAM
        profile = profile_of({"read_bandwidth": {"median": 4.26e12}, "settings": settings})
        assert profile.gpu is not None
        profile = replace(profile, gpu=replace(profile.gpu, launch_s=launches[record["date"]]))
        weights = count_weights(spec, residence=PLAIN, dtype=DType.BF16)
        workload = Workload(prompt=settings["prompt"], chunk=settings["chunk"], context=settings["prompt"])
        near = (settings["num_sink_tokens"] + settings["recent_window"]) / settings["prompt"]
        for variant, share in (("gpu", 1.0), ("split", near)):
            found = predict_prefill(
                spec, weights, profile, workload, Placement.all_on_gpu(spec.num_layers),
                KVShares(on_gpu=share, on_cpu=1 - share), dtype=DType.BF16,
            )  # fmt: skip
            took = record["variants"][variant]["prompt_s"]["median"]
            assert found.seconds == pytest.approx(took, rel=0.15), (variant, settings["prompt"], found.seconds)


def test_a_step_with_weights_over_tiers_is_predicted_within_twenty_percent() -> None:
    """Held out. Of the rows that a placement gives to the CPU some travel, as the engine decides when it starts: the
    record's bytes of each lane say how many."""
    for line in (RESULTS / "decode_weights.jsonl").read_text().splitlines()[:1]:
        record = json.loads(line)
        settings, rates = record["settings"], record["rates"]
        spec = spec_of(settings["shape"])
        weights = count_weights(spec, residence=PLAIN, dtype=DType.BF16)
        fields = {"gpu_read_bandwidth": {"median": rates["gpu"]}, "dram_read_bandwidth": {"median": rates["dram"]}}
        profile = profile_of({**fields, "settings": {"stream_why": f"at {rates['link'] / 1e9:.1f} GB/s over the link"}})
        for point in record["points"]:
            lanes = point["lane_bytes"]
            away = lanes["cpu"] + lanes["link"]
            num = round(spec.num_layers * away / sum(layer.num_bytes for layer in weights.layers))
            cpu, link = lanes["cpu"] / away, lanes["link"] / away
            split = WeightSplit(on_gpu=0.0, on_cpu=cpu, streamed=link)
            elsewhere = LayerPlacement(attention=split, mlp=split)
            placement = Placement(layers=(elsewhere,) * num + (LayerPlacement(),) * (spec.num_layers - num))
            workload = Workload(batch=point["batch"], context=settings["context"])
            units = make_units(spec, weights, profile, workload, dtype=DType.BF16)
            step = predict_step(units, placement, KVShares())
            took = point["step_s"]["median"]
            assert step.step_s == pytest.approx(took, rel=0.20), (point["batch"], step.step_s, took)
