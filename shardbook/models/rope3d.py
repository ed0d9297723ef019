"""Rotary positions over frames, rows and columns, with real numbers only.

A complex rotary embedding multiplies by exp(i angle); NPUs have few complex kernels, and a pair of
real channels turned by cos and sin is the same thing (arXiv 2104.09864).
"""

import torch
from torch import Tensor


def rope_3d(positions: Tensor, head_dim: int, split: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """positions [S, 3] (frame, row, column) -> cos and sin tables [S, head_dim], fp32.

    split says how many channels turn with each axis. The blocks of the axes stand in order;
    inside one, channels 2i and 2i+1 are a pair and turn by position * 10000^(-2i / channels).
    ValueError where the split is odd or does not sum to head_dim.
    """
    if sum(split) != head_dim or any(n % 2 for n in split):
        raise ValueError(
            f"a split of {tuple(split)} does not fit a head of {head_dim}: "
            "expected even numbers that sum to it"
        )
    angles = []
    for axis, channels in enumerate(split):
        pair = torch.arange(channels // 2, dtype=torch.float32, device=positions.device)
        freqs = 10_000.0 ** (-2 * pair / max(channels, 1))  # [channels / 2]
        angles.append(positions[:, axis, None].float() * freqs)  # [S, channels / 2]
    angle = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)  # [S, head_dim]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels: x [B, H, S, D], cos and sin [S, D] -> like x."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()  # [B, H, S, D/2]
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)  # (x0, x1) -> (-x1, x0)
    return (x.float() * cos + turned * sin).to(x.dtype)
