"""Jupyter kernels forked from a process that holds torch already.

A kernel that starts from nothing imports IPython, torch and matplotlib, and the fork server of its
ranks imports torch again: five seconds of CPU for every notebook. Here one process imports them
once, without starting a thread, and each kernel is a fork of it, as is the kernel's fork server.
Of shardbook nothing is imported before the fork, so a notebook meets it as a fresh kernel does.

A kernel whose environment differs in what only a new process can honour is started from nothing.
kernels.py is the tests' side of it.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import process, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = [
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "IPython.core.completer",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.font_manager",
    "cloudpickle",
    "torch",
    "torch._dynamo",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
    "torch.nn.attention",
]
# read when a process or a library starts: a fork can't change them any more
AT_START = ("PYTHON", "LD_", "DYLD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "MPL")
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel sets where nothing is
PR_SET_CHILD_SUBREAPER = 36
MESSAGE = 1 << 20  # bytes


def at_start(environ: dict[str, str]) -> dict[str, str]:
    found = {k: v for k, v in environ.items() if k.startswith(AT_START)}
    return {"MPLBACKEND": INLINE} | found


def serve(control: socket.socket, mine: dict[str, str]) -> Callable[[], None] | None:
    """Fork a kernel for each request until the tests are gone; in a kernel, what it has to run."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what kernels leave is ours
    running: dict[int, socket.socket] = {}
    try:
        while True:
            _reap(running)
            if not select.select([control], [], [], 0.05)[0]:
                continue
            message, fds, *_ = socket.recv_fds(control, MESSAGE, 4)
            if not message:
                return None
            request = json.loads(message)
            if "used" in request:
                control.send(str(_used(running)).encode())
                continue
            status = socket.socket(fileno=fds[0])
            request["env"]["JPY_PARENT_PID"] = str(os.getpid())  # its poller ends it with us
            if request["plain"] or at_start(request["env"]) != mine:
                pid = _from_nothing(request)
                status.send(str(pid).encode())
            elif not (pid := os.fork()):
                for sock in (control, *running.values()):
                    sock.close()
                running.clear()
                os.setsid()  # before its pid is known: signals go to its group, not to ours
                status.send(str(os.getpid()).encode())
                status.close()
                return lambda: _kernel(request)
            running[pid] = status
    finally:
        for pid in running:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _reap(running: dict[int, socket.socket]) -> bool:
    """Tell whose kernel has ended; whether any child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True
        if pid in running:
            with contextlib.suppress(OSError), running.pop(pid) as sock:
                sock.send(str(os.waitstatus_to_exitcode(status)).encode())


def _used(running: dict[int, socket.socket]) -> float:
    """What a process used is known when it has ended, and then for all it had started too."""
    end = time.monotonic() + 5
    while _reap(running) and not running and time.monotonic() < end:
        time.sleep(0.02)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _from_nothing(request: dict) -> int:
    null = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    env, cwd = request["env"], request["cwd"]
    return subprocess.Popen(request["cmd"], env=env, cwd=cwd, start_new_session=True, **null).pid


def _kernel(request: dict) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.chdir(request["cwd"])
    process.ORIGINAL_DIR = os.getcwd()  # what '' in sys.path means to the ranks
    os.environ.clear()
    os.environ.update(request["env"])
    _fork_server_in_waiting()
    _reseed()
    launcher = importlib.util.find_spec("ipykernel_launcher").origin
    sys.argv = [launcher, *request["cmd"][request["cmd"].index("ipykernel_launcher") + 1 :]]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def _reseed() -> None:
    """Every process draws a seed of its own when it loads these; `random` does so after a fork."""
    import numpy as np
    import torch

    np.random.seed()
    torch.seed()


def _fork_server_in_waiting() -> None:
    """Fork what will be the fork server of this kernel's ranks, now, while there is no thread."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def spawn_or_wake(path, args, passfds):
        if "multiprocessing.forkserver" not in str(args[-1]) or ours.fileno() < 0:
            return spawn(path, args, passfds)
        fds = [0, 1, 2, *map(int, passfds)]
        wanted = {"code": args[-1], "fds": fds, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(ours, [json.dumps(wanted).encode()], fds)
        ours.close()
        return pid

    util.spawnv_passfds = spawn_or_wake


def _become_fork_server(theirs: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, given, *_ = socket.recv_fds(theirs, MESSAGE, 64)
    theirs.close()
    if not message:
        os._exit(0)  # the kernel has ended
    wanted = json.loads(message)
    given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in given]
    for fd, number in zip(given, wanted["fds"], strict=True):
        os.dup2(fd, number, inheritable=number < 3)
        os.close(fd)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _reseed()
    exec(wanted["code"], {"__name__": "__main__"})
    os._exit(0)


def main() -> Callable[[], None] | None:
    mine = at_start(dict(os.environ))  # before an import adds to it
    os.environ.setdefault("MPLBACKEND", INLINE)
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel reads it when it is imported
    del sys.path[0]  # the folder of `python -m`, which a kernel leaves out too
    for name in PRELOAD:
        importlib.import_module(name)
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) > 1:
        print("a library started a thread, so kernels start from nothing", file=sys.stderr)
        mine = {}  # like no kernel's
    gc.collect()
    gc.freeze()
    return serve(socket.socket(fileno=int(sys.argv[1])), mine)


if __name__ == "__main__":
    if run := main():
        run()
