"""A diffusion transformer (arXiv 2212.09748) for images and videos, as small as it can be read.

Module names, parameter layout and the order of the modulation are those of
facebookresearch/DiT, so its figure can be read against this file.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .rope3d import apply_rope, rope_3d

Tables = tuple[Tensor, Tensor]


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10_000) -> Tensor:
    """Sinusoids of a time: t [B] -> [B, dim] fp32, cosines then sines; an odd dim ends in 0.

    Frequency i is max_period^(-i / (dim // 2)) (arXiv 2006.11239, in DiT's order).
    """
    half = dim // 2
    scale = -math.log(max_period) / max(half, 1)
    freqs = torch.exp(scale * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * freqs  # [B, dim // 2]
    embedding = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return F.pad(embedding, (0, dim % 2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [B, S, D] scaled and shifted by the condition's [B, D]: x (1 + scale) + shift."""
    return x * (1 + scale[:, None]) + shift[:, None]


class Attention(nn.Module):
    """Self-attention over all tokens; qkv's rows are q, k, v, each by head."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"a width of {dim} does not divide by {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rope: Tables | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, H, D/H]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S, D/H]
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, S, D]


class Mlp(nn.Module):
    """Two linear layers with a tanh gelu between."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DiTBlock(nn.Module):
    """adaLN-Zero block: x [B, S, D], condition c [B, D]; the identity when it is new."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.adaLN_modulation[1].weight)  # gates of 0: the block adds nothing
        nn.init.zeros_(self.adaLN_modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor, rope: Tables | None = None) -> Tensor:
        modulation = self.adaLN_modulation(c).chunk(6, dim=1)  # six times [B, D]
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        h = self.attn(modulate(self.norm1(x), shift_attn, scale_attn), rope)
        x = x + gate_attn[:, None] * h
        h = self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x + gate_mlp[:, None] * h


class FinalLayer(nn.Module):
    """The modulated last norm, and each token's patch."""

    def __init__(self, dim: int, out: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        for layer in (self.linear, self.adaLN_modulation[1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """x [B, C, *grid] of an image or a video, t [B], labels [B] -> a tensor like x.

    grid has two sizes (rows, columns) or three (frames, rows, columns); a patch covers `patch`
    rows and columns of one frame. time_scale multiplies t: 1000 for flow matching's t in [0, 1],
    1 for DDPM's integer steps. Label num_classes stands for "no label".
    """

    def __init__(
        self, channels: int, grid: tuple[int, ...], dim: int, depth: int, num_heads: int,
        num_classes: int, patch: int = 1, time_scale: float = 1000.0,
        rope_split: tuple[int, int, int] | None = None,
    ):  # fmt: skip
        super().__init__()
        if grid[-1] % patch or grid[-2] % patch:
            raise ValueError(f"a grid of {grid} does not divide into patches of {patch}")
        self.grid, self.patch, self.channels, self.time_scale = grid, patch, channels, time_scale
        values = channels * patch * patch
        self.x_embedder = nn.Linear(values, dim)
        self.t_embedder = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(num_classes + 1, dim)
        nn.init.normal_(self.y_embedder.weight, std=0.02)
        self.blocks = nn.ModuleList(DiTBlock(dim, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(dim, values)
        sizes = [*grid[:-2], grid[-2] // patch, grid[-1] // patch]
        positions = torch.cartesian_prod(*[torch.arange(n) for n in sizes])  # [S, 2 or 3]
        if len(grid) == 2:
            positions = F.pad(positions, (1, 0))  # an image is one frame
        head_dim = dim // num_heads
        if rope_split is None and len(grid) == 3:
            third = head_dim // 6 * 2
            rope_split = (head_dim - 2 * third, third, third)
        self.has_rope = rope_split is not None
        if self.has_rope:
            cos, sin = rope_3d(positions, head_dim, rope_split)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        else:
            table = sincos_2d(positions[:, 1:], dim)  # [S, D]
            self.register_buffer("pos_embed", table, persistent=False)

    def condition(self, t: Tensor, labels: Tensor) -> Tensor:
        """The condition [B, D] of a time and a label."""
        embedded = timestep_embedding(t * self.time_scale, 256)
        return self.t_embedder(embedded) + self.y_embedder(labels)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        c = self.condition(t, labels)  # [B, D]
        tokens = self.x_embedder(to_tokens(x, self.patch))  # [B, S, D]
        rope = (self.rope_cos, self.rope_sin) if self.has_rope else None
        if not self.has_rope:
            tokens = tokens + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens, c, rope=rope)
        return from_tokens(self.final_layer(tokens, c), self.grid, self.patch)


def to_tokens(x: Tensor, patch: int) -> Tensor:
    """[B, C, (F,) R, W] -> [B, S, p*p*C], frames, rows and columns in order."""
    if x.dim() == 4:
        x = x[:, :, None]  # [B, C, 1, R, W]
    x = x.unfold(3, patch, patch).unfold(4, patch, patch)  # [B, C, F, R/p, W/p, p, p]
    return x.permute(0, 2, 3, 4, 5, 6, 1).flatten(4).flatten(1, 3)


def from_tokens(tokens: Tensor, grid: tuple[int, ...], patch: int) -> Tensor:
    """The inverse of to_tokens: [B, S, p*p*C] -> [B, C, *grid]."""
    frames = grid[0] if len(grid) == 3 else 1
    rows, columns = grid[-2] // patch, grid[-1] // patch
    x = tokens.unflatten(1, (frames, rows, columns)).unflatten(4, (patch, patch, -1))
    x = x.permute(0, 6, 1, 2, 4, 3, 5)  # [B, C, F, R/p, p, W/p, p]
    return x.reshape(tokens.shape[0], -1, *grid)


def sincos_2d(positions: Tensor, dim: int) -> Tensor:
    """Fixed position embedding: rows then columns, sines then cosines. [S, 2] -> [S, dim]."""
    quarter = dim // 4
    freqs = 10_000 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = positions.float()[..., None] * freqs  # [S, 2, dim/4]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)
