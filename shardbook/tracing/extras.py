"""More detail for a trace, where asked: Python's functions, operators and kernels, FLOPs."""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .. import _seams
from ..devices import device
from . import foreign
from .events import place

CLOCK = "shardbook.clock"


def start(
    stack: contextlib.ExitStack, python: bool, kernels: bool, flops: list | None
) -> list[Callable[[], list[dict]]]:
    """Start what is asked for; closing `stack` ends it. Each result then gives its Chrome events.

    Their ts are monotonic nanoseconds; tids count from 1 and are named by metadata events.
    """
    found = []
    if kernels:
        found.append(_kernels(stack))
    if python:
        found.append(_python(stack))
    if flops is not None:
        stack.enter_context(Flops(flops))
    return found


def _python(stack: contextlib.ExitStack) -> Callable[[], list[dict]]:
    import viztracer

    running = viztracer.get_tracer()
    if running is not None and running.enable:
        raise RuntimeError("python=True needs VizTracer, which is tracing already: end that first")
    tracer = viztracer.VizTracer(verbose=0, log_torch=False)
    tracer.start()
    stack.callback(tracer.stop)
    before = time.monotonic_ns()
    tracer.log_instant(CLOCK)
    after = time.monotonic_ns()

    def events() -> list[dict]:
        tracer.parse()
        return aligned(tracer.data, before, after, "python")

    return events


def _kernels(stack: contextlib.ExitStack) -> Callable[[], list[dict]]:
    profiler, activities = torch.profiler, [torch.profiler.ProfilerActivity.CPU]
    kind = device().type
    if kind == "npu" and hasattr(torch, "npu"):
        with contextlib.suppress(ImportError):
            import torch_npu.profiler as profiler

            activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    elif kind != "cpu":
        activities.append(getattr(torch.profiler.ProfilerActivity, kind.upper()))
    profile = profiler.profile(activities=activities)
    with quiet():
        profile.start()
    stack.callback(quiet()(profile.stop))
    for _ in range(2):  # the first sets the profiler up
        before = time.monotonic_ns()
        with torch.profiler.record_function(CLOCK):
            after = time.monotonic_ns()

    def events() -> list[dict]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profile.export_chrome_trace(path)
            with open(path) as file:
                return aligned(json.load(file), before, after, "operators")

    return events


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing reaches standard error inside: torch.profiler announces its start and stop there."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def aligned(trace: dict | list, before: int, after: int, title: str) -> list[dict]:
    """A foreign trace's slices on our clock: its CLOCK event began between before and after."""
    slices, others = foreign.complete(foreign.listed(trace))
    clocks = [e["ts"] for e in slices + others if e.get("name") == CLOCK]
    if not clocks:
        raise RuntimeError(f"the trace of {title} lacks our clock mark: it can't be put in time")
    shift = (before + after) // 2 - max(clocks)
    names = foreign.names(others)
    threads: dict[tuple, list[dict]] = {}
    ours = os.path.dirname(__file__)
    for e in slices:
        if e.get("name") != CLOCK and e.get("pid") != "Spans" and ours not in str(e.get("name")):
            threads.setdefault((str(e.get("pid")), e.get("tid")), []).append(e)
    events, tid = [], 1
    here = str(threading.get_native_id())
    order = sorted(threads, key=lambda thread: (str(thread[1]) != here, str(thread)))
    for pid, thread in order:
        mine = threads[pid, thread]
        lanes = place([(e["ts"], e["ts"] + e["dur"]) for e in mine])
        name = names.get(("thread_name", mine[0].get("pid"), thread), str(thread))
        label = title if str(thread) == here else f"{title}: {name}"
        if pid.isdigit() and pid != str(os.getpid()):
            label = f"device {pid}, {name}"
        for lane in range(max(lanes) + 1):
            shown = label if lane == 0 else f"{label} ({lane + 1})"
            at = {"tid": tid + lane, "args": {"name": shown}}
            events.append({"ph": "M", "name": "thread_name", **at})
        for e, lane in zip(mine, lanes, strict=True):
            kept = {k: e[k] for k in ("name", "cat", "args", "dur") if e.get(k) is not None}
            events.append({"ph": "X", **kept, "ts": e["ts"] + shift, "tid": tid + lane})
        tid += max(lanes) + 1
    return events


class Flops(_seams.TorchDispatchMode):
    """Notes (time, thread, FLOPs) of each matrix product, by torch.utils.flop_counter."""

    def __init__(self, log: list[tuple]):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet not in flop_registry and packet is not _seams.CPU_ATTENTION:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if packet is _seams.CPU_ATTENTION:
            count = sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        else:
            count = flop_registry[packet](*args, **kwargs, out_val=result)
        self.log.append((time.monotonic_ns(), threading.get_ident(), count))
        return result
