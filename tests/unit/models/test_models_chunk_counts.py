"""Chunks of a place as shares of it."""

import pytest
import torch

from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.formats.hf_config import spec_from_hf
from ambidex.models.chunk_counts import ChunkCounts, placement_of
from ambidex.models.registry import build_model
from ambidex.models.site_plans import plan_sites
from small_checkpoints import CONFIG


@pytest.mark.parametrize("num_on_cpu", range(8))
def test_where_nothing_lies_on_the_accelerator_its_share_is_zero(num_on_cpu: int) -> None:
    """1 − cpu − streamed was −3e-17 for some counts, which is no share, and a running engine failed."""
    model = build_model(spec_from_hf(CONFIG), device=torch.device("meta"), dtype=torch.float32)
    away = WeightSplit(on_gpu=0.0, on_cpu=1.0)
    plans = plan_sites(
        model,
        Placement(layers=(LayerPlacement(attention=away, mlp=away),) * 2, head=away),
        chunk_bytes=1,
        number_bytes=4,
    )
    counts = [ChunkCounts(0, min(num_on_cpu, len(plan.cuts.chunks))) for plan in plans]
    placement = placement_of(plans, counts, 2, number_bytes=4)
    assert all(split.on_gpu == pytest.approx(0.0, abs=1e-12) for split in placement.splits())
