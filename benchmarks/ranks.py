"""Starting 4 ranks that all-reduce once: sb.run beside what people use, in one run.

    python benchmarks/ranks.py [--repeat 3] [--without ipyparallel accelerate]

Every way does the same: four processes on this host, gloo, one all_reduce of ten floats, the end of
all four. Our first call, which starts the fork server, is shown apart: it happens once a notebook.
ipyparallel's engines may be kept between cells, and keep what the last cell left in them.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardbook as sb

RANKS = 4
GIVEN_UP = 40  # seconds


def work() -> float:
    x = torch.full((10,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x[0].item()


def standalone(rank: int | None = None, path: str | None = None, size: int = RANKS) -> float:
    """The same with all it needs inside, for engines that don't know this file."""
    import torch
    import torch.distributed as dist

    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=size)
    x = torch.full((10,), float(dist.get_rank()))
    dist.all_reduce(x)
    assert x[0].item() == sum(range(size))
    dist.destroy_process_group()
    return x[0].item()


def with_sb_run() -> None:
    assert sb.run(work, world_size=RANKS).values == [sum(range(RANKS))] * RANKS


def with_spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(standalone, (f"{folder}/store",), nprocs=RANKS)


def with_torchrun() -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    subprocess.run([sys.executable, *command, __file__, "--as-rank"], check=True, env=_environ())


def with_accelerate(before: str = "", function: str = "standalone") -> None:
    # notebook_launcher forks the notebook: fast, as long as it has used neither OpenMP nor CUDA.
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import ranks, time, torch, accelerate\n"
        f"{before}\n"
        "start = time.monotonic()\n"
        f"accelerate.notebook_launcher(ranks.{function}, num_processes={RANKS})\n"
        "print('SECONDS', time.monotonic() - start)\n"
    )
    environ = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=GIVEN_UP)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise _Measured(None) from None
    (line,) = [x for x in out.splitlines() if x.startswith("SECONDS")]
    raise _Measured(float(line.split()[1]))  # without the imports of this extra process


def matmul_too() -> None:
    import torch

    x = torch.randn(2048, 2048)
    x @ x
    standalone()


def with_accelerate_and_matmuls() -> None:
    """The notebook has run a matmul on two threads before its fork runs one."""
    with_accelerate("x = torch.randn(2048, 2048); x @ x", "matmul_too")


def with_ipyparallel() -> None:
    import ipyparallel

    with tempfile.TemporaryDirectory() as folder:
        cluster = ipyparallel.Cluster(n=RANKS, log_level=50)
        with cluster as client:
            view = client[:]
            view.block = True
            results = [
                client[r].apply_async(standalone, r, f"{folder}/store") for r in range(RANKS)
            ]
            assert [r.get() for r in results] == [sum(range(RANKS))] * RANKS


class _Measured(Exception):
    """Seconds that a way has measured itself; None if it has not come to an end."""


def seconds(way: Callable[[], None]) -> float | None:
    start = time.monotonic()
    try:
        with _silence():
            way()
    except _Measured as measured:
        return measured.args[0]
    return time.monotonic() - start


@contextlib.contextmanager
def _silence():
    kept = [os.dup(fd) for fd in (1, 2)]
    with open(os.devnull, "w") as null:
        for fd in (1, 2):
            os.dup2(null.fileno(), fd)
    try:
        yield
    finally:
        for fd, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def _environ() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


OTHERS = {
    "mp.spawn": with_spawn,
    "torchrun": with_torchrun,
    "accelerate notebook_launcher": with_accelerate,
    "accelerate, matmuls before": with_accelerate_and_matmuls,
    "ipyparallel engines": with_ipyparallel,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out, by first word")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'sb.run, first call':30s} {seconds(with_sb_run):8.2f} s (starts the fork server)")
    ours, theirs = [], {name: [] for name in OTHERS}
    for _ in range(arguments.repeat):  # in turn, so that all see the same load
        ours += [seconds(with_sb_run) for _ in range(5)]
        for name, way in OTHERS.items():
            if name.split()[0] not in arguments.without:
                theirs[name].append(seconds(way))
    base = statistics.median(ours)
    print(f"{'sb.run':30s} {base:8.2f} s")
    for name, times in theirs.items():
        if None in times:
            print(f"{name:30s} hangs: no end within {GIVEN_UP} s")
        elif times:
            median = statistics.median(times)
            print(f"{name:30s} {median:8.2f} s = {median / base:5.0f} x sb.run")


if __name__ == "__main__":
    if "--as-rank" in sys.argv:
        standalone()
    else:
        main()
