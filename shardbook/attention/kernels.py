"""One call for attention that takes the fused kernel of the device at hand.

Shapes are [B, H, S, D], kv heads may be fewer, causal is bottom-right aligned everywhere.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor


def kernel_for(q: Tensor) -> str:
    """ "npu_fusion_attention", "flash_attn" or "sdpa": what `attend` will call for q."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "npu" and hasattr(torch.ops.npu, "npu_fusion_attention"):
        return "npu_fusion_attention" if half else "sdpa"
    if q.is_cuda and half and importlib.util.find_spec("flash_attn"):
        return "flash_attn"
    return "sdpa"


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention [B, H, S, D] scaled by D^-0.5, by the kernel that `kernel_for` names.

    A causal query that sees no key (S > T) gives 0. ValueError where heads don't divide by kv
    heads.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not divide by {k.shape[1]} kv heads")
    kernel = kernel_for(q)
    if kernel == "npu_fusion_attention":
        return _npu(q, k, v, causal)
    if kernel == "flash_attn":
        return _flash_attn(q, k, v, causal)
    return _sdpa(q, k, v, causal)


def hidden(rows: int, cols: int, device: torch.device) -> Tensor:
    """[S, T] bool, True where a causal query must NOT look, bottom-right aligned."""
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(cols - rows + 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's own: its is_causal is top-left, so other lengths need a mask (True = look)."""
    grouped = q.shape[1] != k.shape[1]
    rows, cols = q.shape[2], k.shape[2]
    if not causal or rows == cols:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    look = ~hidden(rows, cols, q.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=look, enable_gqa=grouped)
    return out.masked_fill(~look.any(-1)[:, None], 0.0)  # a row without keys


def _npu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch_npu's: scale defaults to 1, the mask is inverted (True = hide), it does not broadcast.

    Layout BNSD is ours. It takes grouped kv heads as they are.
    """
    mask = hidden(q.shape[2], k.shape[2], q.device) if causal else None
    out = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[1], "BNSD", atten_mask=mask, scale=q.shape[-1] ** -0.5
    )[0]
    if causal and q.shape[2] > k.shape[2]:
        out = out.masked_fill(mask.all(-1)[:, None], 0.0)
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The flash-attn package: [B, S, H, D], bottom-right since version 2.1."""
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=causal).transpose(1, 2)
