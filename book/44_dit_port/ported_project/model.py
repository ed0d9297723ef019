"""ClipDiT: a video diffusion transformer with rotary positions over frames, rows and columns."""

import math

import torch
from torch import nn

from ops import attention, norm_modulate


def rotary_tables(frames, rows, cols, split, theta=10000.0):
    """Real cos and sin tables [S, head_dim], fp32, on the host; they move with the model."""
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(cols))
    parts = []
    for axis, channels in enumerate(split):
        freqs = theta ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
        parts.append(torch.outer(grid[:, axis].float(), freqs))
    angles = torch.cat(parts, dim=-1).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x, cos, sin):
    """x [B, S, H, D]; channels 2i and 2i+1 turn together."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * cos[None, :, None] + turned * sin[None, :, None]).type_as(x)


class TimestepEmbedder(nn.Module):
    """Sinusoids, then two linear layers."""

    def __init__(self, dim, width=256):
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.width // 2
        steps = torch.arange(half, dtype=torch.float32, device=t.device)
        freqs = torch.exp(-math.log(10000) * steps / half)
        args = t[:, None].float() * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        return self.mlp(embedding.to(self.mlp[0].weight.dtype))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).unbind(2)  # [B, S, H, D]
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.proj(attention(q, k, v))


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

    def forward(self, x, c, cos, sin):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(norm_modulate(x, shift1, scale1), cos, sin)
        return x + gate2[:, None] * self.mlp(norm_modulate(x, shift2, scale2))


class ClipDiT(nn.Module):
    def __init__(
        self, channels=1, frames=8, size=16, patch=4, dim=96, depth=3, heads=4, classes=12
    ):
        super().__init__()
        self.frames, self.size, self.patch, self.channels = frames, size, patch, channels
        # patches lie inside a frame: a linear layer over them is the 3-D convolution of the
        # original, without its bf16 kernel
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.time = TimestepEmbedder(dim)
        self.label = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, channels * patch * patch)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        n = size // patch
        cos, sin = rotary_tables(frames, n, n, (8, 8, 8))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x, t, y):
        b, n, p = x.shape[0], self.size // self.patch, self.patch
        patches = x.view(b, self.channels, self.frames, n, p, n, p)
        patches = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)  # [B, S, C*p*p]
        tokens = self.embed(patches)
        c = self.time(t) + self.label(y)
        for block in self.blocks:
            tokens = block(tokens, c, self.cos, self.sin)
        out = self.head(self.norm(tokens))
        out = out.view(b, self.frames, n, n, p, p, self.channels)
        return out.permute(0, 6, 1, 2, 4, 3, 5).reshape(b, self.channels, self.frames, n * p, n * p)


def from_original(state):
    """A state dict of the original: its 3-D convolution as the linear layer."""
    state = dict(state)
    if state["embed.weight"].dim() == 5:
        state["embed.weight"] = state["embed.weight"].flatten(1)
    return state


def build_model(device, **sizes):
    return ClipDiT(**sizes).to(device)
