"""FlashAttention (arXiv 2205.14135, 2307.08691) in plain torch: exact attention, block by block.

Shapes are [B, H, S, D]; k and v have T positions. Inputs in fp32 or bf16, sums in fp32. causal is
bottom-right aligned, as the flash-attn package does it: the last query sees every key, query i
sees keys up to i + T - S. A row that sees none gives 0 and lse -inf. Scores are scaled by D^-0.5.
No tensor of shape [S, T] is ever made.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..tracing.record import mark


def online_softmax_dot(scores: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values in one pass: scores [S], values [S, D] -> out [D], lse scalar.

    Keeps a running maximum m, the sum l of exp(score - m) and the weighted sum o; when m grows,
    what was summed is rescaled by exp(m_old - m_new) (arXiv 1805.02867).
    """
    m = torch.full((), -torch.inf, device=scores.device)
    total = torch.zeros((), device=scores.device)
    out = torch.zeros(values.shape[1], device=values.device)  # [D]
    for s, v in zip(scores.split(block), values.split(block), strict=True):
        m_new = torch.maximum(m, s.float().max())
        if m_new == -torch.inf:
            continue  # nothing to see yet; exp(-inf - -inf) would be nan
        old, p = torch.exp(m - m_new), torch.exp(s.float() - m_new)  # scalar, [block]
        total = total * old + p.sum()
        out = out * old + p @ v.float()
        m = m_new
    seen = total > 0
    lse = torch.where(seen, m + torch.log(total), -torch.inf)
    return torch.where(seen, out / total, 0.0).to(values.dtype), lse


def row_of_tiles(
    rows: slice, cols: int, causal: bool, shift: int, block_k: int
) -> Iterator[tuple[slice, bool]]:
    """The key tiles that a tile of queries meets: (keys, whether the mask cuts through).

    Query i sees keys up to i + shift. With causal masking a tile above the diagonal is never
    visited.
    """
    seen = min(cols, rows.stop + shift) if causal else cols  # keys the last query sees
    for start in range(0, seen, block_k):
        end = min(start + block_k, cols)
        yield slice(start, end), causal and end > rows.start + shift + 1  # the first sees fewer


def tiles(
    rows: int, cols: int, causal: bool, block_q: int, block_k: int
) -> Iterator[tuple[slice, slice, bool]]:
    """All tiles that hold something to compute, row by row: (queries, keys, cut by the mask)."""
    for start in range(0, rows, block_q):
        tile = slice(start, min(start + block_q, rows))
        for keys, masked in row_of_tiles(tile, cols, causal, cols - rows, block_k):
            yield tile, keys, masked


def _scores(q: Tensor, k: Tensor, rows: slice, cols: slice, masked: bool, shift: int) -> Tensor:
    """One tile of scaled scores [B, H, rows, cols] in fp32, -inf where the mask hides."""
    scores = q[:, :, rows].float() @ k[:, :, cols].float().transpose(-1, -2)
    scores *= q.shape[-1] ** -0.5
    if masked:
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=q.device)
        scores.masked_fill_(j > i + shift, -torch.inf)
    return scores


def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] in q's dtype and the log-sum-exp of the scores [B, H, S] in fp32.

    Two loops, as in FlashAttention-2: a tile of queries keeps its maximum m, its sum l and its
    output o while all its keys pass by, and writes them once. Each step is a mark in a trace.
    """
    _alike(q, k, v)
    shape, shift = q.shape, k.shape[2] - q.shape[2]
    out = torch.empty(*shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(shape[:3], device=q.device)  # [B, H, S]
    for start in range(0, shape[2], block_q):
        rows = slice(start, min(start + block_q, shape[2]))
        m = torch.full((*shape[:2], rows.stop - start), -torch.inf, device=q.device)  # [B, H, bq]
        l = torch.zeros_like(m)
        o = torch.zeros(*m.shape, v.shape[3], device=q.device)  # [B, H, bq, D]
        for cols, masked in row_of_tiles(rows, k.shape[2], causal, shift, block_k):
            with mark(f"q {rows.start} k {cols.start}{' masked' if masked else ''}"):
                scores = _scores(q, k, rows, cols, masked, shift)  # [B, H, bq, bk]
                m_new = torch.maximum(m, scores.amax(dim=-1))
                safe = torch.where(m_new == -torch.inf, 0.0, m_new)  # a row that sees nothing yet
                p = torch.exp(scores.sub_(safe[..., None]))  # [B, H, bq, bk]
                old = torch.exp(m - safe)  # what is there shrinks by this
                l = l * old + p.sum(dim=-1)
                o = o * old[..., None] + p @ v[:, :, cols].float()
                m = m_new
        out[:, :, rows] = o / torch.where(l > 0, l, 1.0)[..., None]  # no key: 0
        lse[:, :, rows] = m + torch.log(l)  # no key: -inf
    return out, lse


def flash_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool = False, block_q: int = 64, block_k: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in the inputs' dtypes; the weights are computed again from q, k and lse.

    With p = exp(scores - lse) and delta_i = sum_d grad_out * out: dv = p^T grad_out,
    ds = p (grad_out v^T - delta), dq = ds k D^-0.5, dk = ds^T q D^-0.5.
    """
    _alike(q, k, v)
    shift, scale = k.shape[2] - q.shape[2], q.shape[3] ** -0.5
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    delta = (grad_out.float() * out.float()).sum(dim=-1)  # [B, H, S]
    lse = torch.where(lse == -torch.inf, torch.inf, lse)  # a row that sees nothing: all p are 0
    for rows, cols, masked in tiles(q.shape[2], k.shape[2], causal, block_q, block_k):
        with mark(f"backward q {rows.start} k {cols.start}"):
            p = torch.exp(_scores(q, k, rows, cols, masked, shift).sub_(lse[:, :, rows, None]))
            grad = grad_out[:, :, rows].float()  # [B, H, bq, D]
            dv[:, :, cols] += p.transpose(-1, -2) @ grad
            dp = grad @ v[:, :, cols].float().transpose(-1, -2)  # [B, H, bq, bk]
            ds = p * (dp - delta[:, :, rows, None]) * scale
            dq[:, :, rows] += ds @ k[:, :, cols].float()
            dk[:, :, cols] += ds.transpose(-1, -2) @ q[:, :, rows].float()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse = flash_attention_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *flash_attention_backward(grad, *ctx.saved_tensors, causal=ctx.causal), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Differentiable attention [B, H, S, D] that saves q, k, v, out and lse, nothing of S x T."""
    return _Flash.apply(q, k, v, causal)


def attention_io(seq_len: int, head_dim: int, sram_elements: int, flash: bool) -> int:
    """Elements moved to and from device memory for one head, forward (arXiv 2205.14135, thm 2).

    Standard attention reads or writes scores and weights four times: 4 N^2 + 4 N d. Tiled, q and
    out move once and k and v once per row of tiles, M / 4d rows each: 2 N d + 2 N d ceil(N / rows).
    """
    n, d = seq_len, head_dim
    if not flash:
        return 4 * n * n + 4 * n * d
    rows = max(1, sram_elements // (4 * d))
    return 2 * n * d + 2 * n * d * -(-n // rows)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: expected "
            "[B, H, S, D], [B, H, T, D] and [B, H, T, Dv]"
        )
