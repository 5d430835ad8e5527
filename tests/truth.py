"""What attention should give, and how far an implementation may be from it."""

import torch
from torch import Tensor


def naive_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention without care for precision, in the dtype of q: the truth in fp64, a plain run in others.

    Args:
        q: [T, Hq, D]; k, v: [Hkv, S, D]; visible: [T, S] bool.
    Returns:
        out [T, Hq, D]; lse [T, Hq].
    """
    group_size = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)  # [Hq, S, D]
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return out.transpose(0, 1), torch.logsumexp(scores, -1).transpose(0, 1)


def plain_int8_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Attention with q and the probabilities (times the scales of V) rounded to 8 bits, one scale each; see above."""

    def rounded(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (x / step).round() * step

    group_size = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)
    scores = (rounded(q).transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    v_scales = v.abs().amax(-1)  # [Hq, S]
    probs = torch.softmax(scores, -1) * v_scales[:, None, :]
    return (rounded(probs) @ (v / v_scales.clamp_min(1e-30)[..., None])).transpose(0, 1)


def assert_within_twice_plain(got: Tensor, plain: Tensor, truth: Tensor, *, num_roundings: int = 1) -> None:
    """Check a result against the same arithmetic in fp64, with the error of plain torch as the yardstick.

    Twice the error of the plain run in the same dtype is allowed, and besides it `num_roundings` of the result's dtype:
    one for the result itself, one more for each state that is merged into it. Results below 1 come from products of
    about 1, so 1 is the least that is rounded.
    """
    assert got.dtype == plain.dtype
    rounding = num_roundings * torch.finfo(got.dtype).eps * truth.abs().max().clamp(min=1.0)
    allowed = 2 * (plain.double() - truth).abs().max() + rounding
    error = (got.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
