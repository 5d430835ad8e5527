"""A layer's queries made from the input of the layer before, for every family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ambidex.models.look_ahead import LookAhead
from dense_attention import DenseAttention
from selective_world import load_tiny_model
from tiny_models import VARIANTS

FAMILIES = ["llama", "llama_biased", "mistral", "qwen2", "qwen3", "opt", "opt_350m", "falcon_7b", "falcon_40b"]


class Watching(DenseAttention):
    """Full attention that compares, in each layer, the queries made early with those that it is given."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **angles: object) -> Tensor:
        self.early[layer_idx] = self.look_ahead.query(layer_idx)
        self.own[layer_idx] = q
        return super().attend(layer_idx, q, k, v, **angles)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", FAMILIES)
def test_early_queries_are_those_of_the_input_before(variant: str, tmp_path: Path) -> None:
    assert variant in VARIANTS
    tiny = load_tiny_model(variant, tmp_path)
    attention = Watching(tiny.spec)
    attention.early, attention.own = {}, {}  # type: ignore[attr-defined]
    attention.look_ahead = LookAhead(tiny.model, tiny.spec.num_layers)  # type: ignore[attr-defined]
    inputs: dict[int, Tensor] = {}
    modules = {m.layer_idx: m for m in tiny.model.modules() if hasattr(m, "layer_idx")}
    for module in modules.values():
        module.register_forward_pre_hook(lambda module, args: inputs.update({module.layer_idx: args[0]}))
    with torch.inference_mode():
        attention.begin([5])
        tiny.model(torch.arange(5), torch.arange(5), attention)
        assert attention.early[0] is None  # type: ignore[attr-defined]
        for layer_idx in range(1, tiny.spec.num_layers):
            early = attention.early[layer_idx]  # type: ignore[attr-defined]
            assert early.shape == (5, tiny.spec.num_q_heads, tiny.spec.head_dim)
            torch.testing.assert_close(early, modules[layer_idx].query(inputs[layer_idx - 1]))
        for layer_idx in range(
            tiny.spec.num_layers
        ):  # what `query` makes of a layer's own input is what it attends with
            torch.testing.assert_close(modules[layer_idx].query(inputs[layer_idx]), attention.own[layer_idx])  # type: ignore[attr-defined]
