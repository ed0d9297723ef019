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
]  # fmt: skip
