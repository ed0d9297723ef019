"""A tiny DiT built like Step-Video's (arXiv 2502.10248), for `sb.match(model, "step-video")`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads)
        self.k_norm = nn.RMSNorm(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wkv = nn.Linear(width, 2 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads)
        self.k_norm = nn.RMSNorm(width // heads)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q = self.q_norm(self.wq(x).unflatten(-1, (self.heads, -1)))
        k, v = self.wkv(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        y = attend(q.transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2))
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn1 = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn2 = CrossAttention(width, heads)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale_shift_table = nn.Parameter(torch.randn(6, width))

    def forward(self, x: Tensor, text: Tensor, steer: Tensor) -> Tensor:
        table = self.scale_shift_table + steer.unflatten(-1, (6, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = table.unsqueeze(2).unbind(1)
        x = x + gate1 * self.attn1(self.norm1(x) * (1 + scale1) + shift1)
        x = x + self.attn2(x, text)
        return x + gate2 * self.ff(self.norm2(x) * (1 + scale2) + shift2)


class Sines(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.arange(8)
        return torch.cat([angle.cos(), angle.sin()], -1)


class StepVideo(nn.Module):
    def __init__(self, width: int = 24, heads: int = 2, text: int = 20, depth: int = 2):
        super().__init__()
        self.pos_embed = nn.Conv2d(4, width, 1)
        self.sines = Sines()
        self.t_embedder = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.adaln_single = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.caption = nn.Sequential(nn.Linear(text, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width))
        self.proj_out = nn.Linear(width, 4)

    def forward(self, video: Tensor, text: Tensor, t: Tensor) -> Tensor:
        batch, frames, _, height, width = video.shape
        x = self.pos_embed(video.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = x.unflatten(0, (batch, frames)).flatten(1, 2)
        time = self.t_embedder(self.sines(t))
        text, steer = self.caption(text), self.adaln_single(time)
        for block in self.blocks:
            x = block(x, text, steer)
        shift, scale = (self.scale_shift_table + time[:, None]).unsqueeze(2).unbind(1)
        x = self.proj_out(self.norm_out(x) * (1 + scale) + shift)
        return x.transpose(1, 2).unflatten(-1, (frames, height, width)).transpose(1, 2)


def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its inputs: a latent of 3 frames of 4 x 4, a text of 5 tokens, a time each."""
    return StepVideo(), (torch.randn(2, 3, 4, 4, 4), torch.randn(2, 5, 20), torch.rand(2))
