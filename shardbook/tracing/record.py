"""Trace a block of code, mark a part of it, and name this rank's place: what users type."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from torch import nn

from . import recorder
from .merge import Trace
from .recorder import Recorder

_now = time.monotonic_ns
_thread = threading.get_ident


@contextlib.contextmanager
def trace(
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    python: bool = False,
    kernels: bool = False,
    flops: bool = False,
    **coordinates: int,
) -> Iterator[Trace]:
    """Record what `model` does inside the block; the Trace it gives displays inline afterwards.

    Forward and backward of each module, collectives and send/recv, memory, marks. Nothing of the
    model changes. Without a model: collectives, memory and marks only. python adds Python's
    functions (VizTracer), kernels the operators and device kernels (torch.profiler, on an NPU
    torch_npu.profiler), flops counts every matrix product (else the table's FLOPs are those of
    linear and convolution layers). coordinates name this rank's place: ``sb.trace(m, tp=1, cp=0)``.
    """
    mine = Recorder(_named(model), discover=False, flops=flops)
    mine.label = coordinates
    with _record(mine, Trace(), python, kernels) as result:
        yield result


def start_rank_trace() -> Recorder:
    """Begin to trace a rank, whatever modules it calls; `.stop()` gives its RankTrace."""
    mine = Recorder({}, discover=True)
    mine.start()
    return mine


@contextlib.contextmanager
def _record(mine: Recorder, result: Trace, python: bool, kernels: bool) -> Iterator[Trace]:
    with contextlib.ExitStack() as stack:
        extras = []
        if python or kernels or mine.flops is not None:
            from . import extras as more

            extras = more.start(stack, python, kernels, mine.flops)
        mine.start()
        try:
            yield result
        finally:
            rank = mine.stop()
            stack.close()
            for extra in extras:
                last = max((e["tid"] for e in rank.foreign), default=0)
                rank.foreign += [{**e, "tid": e["tid"] + last} for e in extra()]
            result.ranks = [rank]


def _named(model: nn.Module | Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    if model is None:
        return {}
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, (list, tuple)) and all(isinstance(m, nn.Module) for m in model):
        return {str(i): m for i, m in enumerate(model)}
    raise TypeError(f"sb.trace() takes an nn.Module or a list of them, not {type(model).__name__}")


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """A slice of your own: ``with sb.mark("attention"): …``, also as a decorator."""
    start = _now()
    try:
        yield
    finally:
        _note(str(name), start, "mark", {})


def pace(ms: float, name: str = "kernel") -> None:
    """Stand for a kernel that takes `ms` milliseconds: sleeps, and is labelled "paced".

    So four ranks on two cores show the schedule that four devices would. The slice is `ms` long;
    this process is awake again a little later.
    """
    if not isinstance(ms, (int, float)) or not 0 <= ms < 1e9:  # nan is neither
        raise ValueError(f"sb.pace() takes a time in milliseconds, 0 or more, not {ms!r}")
    start = _now()
    time.sleep(ms / 1e3)
    args = {"time": f"paced: sleeps {ms:g} ms"}
    _note(f"{name} (paced)", start, "paced", args, start + round(ms * 1e6))


def label(**coordinates: int) -> None:
    """Name this rank's place in the mesh in the traces being recorded: ``label(tp=1, cp=0)``."""
    for r in recorder.active:
        r.label = {**r.label, **coordinates}


def _note(name: str, start: int, category: str, args: dict, end: int | None = None) -> None:
    end = _now() if end is None else end
    for r in recorder.active:
        r.marks.append((name, _thread(), start, end, category, args))
