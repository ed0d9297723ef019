"""Every torch.distributed call this rank makes, seen where all of them pass: the dispatcher.

`dist.all_reduce`, functional collectives, DTensor, FSDP and DDP's C++ reducer all end in an op of
the ``c10d`` or ``_c10d_functional`` namespace. A kernel of ours on the BackendSelect key, which
every op passes even in inference mode, notes the call and hands on to the backend. Other ops pay
nothing. The checks count calls and bytes here, the trace draws them, the diagnosis names them.
"""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the _c10d_functional ops
from torch.utils import _pytree as pytree

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
    end_ns: int | None = None  # when the op returned, or when its work was waited for
    where: str = ""  # "file:line" of the caller outside torch and this package


Listener = Callable[[Call], None]
_listeners: list[Listener] = []
_inside = threading.local()
_open: dict[int, tuple[object, Call]] = {}  # id of a Work -> (the Work, its call)
_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Put our kernels in place, once a process; forked ranks inherit them."""
    if _libraries:
        return
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for name in OPS:
        if hasattr(torch.ops.c10d, name):
            op = getattr(torch.ops.c10d, name).default
            library.impl(name, _kernel(op, name), "BackendSelect", with_keyset=True)
    wait = dist.Work.wait

    def timed_wait(self, *args, **kwargs):
        try:
            return wait(self, *args, **kwargs)
        finally:
            known = _open.pop(id(self), None)
            if known:
                known[1].end_ns = time.monotonic_ns()

    dist.Work.wait = timed_wait


def _kernel(op, name: str):
    def kernel(keyset, *args, **kwargs):
        if not _listeners or getattr(_inside, "depth", 0):
            return op.redispatch(keyset & _AFTER, *args, **kwargs)
        call = _describe(name, args)
        for listener in list(_listeners):
            listener(call)
        _inside.depth = 1
        try:
            result = op.redispatch(keyset & _AFTER, *args, **kwargs)
        finally:
            _inside.depth = 0
            call.end_ns = time.monotonic_ns()
        work = result[-1] if isinstance(result, tuple) else result
        if isinstance(work, torch.ScriptObject):
            work = dist.Work.unbox(work)
            _open[id(work)] = (work, call)
        return result

    return kernel


def _describe(name: str, args: tuple) -> Call:
    groups, tensors, sides = None, [], []
    numbers = []
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and groups is None:
            with contextlib.suppress(Exception):
                groups = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
            continue
        leaves = [x for x in pytree.tree_leaves(arg) if isinstance(x, torch.Tensor)]
        if leaves:
            sides.append(sum(x.nbytes for x in leaves))
            tensors += leaves
        elif isinstance(arg, int) and not isinstance(arg, bool):
            numbers.append(arg)
    op = OPS[name]
    peer = None
    if op in ROOTED and numbers and groups and name != "recv_any_source_":
        peer = groups[numbers[0]]  # the dispatcher's ranks are ranks of the group
    if op == "all_to_all" and len(sides) > 1:
        nbytes = sides[1]  # (output, input, …)
    elif op == "barrier":
        nbytes = 0
    else:
        nbytes = max(sides, default=0)
    first = tensors[0] if tensors else None
    if op == "all_to_all" and len(tensors) > 1 and name == "alltoall_base_":
        first = tensors[1]
    return Call(
        op=op,
        nbytes=nbytes,
        shape=tuple(first.shape) if first is not None else (),
        dtype=first.dtype if first is not None else torch.float32,
        group=groups or (),
        peer=peer,
        start_ns=time.monotonic_ns(),
        where=_caller(),
    )


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "shardbook.calls")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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
