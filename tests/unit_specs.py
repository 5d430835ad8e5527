"""A `ModelSpec` of a few heads, for tests of parts that need no weights."""

from ambidex.core.model_spec import Activation, ModelSpec


def make_spec(*, windows: tuple[int | None, ...] = (None,), num_q_heads: int = 6, num_kv_heads: int = 2) -> ModelSpec:
    """A Llama of `len(windows)` layers with heads of 8."""
    return ModelSpec(
        architecture="llama",
        num_layers=len(windows),
        hidden_size=8 * num_q_heads,
        intermediate_size=8,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        vocab_size=16,
        max_context_len=1024,
        norm_eps=1e-5,
        activation=Activation.SILU,
        rope=None,
        windows=windows,
        tie_embeddings=True,
    )
