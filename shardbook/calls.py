"""Every torch.distributed call this rank makes, seen where all of them pass: the dispatcher.

`dist.all_reduce`, functional collectives, DTensor, FSDP and DDP's C++ reducer all end in an op of
the ``c10d`` or ``_c10d_functional`` namespace. A kernel of ours on the BackendSelect key, which
every op passes even in inference mode, notes the call and hands on to the backend. Other ops pay
nothing. The checks count calls and bytes here, the trace draws them, the diagnosis names them.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from . import _seams, pending
from .words import callers_line, ranks_text

OPS = {  # op of the dispatcher -> the name people use
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Functional collectives end in the same c10d ops, so these are all there is to watch."""

ROOTED = {"send", "recv", "broadcast", "reduce", "gather", "scatter"}


@dataclasses.dataclass
class Call:
    """One collective or point-to-point call of this rank.

    nbytes is the size of the full tensor the call is about, as `collective_bytes` counts it:
    all_gather's output, reduce_scatter's input, this rank's input of all_to_all, else the tensor.
    """

    op: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: tuple[int, ...]  # global ranks
    peer: int | None  # global rank: the other end of send and recv, the root of a rooted collective
    start_ns: int  # time.monotonic_ns() on entering
    end_ns: int | None = None  # when the op returned, or its work was waited for, or was done
    where: str = ""  # "file:line" of the learner's line that led here
    group_name: str = ""  # tells two groups of the same ranks apart
    label: str = ""  # what the program calls the group, if it does: new_group(group_desc="tp")
    tag: int = 0  # of send and recv
    reduce: str = ""  # "sum", "max", "avg" …, "" where nothing is reduced
    is_async: bool = False  # a work was handed out, not waited for inside the call itself
    events: tuple = ()  # device events at the start and the end, while `clock` is set
    complete: bool | None = None  # of an async call in a trace: whether its real end was seen


