"""Which accelerator this process uses, asked in one place: npu, else cuda, else cpu.

Import this before torch: a torch_npu wheel without CANN would break ``import torch`` itself, so
torch's own loading of it is off and it is imported here, where a failure is kept as a reason.
"""

import importlib
import os
import sys
from importlib import metadata

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for CUDA leaves fork usable

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"{sys.executable} has no torch. `make lab` installs it into .venv: use .venv/bin/python, "
        "or `source .venv/bin/activate` first",
        name="torch",
    ) from None
import torch.distributed as dist

TYPES = ("npu", "cuda", "cpu")


def _load_torch_npu() -> str:
    """Import torch_npu where it is installed; the reason it can't be used, or ""."""
    found = torch.accelerator.current_accelerator()
    if found is not None and found.type == "npu":
        return ""  # somebody imported it before us
    try:
        metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return "torch_npu is not installed"
    if torch.cuda.is_available():
        return "CUDA is available, and torch_npu refuses to share a process with it"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # ImportError, OSError and RuntimeError are known; none may end us
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


# A package that adds a device of its own to torch, imported in this process and in every rank.
if plugin := os.environ.get("SHARDBOOK_DEVICE_PLUGIN"):
    importlib.import_module(plugin)

npu_reason: str = _load_torch_npu()
"""Why no NPU can be used through torch_npu, "" if it loaded."""

_of_rank: torch.device | None = None


def device() -> torch.device:
    """The device of this process, with its index: ``npu:0``, ``cuda:3`` or ``cpu``.

    SHARDBOOK_DEVICE=cpu, cuda or npu overrides the choice; RuntimeError if there is none of that
    type, ValueError for any other word. In a rank it is the one `set_rank_device` chose.
    """
    if _of_rank is not None:
        return _of_rank
    kind = _kind()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def backend() -> str:
    """The torch.distributed backend of `device()`: hccl, nccl or gloo."""
    return dist.get_default_backend_for_device(device().type)


def set_rank_device(local_rank: int, local_world_size: int) -> torch.device:
    """Give this rank the accelerator of its number, or all ranks the cpu if there are too few.

    Call it in the rank before torch.distributed is initialised. Every rank of a host decides the
    same. ValueError for a rank outside 0..local_world_size-1.
    """
    global _of_rank
    if not 0 <= local_rank < local_world_size:
        raise ValueError(f"local rank {local_rank} is not in 0..{local_world_size - 1}")
    kind = _kind()
    if kind == "cpu" or too_few(local_world_size):
        _of_rank = torch.device("cpu")
    else:
        torch.accelerator.set_device_index(local_rank)
        _of_rank = torch.device(kind, local_rank)
    return _of_rank


def too_few(local_world_size: int) -> str:
    """One sentence if there are accelerators, but fewer than ranks; else ""."""
    kind = _kind()
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    if kind == "cpu" or local_world_size <= count:
        return ""
    devices = f"{count} {kind} devices" if count > 1 else f"one {kind} device"
    # The first words are constant: tests that compare outputs ignore the warning by them.
    return (
        f"More ranks than devices ({local_world_size} ranks, {devices}): "
        "the ranks run on the cpu and talk through gloo"
    )


def describe() -> str:
    """One sentence: the device in use, its backend, and why it is no better one."""
    where = device()
    if where.type == "cpu":
        if os.environ.get("SHARDBOOK_DEVICE") == "cpu":
            why = "SHARDBOOK_DEVICE=cpu asks for it"
        elif npu_reason:
            why = f"no CUDA device, and no NPU: {npu_reason}"
        else:
            why = "torch_npu is loaded and sees no NPU"
        return f"The labs run on the CPU and their ranks talk through gloo ({why})."
    count = torch.accelerator.device_count()
    name = _name(where)
    return (
        f"The labs run on {where} ({name}), one of {count}, "
        f"and their ranks talk through {backend()}."
    )


def _kind() -> str:
    wanted = os.environ.get("SHARDBOOK_DEVICE", "")
    if wanted and wanted not in TYPES:
        raise ValueError(f"SHARDBOOK_DEVICE={wanted} is not known: use npu, cuda or cpu")
    if wanted == "cpu":
        return "cpu"
    # Without check_available a torch_npu that sees no device still answers npu.
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = found.type if found is not None and found.type in TYPES else "cpu"
    if wanted and wanted != kind:
        raise RuntimeError(
            f"SHARDBOOK_DEVICE={wanted}, but no {wanted} device can be used here "
            f"({_why_not(wanted)}): unset it, or run `python -m shardbook doctor`"
        )
    return kind


def _why_not(kind: str) -> str:
    if kind == "npu":
        return npu_reason or "torch_npu is loaded and sees no device"
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    return "torch sees no CUDA device"


def _name(where: torch.device) -> str:
    module = torch.get_device_module(where.type)
    return module.get_device_name(where.index) if hasattr(module, "get_device_name") else where.type
