"""Process trees: what a process has started, and the end of it. On psutil, so on every system."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable

import psutil

from .._seams import helper_processes


def adopt_orphans() -> None:
    """On Linux, a process whose parent died becomes ours, so that who ends us finds it."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def below(pid: int) -> list[psutil.Process]:
    """What runs below this process, parents first; zombies only wait to be read."""
    with contextlib.suppress(psutil.Error):
        return [p for p in psutil.Process(pid).children(recursive=True) if _runs(p)]
    return []


def end_trees(pids: Iterable[int]) -> None:
    """Kill what these processes of one parent have started and left behind, and themselves."""
    pids = list(pids)
    ours = set(pids)
    for process in below(pids[0] if len(pids) == 1 else _parent(pids)):
        with contextlib.suppress(psutil.Error):
            if process.pid not in ours and process.ppid() in ours:
                ours.add(process.pid)  # also one that left the group for a session of its own
                process.kill()
    for pid in pids if hasattr(os, "killpg") else []:
        with contextlib.suppress(OSError):  # it has no group yet, or no member any more
            os.killpg(pid, signal.SIGKILL)


def _parent(pids: list[int]) -> int:
    # One look at all processes costs 2 ms: the ranks' parent's covers all of them.
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).ppid()
    return os.getpid()


def end_descendants() -> None:
    """Kill every process below this one except the fork server and the resource tracker."""
    keep = set()
    if "forkserver" in multiprocessing.get_all_start_methods():
        keep = helper_processes()
    for _ in range(20):  # a process that forks while we look is found in the next round
        left = [p for p in below(os.getpid()) if p.pid not in keep]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left:
            return
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