Listener = Callable[[Call], None]
_listeners: list[Listener] = []
watch: Callable[[str, Call], None] | None = None
"""Set in ranks: told "enter" on every call, "wait" when this rank blocks on it, "done" after."""
clock: Callable[[], object] | None = None
"""Set by a trace on a device that has events: records one on the current stream."""
_inside = threading.local()
_open: dict[int, tuple] = {}  # id of a Work -> (the Work, its call, addresses of its tensors)
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Put our kernels in place, once a process; forked ranks inherit them."""
    if _libraries:
        return
    _libraries.append(library := torch.library.Library("c10d", "IMPL"))
    for name in OPS:
        _seams.intercept(library, name, functools.partial(_around, name))
    _libraries.append(library := torch.library.Library("_c10d_functional", "IMPL"))
    _seams.intercept(library, "wait_tensor", _wait_tensor)
    wait = dist.Work.wait

    def timed_wait(self, *args, **kwargs):
        known = _open.get(id(self))
        if known is None:
            return wait(self, *args, **kwargs)
        if _seams.called_by_torch_distributed():
            known[1].is_async = False  # dist.all_reduce(x) and the like wait at once
        with _waiting(known):
            return wait(self, *args, **kwargs)

    dist.Work.wait = timed_wait


def _around(name: str, hand_on: Callable, args: tuple, kwargs: dict):
    """Note a call of the operator `name`; `hand_on` runs it."""
    if (not _listeners and watch is None) or getattr(_inside, "depth", 0):
        return hand_on(*args, **kwargs)
    _close_finished()
    call, addresses = _describe(name, args)
    for listener in list(_listeners):
        listener(call)
    blocks = name == "monitored_barrier_"  # the others return a Work, which is waited for
    if watch is not None:
        watch("enter", call)
        if blocks:
            watch("wait", call)
    if clock is not None:
        call.events = (clock(),)
    call.start_ns = time.monotonic_ns()
    _inside.depth = 1
    try:
        result = hand_on(*args, **kwargs)
    finally:
        _inside.depth = 0
        _ended(call)
        if blocks and watch is not None:
            watch("done", call)
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        work = dist.Work.unbox(work)
        call.is_async = True
        _open[id(work)] = (work, call, addresses)
        if pending.traces and call.op not in ("send", "recv"):  # gloo's are done when waited for
            call.complete, call.events = False, call.events[:1]
            pending.watch_for_end(work, call)
    return result


def _wait_tensor(hand_on: Callable, args: tuple, kwargs: dict):
    (tensor,), known = args, None
    if _open:
        address = tensor.data_ptr()
        known = next((k for k in reversed(_open.values()) if address in k[2]), None)
    if known is None:
        return hand_on(tensor)
    with _waiting(known):
        return hand_on(tensor)


@contextlib.contextmanager
def _waiting(known: tuple) -> Iterator[None]:
    work, call, _ = known
    if watch is not None:
        watch("wait", call)
    try:
        yield
    finally:
        _ended(call)
        if call.complete is False:
            call.complete = True
        _open.pop(id(work), None)
        if watch is not None:
            watch("done", call)


def _ended(call: Call) -> None:
    if not (call.complete and call.is_async):
        call.end_ns = time.monotonic_ns()
    if call.events and clock is not None:
        call.events = (call.events[0], clock())


def _close_finished() -> None:
    # Works that C++ waits for (DDP) or nobody does must not keep their tensors alive.
    for key, (work, call, _) in list(_open.items()):
        # Another thread that waits for it may take it out first, and says itself that it is done.
        if work.is_completed() and _open.pop(key, None) and watch is not None:
            watch("done", call)


def _tensors(arg) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _tensors(item)


def _describe(name: str, args: tuple) -> tuple[Call, set[int]]:
    group, ranks, tensors, sides, numbers, reduce = None, (), [], [], [], ""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            if group is None:
                group = dist.ProcessGroup.unbox(arg)
                ranks = tuple(dist.get_process_group_ranks(group))
            else:  # a second one is the ReduceOp
                reduce = _seams.reduce_name(arg)
        elif isinstance(arg, int) and not isinstance(arg, bool):
            numbers.append(arg)
        elif found := list(_tensors(arg)):
            sides.append(sum(x.numel() * x.element_size() for x in found))  # sparse too
            tensors += found
    op = OPS[name]
    peer, tag = None, 0
    if op in ROOTED and numbers and ranks and name != "recv_any_source_":
        if not 0 <= numbers[0] < len(ranks):
            raise ValueError(f"rank {numbers[0]} is not in the group of {ranks_text(ranks)}")
        peer = ranks[numbers[0]]  # the dispatcher's ranks are ranks of the group
    if op in ("send", "recv") and numbers:
        tag = numbers[-1]
    if op == "all_to_all" and len(sides) > 1:
        nbytes = sides[1]  # (output, input, …)
    elif op == "barrier":
        nbytes = 0
    else:
        nbytes = max(sides, default=0)
    first = tensors[0] if tensors else None
    if name == "alltoall_base_":
        first = tensors[1]
    call = Call(
        op=op,
        nbytes=nbytes,
        shape=tuple(first.shape) if first is not None else (),
        dtype=first.dtype if first is not None else torch.float32,
        group=ranks,
        peer=peer,
        start_ns=time.monotonic_ns(),
        where=callers_line(sys._getframe(1)),
        group_name=group.group_name if group is not None else "",
        label=_label(group.group_desc) if group is not None else "",
        tag=tag,
        reduce=reduce,
    )
    return call, {x.data_ptr() for x in tensors if x.layout is torch.strided and x.numel()}


def _label(description: str) -> str:
    """A group's name, if the program or its mesh gave it one: torch has words for "none"."""
    return "" if description in ("default_pg", "undefined") else description.removeprefix("mesh_")


@contextlib.contextmanager
def record() -> Iterator[list[Call]]:
    """Collect this rank's calls made inside the block, in order."""
    install()
    log: list[Call] = []
    listener = log.append
    _listeners.append(listener)
    try:
        yield log
    finally:
        _listeners.remove(listener)


def summary(calls: list[Call]) -> dict[str, tuple[int, int]]:
    """``{op: (calls, bytes)}``, in order of first use."""
    totals: dict[str, tuple[int, int]] = {}
    for call in calls:
        count, nbytes = totals.get(call.op, (0, 0))
        totals[call.op] = (count + 1, nbytes + call.nbytes)
    return totals
