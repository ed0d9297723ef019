"""Run a function on N real ranks from a notebook cell: torchrun's launcher, a warm fork server."""

import dataclasses
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch.distributed as dist

from .calls import install
from .device import backend


class RankError(RuntimeError):
    """A run failed. `.causes` maps rank -> the exception of that rank, where there is one."""

    causes: dict[int, BaseException]


class NotWritten(RankError, NotImplementedError):
    """Every rank that failed met an exercise that is not written yet."""


@dataclasses.dataclass
class Result:
    """What a run left: `values` and `output` by rank, and the `trace` of all ranks if asked for."""

    values: list
    output: list[str]
    trace: Any = None


def run(
    fn: Callable, *args, world_size: int = 4, timeout: float = 60, trace: bool = False, **kwargs
) -> Result:
    """Run ``fn(*args, **kwargs)`` on every one of `world_size` ranks."""
    import multiprocessing

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(["shardbook._preload"])
    folder = tempfile.mkdtemp(prefix="shardbook-")
    with open(f"{folder}/call", "wb") as f:
        f.write(cloudpickle.dumps((fn, args, kwargs)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=os.path.basename(folder),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        monitor_interval=0.05,
    )
    try:
        outcomes = elastic_launch(config, _entry)(folder)
        outcomes = [pickle.loads(outcomes[r]) for r in range(world_size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    causes = {r: v for r, (ok, v) in enumerate(outcomes) if not ok}
    if causes:
        unwritten = all(isinstance(e, NotImplementedError) for e in causes.values())
        rank, first = min(causes.items())
        error = (NotWritten if unwritten else RankError)(f"rank {rank}: {first!r}")
        error.causes = causes
        raise error
    return Result([v for _, v in outcomes], [""] * world_size)


def _entry(folder: str) -> bytes:
    import torch

    torch.set_num_threads(1)
    install()
    with open(f"{folder}/call", "rb") as f:
        fn, args, kwargs = cloudpickle.loads(f.read())
    dist.init_process_group(backend())
    try:
        return cloudpickle.dumps((True, fn(*args, **kwargs)))
    except BaseException as error:
        return cloudpickle.dumps((False, error))
    finally:
        dist.destroy_process_group()
