"""Runs parts of a CUDA-only project on the CPU: numbers to compare a port with."""

import importlib
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def modules(folder: str | Path, *names: str) -> types.SimpleNamespace:
    """Import modules of a folder that import each other by plain names; nothing stays behind.

    Two projects may both have a `model.py`: each call returns modules of its own.
    """
    folder = str(folder)
    own = {p.stem for p in Path(folder).glob("*.py")}
    saved = {n: sys.modules.pop(n) for n in own if n in sys.modules}
    sys.path.insert(0, folder)
    try:
        found = {n: importlib.import_module(n) for n in names}
    finally:
        sys.path.remove(folder)
        for n in own:
            sys.modules.pop(n, None)
        sys.modules.update(saved)
    return types.SimpleNamespace(**found)


def stub_cuda_libraries() -> None:
    """flash_attn and apex as far as the project uses them, from torch's operations on the CPU."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False
    ) -> Tensor:
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))  # its layout is [B, S, H, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).half()

    for name, members in {
        "flash_attn": {"flash_attn_func": flash_attn_func},
        "apex": {},
        "apex.normalization": {"FusedLayerNorm": nn.LayerNorm},
        "apex.optimizers": {"FusedAdam": torch.optim.Adam},
    }.items():
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(members)


class CudaAsCpu(TorchFunctionMode):
    """Inside it, `device="cuda"` and `.cuda()` mean the CPU: a reference, not a port."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
