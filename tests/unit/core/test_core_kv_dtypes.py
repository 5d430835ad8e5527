"""The text of `kv_dtype`: what it means, and what is refused."""

import pytest

from ambidex.core.config import EngineConfig, KVDTypeChoice
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart
from ambidex.core.kv_dtypes import KVDTypes, parse_kv_dtypes


@pytest.mark.parametrize("dtype", list(DType))
def test_one_format_is_for_k_and_v(dtype: DType) -> None:
    found = parse_kv_dtypes(dtype.value)
    assert found == KVDTypes.both(dtype)
    assert str(found) == dtype.value


@pytest.mark.parametrize("text", ["k=int8,v=int4", "v=int4,k=int8"])
def test_k_and_v_apart_in_either_order(text: str) -> None:
    found = parse_kv_dtypes(text)
    assert found is not None
    assert (found.of(KVPart.K), found.of(KVPart.V)) == (DType.INT8, DType.INT4)
    assert str(found) == "k=int8,v=int4"


def test_auto_names_no_format() -> None:
    assert parse_kv_dtypes("auto") is None


@pytest.mark.parametrize(
    "text", ["int5", "", "INT8", "k=int8", "k=int8,k=int4", "k=int8,v=", "k=int8,v=int4,", "q=int8,v=int8", "int8,int4",
             "k=auto,v=int4"],
)  # fmt: skip
def test_other_texts_are_refused_with_the_value_and_the_formats(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_kv_dtypes(text)
    assert str(caught.value) == (
        f"`kv_dtype` is {text!r}: it must be auto, fp32, bf16, fp16, int8, int4, or k=FORMAT,v=FORMAT such as "
        f"k=int8,v=int4"
    )


@pytest.mark.parametrize("text", ["k=bf16,v=int4", "k=int8,v=fp16", "k=fp16,v=bf16"])
def test_formats_that_one_op_does_not_read_together_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"`kv_dtype` {text}: K and V may differ as int8 and int4 do"):
        parse_kv_dtypes(text)


@pytest.mark.parametrize("text", ["gpu=int8", "gpu=bf16,dram=int4"])
def test_formats_of_a_tier_are_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the accelerator's keeps the format of activations: leave out gpu="):
        parse_kv_dtypes(text)


def test_the_setting_takes_text_and_choices_and_keeps_one_form() -> None:
    assert EngineConfig(model="m").kv_dtypes is None
    assert EngineConfig(model="m", kv_dtype="v=int4,k=int4").kv_dtype == "int4"
    assert EngineConfig(model="m", kv_dtype=KVDTypeChoice.INT4).kv_dtypes == KVDTypes.both(DType.INT4)
    with pytest.raises(ConfigError, match="`kv_dtype` is 'int3'"):
        EngineConfig(model="m", kv_dtype="int3")
