"""Fused kernels, with fallbacks for machines where they were not built."""

import os

import torch
import torch.nn.functional as F

_LIB = os.path.join(os.path.dirname(__file__), "build", "libclipdit_ops.so")
HAS_FUSED = os.path.exists(_LIB)
if HAS_FUSED:
    torch.ops.load_library(_LIB)

try:
    from apex.normalization import FusedLayerNorm as LayerNorm
except ImportError:
    from torch.nn import LayerNorm

from flash_attn import flash_attn_func


def norm_modulate(x, shift, scale, eps=1e-6):
    """LayerNorm and adaLN modulation in one pass. x [B, S, D], shift and scale [B, D]."""
    if x.is_cuda and HAS_FUSED:
        return torch.ops.clipdit.norm_modulate(x, shift, scale, eps)
    h = F.layer_norm(x, x.shape[-1:], eps=eps)
    return h * scale[:, None] + shift[:, None]


def attention(q, k, v):
    """q, k, v [B, S, H, D] -> [B, S, H * D]."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        q, k, v = q.half(), k.half(), v.half()
    out = flash_attn_func(q, k, v, dropout_p=0.0, causal=False)
    return out.flatten(2)


def cross_frame_attention(q, k, v):
    """The same through torch's own kernel, for the ablation without flash_attn."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


__all__ = ["LayerNorm", "attention", "cross_frame_attention", "norm_modulate"]
