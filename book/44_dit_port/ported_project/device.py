"""The device is chosen here and nowhere else."""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch_npu without CANN breaks torch

import contextlib

import torch
import torch.distributed as dist

with contextlib.suppress(ImportError, OSError, RuntimeError):  # no torch_npu, or no CANN
    import torch_npu


def pick(local_rank: int = 0) -> torch.device:
    """The accelerator of this rank, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if local_rank >= devices:
        # No `local_rank % devices`: two ranks on one card halve its memory, and NCCL refuses them
        # ("Duplicate GPU detected"). Only the CPU is shared.
        raise RuntimeError(
            f"local rank {local_rank} has no {found.type} of its own (devices here: {devices}): "
            "start no more ranks than devices, or pick(0) where each rank is shown one card only"
        )
    device = torch.device(found.type, local_rank)
    torch.accelerator.set_device_index(device)
    return device


def setup() -> tuple[int, int, torch.device]:
    """(rank, world size, device); joins the process group that torchrun describes."""
    device = pick(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        dist.init_process_group(dist.get_default_backend_for_device(device))
    return dist.get_rank(), dist.get_world_size(), device


def synchronize(device: torch.device) -> None:
    """Wait for the device; the CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """GiB, 0 where the device does not count."""
    return 0.0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device) / 2**30
