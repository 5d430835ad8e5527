import pytest

from ambidex import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart
from ambidex.core.kv_mapping import HostLayout, KVMapping, SlowMemory, parse_slow_memory
from ambidex.core.units import GIB


@pytest.mark.parametrize(
    ("text", "latency_s", "bytes_per_s"),
    [
        ("300ns,20GB/s", 3e-7, 2e10),
        ("0.5us,500MB/s", 5e-7, 5e8),
        (" 0 ns , 7.5 gb ", 0.0, 7.5e9),
        ("1µs,1GB", 1e-6, 1e9),
    ],
)
def test_slow_memory_is_read_with_its_units(text: str, latency_s: float, bytes_per_s: float) -> None:
    slow = parse_slow_memory(text)
    assert (slow.latency_s, slow.bytes_per_s) == pytest.approx((latency_s, bytes_per_s))


@pytest.mark.parametrize(
    "text",
    ["", "300ns", "20GB/s,300ns", "300,20", "300ns,20", "-1ns,20GB/s", "300ns,0GB/s", "2s,1GB/s", "5000us,1GB/s",
     "nanns,1GB", "300ns;20GB/s", "1e3ns,1GB/s", "300ns,20GiB/s", "9" * 400 + "ns,1GB/s", "1ns," + "9" * 400 + "GB/s"],
)  # fmt: skip
def test_text_that_is_no_slow_memory_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="`emulate_cxl` is"):
        parse_slow_memory(text)


def test_seconds_are_the_latency_once_and_the_bytes_at_their_rate() -> None:
    slow = SlowMemory(latency_s=1e-6, bytes_per_s=1e9)
    assert slow.seconds(2000) == pytest.approx(3e-6)
    assert slow.seconds(0) == 0


def test_shares_of_the_mapping_by_part_and_layer() -> None:
    v_in_cxl = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4, num_spilled=2, first_cxl_layer=1)
    assert [v_in_cxl.cxl_share(KVPart.V, layer) for layer in range(3)] == [0, 1, 1]
    assert [v_in_cxl.cxl_share(KVPart.K, layer) for layer in range(3)] == [0, 0, 0]
    assert v_in_cxl.num_blocks == 6
    interleaved = HostLayout(mapping=KVMapping.INTERLEAVE, num_near=4)
    assert {interleaved.cxl_share(part, 0) for part in KVPart} == {0.5}
    assert HostLayout(mapping=KVMapping.DRAM, num_near=4).cxl_share(KVPart.V, 5) == 0


def test_budget_of_the_cxl_tier_decides_the_mapping() -> None:
    assert EngineConfig(model="m").kv_layout is KVMapping.DRAM
    assert EngineConfig(model="m", cxl_memory=GIB).kv_layout is KVMapping.K_DRAM_V_CXL
    assert EngineConfig(model="m", cxl_memory=GIB, kv_mapping=KVMapping.INTERLEAVE).kv_layout is KVMapping.INTERLEAVE


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_mapping": "interleave"}, "`kv_mapping` is interleave, but the CXL tier has no budget"),
        ({"cxl_node": 1}, "`cxl_node` is 1, but the CXL tier has no budget"),
        ({"emulate_cxl": "300ns,20GB/s"}, "give `cxl_memory`, too"),
        ({"emulate_cxl": "fast", "cxl_memory": "1GiB"}, "`emulate_cxl` is 'fast'"),
        ({"kv_mapping": "dram", "cxl_memory": "1GiB"}, "leave one out"),
        ({"cxl_memory": "1GiB", "cxl_node": 1, "emulate_cxl": "300ns,20GB/s"}, "both say what the CXL tier is"),
        ({"kv_mapping": "k-cxl"}, "must be one of auto, dram, k-dram-v-cxl, interleave"),
        ({"cxl_memory": 0}, "`cxl_memory` is 0: it must be at least 1"),
        ({"cxl_memory": "1GiB", "cxl_node": -1}, "`cxl_node` is -1"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(model="m", **settings)  # type: ignore[arg-type]
