"""Which accelerator this process uses, asked in one place: npu, else cuda, else cpu.

Import this before torch: a torch_npu wheel without CANN would break ``import torch`` itself.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
import torch.distributed as dist


def device() -> torch.device:
    """The device that every lab uses: the accelerator that is present and usable, else cpu."""
    wanted = os.environ.get("SHARDBOOK_DEVICE")
    if wanted == "cpu":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of `device()`: hccl, nccl or gloo."""
    return dist.get_default_backend_for_device(device())
