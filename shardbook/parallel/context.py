"""Attention over a sequence that is cut over the ranks: who holds what, and partial softmax.

Shapes are [B, H, S, D], S being one rank's part of the sequence. k and v may have fewer heads
(grouped queries): query head h reads kv head h // (H / Hkv).
"""

import torch
from torch import Tensor

from ..tracing.record import mark


def shard_positions(seq_len: int, world_size: int, rank: int, zigzag: bool = False) -> Tensor:
    """The positions [S/P] in the whole sequence that this rank holds, in its order (int64)."""
    pieces = 2 * world_size if zigzag else world_size
    if seq_len % pieces:
        raise ValueError(
            f"a sequence of {seq_len} does not divide into {pieces} equal pieces: "
            "pad it, or choose another world size"
        )
    size = seq_len // pieces
    held = [rank, pieces - 1 - rank] if zigzag else [rank]
    return torch.cat([torch.arange(i * size, (i + 1) * size) for i in held])


def zigzag_shard(x: Tensor, world_size: int, rank: int, dim: int) -> Tensor:
    """Chunks r and 2P-1-r of 2P: an early and a late one, so causal work is equal on all ranks."""
    positions = shard_positions(x.shape[dim], world_size, rank, zigzag=True)
    return x.index_select(dim, positions.to(x.device))


def zigzag_unshard(shards: list[Tensor], dim: int) -> Tensor:
    """The whole tensor from the zigzag shards of all ranks, in rank order."""
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each.

    out [B, H, S, D], lse [B, H, S] the log-sum-exp of the scores. Only exponentials of
    differences that are at most 0 are taken, so no size of lse overflows. A side that saw no key
    has lse -inf; two such sides give out 0 and lse -inf.
    """
    high, low = torch.maximum(lse_a, lse_b), torch.minimum(lse_a, lse_b)  # [B, H, S]
    nothing = high == -torch.inf
    high = torch.where(nothing, 0.0, high)  # -inf - -inf would be nan
    lse = high + torch.log1p(torch.exp(low - high))
    weight_a, weight_b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    out = weight_a[..., None] * out_a + weight_b[..., None] * out_b
    return out.to(out_a.dtype), torch.where(nothing, -torch.inf, lse)


@mark("block")
def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Some queries against some keys: out [B, H, S, D] in fp32 and lse [B, H, S].

    causal is bottom-right aligned: the last query sees every key.
    """
    scores = _scores(q, k, causal)  # [B, Hkv, G, S, T]
    lse = torch.logsumexp(scores, dim=-1)  # [B, Hkv, G, S]
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("bhgst,bhtd->bhgsd", weights, v.float())
    return out.flatten(1, 2), lse.flatten(1, 2)


@mark("block backward")
def block_attention_backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the same queries and keys, given the lse over ALL keys (arXiv 2205.14135).

    grad [B, H, S, D] of the whole output, delta [B, H, S] = sum of grad * out. With the weights
    p = exp(scores - lse): dv = p^T grad, ds = p (grad v^T - delta), dq = ds k, dk = ds^T q.
    """
    group = (k.shape[1], -1)
    weights = torch.exp(_scores(q, k, causal) - lse.unflatten(1, group)[..., None])
    grad = grad.float().unflatten(1, group)  # [B, Hkv, G, S, D]
    dv = torch.einsum("bhgst,bhgsd->bhtd", weights, grad)
    dweights = torch.einsum("bhgsd,bhtd->bhgst", grad, v.float())
    dscores = weights * (dweights - delta.unflatten(1, group)[..., None]) * q.shape[-1] ** -0.5
    dq = torch.einsum("bhgst,bhtd->bhgsd", dscores, k.float()).flatten(1, 2)
    dk = torch.einsum("bhgst,bhgsd->bhtd", dscores, q.float().unflatten(1, group))
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores [B, Hkv, G, S, T] in fp32, -inf where a query must not look."""
    q = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, S, D]
    scores = torch.einsum("bhgsd,bhtd->bhgst", q, k.float()) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        above = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores
