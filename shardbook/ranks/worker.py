"""What happens in a rank: its process is tied to the notebook's, its calls are written down.

A rank leaves three files in the run's folder: what it printed, a log of its calls (read by
`diagnose`), and its outcome. When it is done it waits to be ended, so that a rank which leaves
early is told apart from one whose connection broke.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import warnings
from datetime import timedelta

import cloudpickle
import torch
import torch.distributed as dist

from .. import calls
from ..devices import backend, set_rank_device
from . import processes
from .folder import Folder
from .log import Log
from .pickles import cannot_send, dumps, failure

in_rank = False  # True in a process that `sb.run` started


def main(local_rank: int, folder: Folder) -> None:
    """Run the job of this folder as this rank; never returns."""
    global in_rank
    in_rank = True
    with open(folder.job, "rb") as f:
        job = pickle.load(f)
    _capture(folder.output(local_rank))
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a group of its own, so that what this rank starts can be ended with it
    log = Log(folder.calls(local_rank), local_rank)
    # The fork server's own way to start processes is none that the function should find.
    multiprocessing.set_start_method(job["start_method"], force=True)
    _end_with_parent()
    processes.adopt_orphans()
    warnings.formatwarning = lambda message, kind, *_, **__: f"{kind.__name__}: {message}\n"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the notebook's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(folder.stack(local_rank), "w") as stack:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # The last resort, should this process be stuck where no Python runs and the parent be gone.
        faulthandler.dump_traceback_later(job["timeout"] + 30, exit=True, file=stack)
        rank = os.getpid()
        kind, outcome = _attempt(job, local_rank, log)
        with contextlib.suppress(Exception):  # closed, or replaced by something else
            sys.stdout.flush()
        if os.getpid() != rank:  # a child that the function forked: the rank itself reports
            os._exit(0)
        with open(folder.outcome(local_rank), "wb") as f:
            f.write(outcome)
        log.finish(kind)
        threading.Event().wait()


def _attempt(job: dict, local_rank: int, log: Log) -> tuple[str, bytes]:
    try:
        os.environ.clear()
        os.environ.update(job["environ"] | _environment(job, local_rank))
        torch.set_num_threads(1)
        fn, args, kwargs = cloudpickle.loads(job["call"])
        set_rank_device(local_rank, job["world_size"])
        calls.install()
        calls.watch = log.call
        # Ours comes first and says more; torch's own deadline is the second line.
        limit = timedelta(seconds=job["timeout"] + 15)
        dist.init_process_group(backend(), timeout=limit)
        if job["trace"]:
            from ..tracing.record import start_rank_trace

            trace = start_rank_trace()
        try:
            value = fn(*args, **kwargs)
        finally:
            recorded = trace.stop() if job["trace"] else None
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: every rank reports
        return "error", failure(error)
    try:
        return "value", dumps(("value", value, recorded))
    except BaseException as error:
        return "unsendable", dumps(("unsendable", cannot_send(value, error), None))


def _environment(job: dict, local_rank: int) -> dict[str, str]:
    """What torchrun sets, so that code which reads it works in a cell too."""
    size = str(job["world_size"])
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job["run_id"],
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _capture(path: str) -> None:
    # By descriptor, so that what C++ and subprocesses print is this rank's too.
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end_with_parent() -> None:
    # The pipe from the notebook's process closes however that process ends.
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait():
        multiprocessing.connection.wait([parent.sentinel])
        processes.end_trees([os.getpid()])
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=wait, daemon=True).start()
