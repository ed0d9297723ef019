"""What public code showed: ``# !`` marks every line that must be found, the rest must not be.

Each case: (name, code, rules). ``import torch`` is not added.
"""

FIELD: list[tuple[str, str, set[str]]] = [
    ("a default branch makes float64", """
import torch
def rotary(dim, pos, freqs_dtype=torch.float32):
    freqs = torch.arange(0, dim, 2, dtype=freqs_dtype, device=pos.device) / dim  # !
    return torch.outer(pos, freqs).cos().float()
class Embed(torch.nn.Module):
    def forward(self, ids):
        dtype = torch.float32 if ids.device.type == "mps" else torch.float64
        return rotary(16, ids[:, 0], freqs_dtype=dtype)
""", {"float64"}),
    ("either dtype, whichever comes first", """
import torch
def f(x, wide):
    kind = torch.float32 if wide else torch.float64
    return torch.zeros(3, dtype=kind, device=x.device)  # !
""", {"float64"}),
    ("a default that is float64", """
import torch
def f(x, kind=torch.float64):
    return torch.zeros(3, dtype=kind, device=x.device)  # !
""", {"float64"}),
    ("float64 on the cpu alone", """
import torch
def f(x):
    kind = torch.float64 if x.device.type == "cpu" else torch.float32
    return torch.zeros(3, dtype=kind, device=x.device)
""", set()),
    ("a parameter that is never given float64", """
import torch
def f(x, kind=torch.float32):
    return torch.zeros(3, dtype=kind, device=x.device)
def g(x):
    return f(x, torch.bfloat16)
""", set()),
    ("the device of a tensor on the host", """
import torch
def table(d, end):
    with torch.device("cpu"):
        freqs = 1.0 / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)
        return torch.outer(torch.arange(end, device=freqs.device, dtype=torch.float64), freqs)
""", set()),
    ("an array where a tensor is expected", """
import numpy as np, torch
image = np.array([[1, 2]], np.uint8)
mask = torch.ones_like(image, dtype=torch.float32); n = torch.nn.Linear(2, 2).cuda()  # !
m = torch.nn.Linear(2, 2).cuda()  # !
""", {"cuda-method"}),
    ("flash-attn imported where it may be missing, every use", """
import torch
try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func as varlen  # !
    from flash_attn.layers.rotary import apply_rotary_emb  # !
except ImportError:
    flash_attn_func = None
def f(q, k, v, cu):
    if varlen is not None:
        return varlen(q, k, v, cu)  # !
    return apply_rotary_emb(q, k, v)  # !
""", {"optional-cuda-library"}),
    ("flash-attn handed on", """
from flash_attn import flash_attn_with_kvcache, flash_attn_func  # !
from flash_attn.modules.mha import MHA  # !
attend = flash_attn_func  # !
class Mine(MHA):  # !
    def forward(self, q, cache):
        return flash_attn_with_kvcache(q, *cache)  # !
""", {"cuda-library"}),
    ("xformers, every use", """
import xformers.ops as xops  # !
def f(q, k, v):
    bias = xops.LowerTriangularMask()  # !
    return xops.memory_efficient_attention(q, k, v, attn_bias=bias)  # !
""", {"cuda-library"}),
    ("apex where it may be missing", """
import torch
try:
    from apex import amp  # !
except ImportError:
    amp = None
def f(model, opt, loss):
    model, opt = amp.initialize(model, opt)  # !
    with amp.scale_loss(loss, opt) as scaled:  # !
        scaled.backward()
""", {"optional-cuda-library"}),
    ("a compiled module, however imported", """
import torch
import roi_align_cuda  # !
from . import _C  # !
from mylib._C import rms_norm  # !
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = roi_align_cuda.forward(x)  # !
        return _C.pool(y) + rms_norm(x)  # !
""", {"cuda-extension"}),
    ("what a just-in-time build gives", """
import os
from torch.utils.cpp_extension import load, load_inline
fused = load(name="fused", sources=["f.cpp", "f.cu"])  # !
def f(x):
    return fused.bias_act(x)  # !
def g(src, x):
    ext = load_inline(name="ext", cpp_sources=src, cuda_sources=src)  # !
    return ext.run(x)  # !
""", {"cuda-extension"}),
    ("names that only look compiled", """
import torch
from torch._C import _nn
from mylib import use_cuda, _CONFIG
def f(x):
    return x if use_cuda else _nn
""", set()),
    ("C++ alone", """
from torch.utils.cpp_extension import load
k = load("k", ["k.cpp"])
def f(x):
    return k.run(x)
""", set()),
    ("products of complex numbers", """
import torch
def rotate(x, a, other):
    turned = torch.view_as_complex(x) * torch.polar(torch.ones_like(a), a)  # !
    y = x.view_as_complex()  # !
    z = y * other  # !
    return torch.view_as_real(z) * 2
""", {"complex"}),
    ("a spectrum of an unknown kind", """
import torch
def f(x, w):
    s = torch.stft(x, 512, window=w)  # !
    return s.abs() * 2
""", {"complex"}),
    ("real parts are real", """
import torch
def f(x):
    s = torch.fft.rfft(x)  # !
    return s.real * 2 + torch.abs(s) * 3 + s.abs() * 4
""", {"complex"}),
    ("Inductor's options", """
import torch._inductor.config as config
import torch
config.coordinate_descent_tuning = True  # !
torch._inductor.config.triton.unique_kernel_names = True  # !
""", {"inductor-config"}),
    ("flex_attention", """
import torch
from torch.nn.attention.flex_attention import flex_attention, create_block_mask
def f(q, k, v, m):
    mask = create_block_mask(m, 1, 1, 8, 8)  # !
    return flex_attention(q, k, v, block_mask=mask)  # !
""", {"flex-attention"}),
    ("autocast under other names", """
import torch
import torch.cuda.amp as amp
from torch.cuda import amp as two
from torch.cuda.amp import autocast as three, custom_fwd
half = torch.cuda.amp.autocast  # !
class M:
    @two.autocast()  # !
    def a(self):
        with amp.autocast(enabled=False):  # !
            pass
        with three(dtype=torch.float16):  # !
            pass
        with half():  # !
            pass
    @custom_fwd  # !
    def b(self):
        s = amp.grad_scaler.GradScaler()  # !
""", {"cuda-autocast", "autocast-off", "cuda-grad-scaler"}),
    ("checkpoints without map_location", """
import torch
def f(path):
    a = torch.load(path)  # !
    b = torch.load(path, weights_only=True)["model"]  # !
    c = torch.load(path, map_location="cpu")
    d = torch.load(path, "cpu")
    return a, b, c, d
def g(path, **options):
    return torch.load(path, **options)
""", {"load-device"}),
    ("DataParallel", """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
def f(model):
    return nn.DataParallel(model)  # !
def g(model):
    return DistributedDataParallel(model)
""", {"data-parallel"}),
    ("fused optimizers", """
import torch
def f(p, use):
    a = torch.optim.AdamW(p, fused=True)  # !
    b = torch.optim.Adam(p, fused=use)  # !
    return a, b, torch.optim.AdamW(p, fused=False), torch.optim.AdamW(p)
""", {"fused-optimizer"}),
    ("3-D convolutions in bf16, as a class too", """
import torch
from torch import nn
dtype = torch.bfloat16
class CausalConv3d(nn.Conv3d):  # !
    pass
up = nn.ConvTranspose3d(3, 4, 3)  # !
""", {"bf16-conv3d"}),
    ("an integer as device_id", """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def f(model, local_rank):
    dist.init_process_group("hccl", device_id=local_rank)  # !
    return FSDP(model, device_id=local_rank)  # !
def g(model, device):
    return FSDP(model, device_id=device)
""", {"int-device-id", "bare-int-device"}),
    ("NCCL's variables as strings", """
import os
names = ["NCCL_IB_HCA", "MASTER_ADDR"]  # !
lines = ["export NCCL_SOCKET_IFNAME=eth0"]  # !
note = "see NCCL_IB_HCA in the manual"
""", {"cuda-env"}),
    ("TorchScript and channels_last", """
import torch
@torch.jit.script  # !
def f(x: torch.Tensor) -> torch.Tensor:
    return x
def g(model, x):
    model = model.to(memory_format=torch.channels_last)  # !
    return model(x.contiguous(memory_format=torch.channels_last_3d))  # !
def h(x):
    return x.contiguous(memory_format=torch.contiguous_format)
""", {"jit-script", "channels-last"}),
    ("autocast that is switched off", """
import torch
def f(on):
    with torch.autocast("cuda", enabled=False):  # !
        pass
    with torch.autocast("cpu", enabled=False):
        pass
""", {"autocast-off"}),
    ("a default that is replaced", """
import torch
def f():
    device = "cuda"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    return device
def g(is_npu):
    device = torch.device("cuda")
    if is_npu:
        device = torch.device("npu")
    return device
def h(other):
    device = "cuda"  # !
    if other:
        device = "cpu"
    return device
""", {"cuda-device"}),
    ("torch_npu is tried first", """
import torch
try:
    import torch_npu
    device = torch.device("npu")
except ImportError:
    device = torch.device("cuda")
""", set()),
    ("what cuDNN can do", """
import torch
def f(model):
    if torch.backends.cudnn.is_available():
        return torch.backends.cuda.is_built()
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] > 7  # !
""", {"cuda-or-cpu"}),
    ("the cpu is taken, nothing breaks", """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"  # !
x = torch.zeros(3, device=device)
""", {"cuda-or-cpu"}),
]  # fmt: skip
