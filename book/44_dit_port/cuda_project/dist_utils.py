"""Processes, seeds, timing."""

import os
import subprocess
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import cuda as gpu

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ["NCCL_DEBUG"] = "WARN"


def setup():
    """(rank, world size, device)"""
    assert torch.cuda.is_available(), "training needs at least one GPU"
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return rank, world, device


def launch_local(fn, *args):
    """Without torchrun: one process a GPU of this machine."""
    count = torch.cuda.device_count()
    mp.set_start_method("fork", force=True)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    mp.spawn(fn, args=args, nprocs=count)


def seed_everything(seed, rank):
    torch.manual_seed(seed + rank)
    torch.cuda.manual_seed_all(seed + rank)
    torch.backends.cudnn.deterministic = True


def fast_math():
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def peak_memory():
    return gpu.max_memory_allocated() / 2**30


def free():
    getattr(torch, "cuda").empty_cache()


class Timer:
    """Seconds of GPU time between enter and exit."""

    def __enter__(self):
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.start.record()
        return self

    def __exit__(self, *exc):
        self.end.record()
        torch.cuda.synchronize()
        self.seconds = self.start.elapsed_time(self.end) / 1e3


class WallClock:
    def __init__(self):
        gpu.synchronize()
        self.t = time.time()

    def lap(self):
        gpu.synchronize()
        now, self.t = time.time(), time.time()
        return now - self.t


def gpu_report():
    """What nvidia-smi says, for the log."""
    query = ["nvidia-smi", "--query-gpu=name,memory.used", "--format=csv,noheader"]
    return subprocess.check_output(query, text=True)


def relaunch_on(ids):
    """Start the evaluation on some cards only."""
    os.system(f"CUDA_VISIBLE_DEVICES={ids} python sample.py --eval &")


def mean_over_ranks(value, device):
    t = torch.tensor(value, device=f"cuda:{device}", dtype=torch.float64)
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def any_rank_failed(flag, device):
    """The share of ranks that failed: scaled before it is summed, in one call."""
    t = torch.tensor(float(flag), device="cuda:%d" % device)
    dist.all_reduce(t, op=dist.ReduceOp.PREMUL_SUM(1 / dist.get_world_size()))
    return t.item()
