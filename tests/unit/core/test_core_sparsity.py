"""`mlp_sparsity` as text: what is read, and what is refused and why."""

import pytest

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import MLPSparsity, SparsityKind, parse_sparsity


@pytest.mark.parametrize(
    ("text", "sparsity"),
    [
        ("off", None),
        ("relu", MLPSparsity(kind=SparsityKind.RELU)),
        ("cats", MLPSparsity(kind=SparsityKind.CATS, share=0.2)),
        ("teal", MLPSparsity(kind=SparsityKind.TEAL, share=0.4)),
        ("cats:0.5", MLPSparsity(kind=SparsityKind.CATS, share=0.5)),
        ("teal:.4", MLPSparsity(kind=SparsityKind.TEAL, share=0.4)),
    ],
)
def test_every_form_is_read_and_shown_so_that_it_is_read_again(text: str, sparsity: MLPSparsity | None) -> None:
    assert parse_sparsity(text) == sparsity
    assert sparsity is None or parse_sparsity(str(sparsity)) == sparsity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must be off, relu"),
        ("off:1", "it must be off, relu"),
        ("cat:0.5", "it must be off, relu"),
        ("relu:0.5", "relu is exact and has no share"),
        ("cats:", "give the share to skip, such as cats:0.5"),
        ("cats:half", "give the share to skip"),
        ("teal:0.99", "the share must be from 0.05 to 0.95"),
        ("teal:nan", "the share must be from 0.05 to 0.95"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="smollm2", mlp_sparsity=text)


def test_a_form_is_refused_where_a_model_has_not_what_it_needs() -> None:
    relu, cats, teal = (parse_sparsity(text) for text in ("relu", "cats:0.5", "teal:0.5"))
    assert relu is not None
    assert cats is not None
    assert teal is not None
    assert relu.refusal(Activation.RELU, is_gated=True) is None
    assert "this model's activation is gelu" in str(relu.refusal(Activation.GELU, is_gated=False))
    assert cats.refusal(Activation.SILU, is_gated=True) is None
    assert "has none: use teal:SHARE" in str(cats.refusal(Activation.RELU, is_gated=False))
    assert teal.refusal(Activation.GELU, is_gated=False) is None
