"""The small language model that every parallel chapter trains, and the task it learns.

About 107k parameters at the default sizes. It has what the chapters cut: fused q, k, v with fewer
kv heads if asked, an MLP, norms, an embedding and a head. Positions enter through a rotary
embedding, so a rank that holds a part of the sequence only has to pass its own positions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary embedding (arXiv 2104.09864). x [B, H, S, D], positions [S] or [B, S]; real, fp32."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # [D/2]
    angle = positions[..., None].float() * freq  # [S, D/2] or [B, S, D/2]
    if angle.dim() == 3:
        angle = angle[:, None]  # [B, 1, S, D/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA with grouped kv heads. q [B, H, S, D], k and v [B, Hkv, S, D]."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


class Attention(nn.Module):
    """Causal self-attention; `attend` can be replaced (ring attention, Ulysses, flash)."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim)
        self.out = nn.Linear(dim, dim)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H+2Hkv, S, D]
        q, k, v = qkv.split(sizes, dim=1)
        out = self.attend(rotate(q, positions), rotate(k, positions), v)  # [B, H, S, D]
        return self.out(out.transpose(1, 2).flatten(2))  # [B, S, H*D]


class MLP(nn.Module):
    """Two linear layers with a gelu between."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, num_kv_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    """tokens [B, S] -> logits [B, S, vocab]."""

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden: int | None = None,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, num_kv_heads or num_heads, hidden or 4 * dim)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)  # [B, S, D]
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))  # [B, S, V]


def tiny_lm(seed: int = 0, **sizes) -> TinyLM:
    """A TinyLM whose weights depend on the seed only, the same on every rank and device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyLM(**sizes)


def counting_batch(
    step: int, batch: int = 4, seq: int = 64, vocab: int = 64
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, S] of (start + k i) mod vocab, start and k (1 to 4) drawn by step.

    On the CPU, so that every rank can draw the same batch and keep its part.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocab, (batch, 1), generator=generator)
    stride = torch.randint(1, 5, (batch, 1), generator=generator)
    sequence = (start + stride * torch.arange(seq + 1)) % vocab  # [B, S+1]
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens: logits [B, S, V], targets [B, S]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
