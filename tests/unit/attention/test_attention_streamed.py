"""Which models have a stream lane and a scan lane; what is predicted says the same."""

from typing import Final

import pytest
from tiered_world import make_model_spec

from ambidex.attention.scanned import why_no_scan_lane
from ambidex.attention.streamed import why_no_stream
from ambidex.core.dtypes import DType
from ambidex.core.ids import Tier
from ambidex.core.kv_dtypes import KVDTypes
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.cost.units import kv_specs, most_streamed

HEAD_DIMS: Final = (50, 64, 80, 96, 112, 128, 160, 192, 256)


def make_specs(
    head_dim: int,
    dtype: DType = DType.BF16,
    kv_dtypes: KVDTypes | None = None,
    windows: tuple[int | None, ...] = (None,),
) -> tuple[ModelSpec, KVSpec, KVSpec]:
    """A model, and its keys on the accelerator and in DRAM."""
    spec = make_model_spec(windows, head_dim=head_dim)
    return spec, *kv_specs(spec, dtype=dtype, kv_dtypes=kv_dtypes)


@pytest.mark.parametrize("kv_dtypes", [None, KVDTypes.both(DType.INT8), KVDTypes.both(DType.INT4)])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_of_all_sizes_are_streamed(head_dim: int, dtype: DType, kv_dtypes: KVDTypes | None) -> None:
    spec, gpu, dram = make_specs(head_dim, dtype, kv_dtypes)
    assert why_no_stream(spec, {Tier.GPU: gpu, Tier.DRAM: dram}) is None
    assert most_streamed(spec, gpu, dram, step_blocks=3, num_blocks=4) == 0.75


@pytest.mark.parametrize(
    ("dtype", "kv_dtypes", "windows", "reason"),
    [
        (DType.FP32, None, (None,), "fp32: the kernel reads 16-bit numbers"),
        (DType.FP16, KVDTypes.both(DType.BF16), (None,), "bf16: the kernel reads 16-bit numbers"),
        (DType.FP16, None, (None, 100), "some layers have a sliding window"),
    ],
)
def test_what_is_not_streamed_is_predicted_not_to_be(
    dtype: DType, kv_dtypes: KVDTypes | None, windows: tuple[int | None, ...], reason: str
) -> None:
    spec, gpu, dram = make_specs(80, dtype, kv_dtypes, windows)
    assert reason in str(why_no_stream(spec, {Tier.GPU: gpu, Tier.DRAM: dram}))
    assert most_streamed(spec, gpu, dram, step_blocks=4, num_blocks=4) == 0.0


def test_keys_in_rows_are_not_streamed() -> None:
    spec, gpu, _ = make_specs(64)
    assert why_no_stream(spec, {Tier.GPU: gpu, Tier.DRAM: gpu}) == "K and V in DRAM are not in tile order"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_of_a_power_of_2_are_scanned(head_dim: int) -> None:
    _, _, dram = make_specs(head_dim)
    assert dram.order is KVOrder.TILES
    why = why_no_scan_lane(dram)
    if head_dim in (50, 64, 112, 128, 256):  # padded to a multiple of 32
        assert why is None
    else:
        assert why == f"the kernel scans no rows of {dram.row_size} numbers, which are no power of 2"
