"""Attention under any mask, tile by tile: grouped heads, windows, packed documents.

A mask is a function ``sees(i, j) -> bool`` of the positions of queries and keys, as FlexAttention's
mask_mod is without batch and head. Tiles that it empties are skipped, tiles that it leaves whole
are not masked.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Sees = Callable[[Tensor, Tensor], Tensor]


def causal(i: Tensor, j: Tensor) -> Tensor:
    """Query i sees the keys up to its own position."""
    return j <= i


def sliding_window(size: int) -> Sees:
    """Query i sees the last `size` keys, its own among them."""
    return lambda i, j: (j <= i) & (j > i - size)


def documents(lengths: list[int], device: torch.device | None = None) -> Sees:
    """Documents behind each other in one row (varlen): causal, and nobody sees another document."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    return lambda i, j: (j <= i) & (ids[i] == ids[j])


def block_kinds(
    sees: Sees, rows: int, cols: int, block_q: int, block_k: int, device: torch.device | None = None
) -> Tensor:
    """[tiles of queries, tiles of keys] on the host: 0 skipped, 1 cut by the mask, 2 whole."""
    kinds = torch.zeros(-(-rows // block_q), -(-cols // block_k), dtype=torch.int64)
    for r, i in enumerate(torch.arange(rows, device=device).split(block_q)):
        for c, j in enumerate(torch.arange(cols, device=device).split(block_k)):
            seen = sees(i[:, None], j)
            kinds[r, c] = int(bool(seen.any())) + int(bool(seen.all()))
    return kinds


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Sees, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] and lse [B, H, S]; k and v [B, Hkv, T, D], head h reads h // (H / Hkv).

    A query that sees no key gives 0 and -inf. No tensor of S x T is made.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not divide by {k.shape[1]} kv heads")
    kinds = block_kinds(sees, q.shape[2], k.shape[2], block_q, block_k, q.device)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, S, D]: k and v are not repeated
    outs, lses = [], []
    for r, i in enumerate(torch.arange(q.shape[2], device=q.device).split(block_q)):
        q_tile = grouped[..., i[0] : i[-1] + 1, :].float() * q.shape[-1] ** -0.5
        m = torch.full(q_tile.shape[:-1], -torch.inf, device=q.device)  # [B, Hkv, G, bq]
        total, o = torch.zeros_like(m), torch.zeros(*m.shape, v.shape[-1], device=q.device)
        for c, j in enumerate(torch.arange(k.shape[2], device=q.device).split(block_k)):
            if kinds[r, c] == 0:
                continue
            k_tile, v_tile = (x[:, :, None, j[0] : j[-1] + 1].float() for x in (k, v))
            scores = q_tile @ k_tile.transpose(-1, -2)  # [B, Hkv, G, bq, bk]
            if kinds[r, c] == 1:
                scores = scores.masked_fill(~sees(i[:, None], j), -torch.inf)
            m_new = torch.maximum(m, scores.amax(-1))
            safe = torch.where(m_new == -torch.inf, 0.0, m_new)
            p, old = torch.exp(scores - safe[..., None]), torch.exp(m - safe)
            total, o, m = total * old + p.sum(-1), o * old[..., None] + p @ v_tile, m_new
        outs.append(o / torch.where(total > 0, total, 1.0)[..., None])
        lses.append(m + torch.log(total))
    out = torch.cat(outs, dim=-2).flatten(1, 2)
    return out.to(q.dtype), torch.cat(lses, dim=-1).flatten(1, 2)
