"""Refuse what works nowhere near an NPU, and name the Python line that asked for it."""

import linecache
import os
import sys

import torch
import torch.distributed as dist


def where() -> str:
    """`` [file.py:12: x = x.double()]``: the line that runs, outside torch and the stand-in."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "torch" and not module.startswith(("torch.", __package__)):
            filename, number = frame.f_code.co_filename, frame.f_lineno
            source = linecache.getline(filename, number).strip()[:80]
            return f" [{os.path.basename(filename)}:{number}: {source}]"
        frame = frame.f_back
    return " [in the backward pass]"  # autograd's thread has no Python frames


def install() -> None:
    """CUDA and nccl are not there; say so by line."""

    def no_cuda() -> None:
        raise RuntimeError(f"cuda is not here, ask sb.device() for the device{where()}")

    make = dist.Backend.__new__

    def no_nccl(cls, name: str) -> str:  # every way to ask for a backend passes here
        if isinstance(name, str) and "nccl" in name.lower():
            raise RuntimeError(f"nccl is not here, ask sb.backend() for the backend{where()}")
        return make(cls, name)

    torch.cuda._lazy_init = no_cuda
    dist.Backend.__new__ = no_nccl
