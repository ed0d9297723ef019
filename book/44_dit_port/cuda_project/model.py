"""ClipDiT: a video diffusion transformer with rotary positions over frames, rows and columns."""

import math

import torch
import torch.nn as nn

from ops import LayerNorm, attention, norm_modulate


def precompute_freqs(frames, rows, cols, split, theta=10000.0):
    """Complex rotary table [S, head_dim / 2] for every token of the clip."""
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(cols))
    parts = []
    for axis, channels in enumerate(split):
        pair = torch.arange(0, channels, 2, dtype=torch.float64, device="cuda")
        freqs = 1.0 / theta ** (pair / channels)
        angles = torch.outer(grid[:, axis].double().cuda(), freqs)
        parts.append(torch.polar(torch.ones_like(angles), angles))
    return torch.cat(parts, dim=-1)


def apply_rotary(x, freqs):
    """x [B, S, H, D], freqs [S, D / 2] complex."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * freqs[None, :, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class TimestepEmbedder(nn.Module):
    """Sinusoids, then two linear layers."""

    def __init__(self, dim, width=256):
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.width // 2
        steps = torch.arange(half, dtype=torch.float64, device=t.device)
        freqs = torch.exp(-math.log(10000) * steps / half)
        args = t[:, None].double() * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        return self.mlp(embedding.to(self.mlp[0].weight.dtype))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, freqs):
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.heads, -1)
        q, k, v = qkv.unbind(2)  # [B, S, H, D], the layout flash_attn wants
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        return self.proj(attention(q, k, v).to(x.dtype))


class Block(nn.Module):
    def __init__(self, dim, heads, ratio=4):
        super().__init__()
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, ratio * dim), nn.GELU(approximate="tanh"), nn.Linear(ratio * dim, dim)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x, c, freqs):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(norm_modulate(x, shift1, scale1), freqs)
        return x + gate2[:, None] * self.mlp(norm_modulate(x, shift2, scale2))


class ClipDiT(nn.Module):
    def __init__(self, channels=1, frames=8, size=16, patch=4, dim=96, depth=3, heads=4, classes=12):
        super().__init__()
        self.frames, self.size, self.patch, self.channels = frames, size, patch, channels
        self.embed = nn.Conv3d(channels, dim, (1, patch, patch), (1, patch, patch))
        self.time = TimestepEmbedder(dim)
        self.label = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, channels * patch * patch)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        n = size // patch
        self.freqs = precompute_freqs(frames, n, n, (8, 8, 8))

    def forward(self, x, t, y):
        b, n, p = x.shape[0], self.size // self.patch, self.patch
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        c = self.time(t) + self.label(y)
        for block in self.blocks:
            tokens = block(tokens, c, self.freqs)
        out = self.head(self.norm(tokens))
        out = out.view(b, self.frames, n, n, p, p, self.channels)
        return out.permute(0, 6, 1, 2, 4, 3, 5).reshape(b, self.channels, self.frames, n * p, n * p)


def build_model(device="cuda", half=False, **sizes):
    model = ClipDiT(**sizes).to(device)
    if device == "cuda" and half:
        model = model.to(torch.bfloat16)
    return model
