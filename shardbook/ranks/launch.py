"""Start the processes of the ranks, and leave none behind, whatever interrupts."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterator

import torch.distributed as dist
import torch.multiprocessing

from . import processes, worker
from .folder import Folder
from .result import RankError


def defaults() -> dict[str, str]:
    """Environment of the ranks, unless the user has set it."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted = {
        "GLOO_SOCKET_IFNAME": loopback,  # works without a network, and behind a VPN
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {k: v for k, v in wanted.items() if k not in os.environ}


@contextlib.contextmanager
def store() -> Iterator[dist.TCPStore]:
    """The ranks' meeting place, on a port of this host alone."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody but this host
    listener.listen(1024)
    port = listener.getsockname()[1]
    yield dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextlib.contextmanager
def started(world_size: int, folder: Folder) -> Iterator[list]:
    """The ranks' processes; whatever happens, none is left when the block ends."""
    before = set(multiprocessing.active_children())
    context = None
    try:
        method = "spawn"
        if "forkserver" in multiprocessing.get_all_start_methods():
            method = "forkserver"
            forkserver = multiprocessing.get_context(method)
            forkserver.set_forkserver_preload(["shardbook.ranks.preload"])
        with _starting, uninterrupted(), _no_main(), short_sockets():
            try:
                context = torch.multiprocessing.start_processes(
                    worker.main, (folder,), nprocs=world_size, join=False, start_method=method
                )
            except (OSError, EOFError) as error:  # no memory, no processes, no fork server
                too_long = "path too long" in str(error)
                why = f"{_TOO_LONG}: set TMPDIR=/tmp and start again" if too_long else repr(error)
                raise RankError(f"the ranks can't be started ({why})") from error
        yield context.processes
    finally:
        with uninterrupted():
            mine = context.processes if context else set(multiprocessing.active_children()) - before
            processes.end_trees([process.pid for process in mine])
            for process in mine:
                process.kill()
            for process in mine:
                process.join(10)


_SOCKET_DIR = 70  # characters: the system takes 104 to 108 for a socket's path, its name needs 33
_TOO_LONG = "the folder for temporary files has too long a name for sockets"


@contextlib.contextmanager
def short_sockets() -> Iterator[None]:
    """Have multiprocessing make its folder of sockets, once a process, where names are short."""
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > _SOCKET_DIR:
        tempfile.tempdir = next((d for d in ("/tmp", "/var/tmp") if os.access(d, os.W_OK)), before)
    try:
        multiprocessing.util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = before


_starting = threading.Lock()  # what _no_main changes belongs to the whole process


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt waits until the block ends: half a start, or half an end, leaves orphans."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if came and callable(before):
            before(*came[0])


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    # A child imports the parent's main file again, which would run a script that has no
    # `if __name__ == "__main__"`. What it needs of it cloudpickle has sent by value already.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in os.environ else {}
    os.environ.update(quiet)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in quiet:
            del os.environ[name]
