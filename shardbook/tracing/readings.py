"""What a trace reads beside the clock: events of the device and the memory in use."""

import contextlib
import os
from collections.abc import Callable

import torch

from ..devices import device


def device_events() -> Callable | None:
    """A function that records an event on the current stream, or None where there is no such."""
    where = device()
    if where.type == "cpu":
        return None

    def event() -> torch.Event:
        e = torch.Event(where.type, enable_timing=True)
        e.record()
        return e

    try:
        a, b = event(), event()
        torch.accelerator.synchronize()
        a.elapsed_time(b)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return None
    return event


def memory_reader() -> tuple[Callable[[], int], str]:
    """(function that reads the memory in use in bytes, its name): the device's, else the RSS."""
    if device().type != "cpu":
        with contextlib.suppress(Exception):
            torch.accelerator.memory_allocated()
            return torch.accelerator.memory_allocated, "device memory (MB)"
    try:
        page, file = os.sysconf("SC_PAGE_SIZE"), os.open("/proc/self/statm", os.O_RDONLY)
    except (OSError, ValueError, AttributeError):
        import resource

        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "peak memory (MB)"
    return _Statm(page, file).read, "resident memory (MB)"


class _Statm:
    def __init__(self, page: int, file: int):
        self.page, self.file = page, file

    def read(self) -> int:
        return int(os.pread(self.file, 64, 0).split()[1]) * self.page

    def __del__(self):
        os.close(self.file)
