"""Run a function on N real ranks from a notebook cell, with a warm fork server.

Ranks are started by torch.multiprocessing, the layer under torchrun's launcher, and see the
environment torchrun gives. The launcher itself is left out: its rendezvous takes four times as long
as the ranks, its signal handlers stay in the kernel, and it can't end a run for a reason of ours.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from ..devices import too_few
from . import diagnose, follow, launch, output, worker
from .folder import Folder
from .result import NotWritten, RankError, Result

__all__ = ["NotWritten", "RankError", "Result", "run"]

MOST_RANKS = 256  # a slip of the finger must not fill the memory with processes
LONGEST = 30 * 24 * 3600  # seconds: a month


def run(
    fn: Callable,
    *args,
    world_size: int = 4,
    timeout: float = 60,
    trace: bool = False,
    echo: bool = True,
    env: dict[str, str] | None = None,
    **kwargs,
) -> Result:
    """Run ``fn(*args, **kwargs)`` on every one of `world_size` ranks, torch.distributed ready.

    `fn` may be defined in a cell. What the ranks print is shown when they are done, identical lines
    once (`echo=False` keeps it in the result only). `env` holds variables that every rank finds in
    os.environ. Under torchrun `fn` runs in place, as the rank torchrun made of this process; output
    of all hosts is shown once, by the first rank, whose `env` all hosts see.

    Raises RankError for ranks that fail, hang or don't end within `timeout` seconds, NotWritten if
    all they met is an unwritten exercise, and ValueError for arguments that can't work.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}: it must be a whole number, at least 1")
    if world_size > MOST_RANKS and "RANK" not in os.environ:
        raise ValueError(
            f"world_size is {world_size}: at most {MOST_RANKS} ranks are started on one machine; "
            "torchrun takes more over several"
        )
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout <= LONGEST:
        raise ValueError(
            f"timeout is {timeout!r}: it must be a number of seconds above 0, at most {LONGEST}"
        )
    if not callable(fn):
        raise ValueError(f"the first argument is {fn!r}: it must be a function, not its result")
    if not all(isinstance(x, str) for pair in (env or {}).items() for x in pair):
        raise ValueError(f"env is {env!r}: it must map names of variables to text")
    if worker.in_rank:
        raise RuntimeError(
            "sb.run was called inside a rank: ranks can't start ranks, call the function instead"
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from . import in_place

        return in_place.run(fn, args, kwargs, world_size, timeout, trace, echo, env or {})
    _say_once(too_few(world_size))
    try:
        call = worker.dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(
            f"{getattr(fn, '__name__', fn)!s} or one of its arguments can't be sent to the ranks "
            f"({type(error).__name__}: {error}); make it inside the function instead"
        ) from error
    folder = Folder("")
    try:
        with launch.uninterrupted():
            folder = Folder(tempfile.mkdtemp(prefix="shardbook-"))
        with launch.store() as store:
            job = {
                "call": call,
                "environ": dict(os.environ) | launch.defaults() | (env or {}),
                "world_size": world_size,
                "port": store.port,
                "run_id": folder.name,
                "timeout": timeout,
                "start_method": multiprocessing.get_start_method(allow_none=True),
                "trace": trace,
            }
            with open(folder.job, "wb") as f:
                pickle.dump(job, f)
            with launch.started(world_size, folder) as processes:
                tail = output.Tail(folder.output(0)) if echo else None
                end = follow.follow(processes, folder, timeout, tail)
        outputs = [output.read(folder.output(r)) for r in range(world_size)]
        if tail is not None and (text := output.fold(tail.rest(outputs))):
            output.show(text)
        found = {r: follow.outcome(folder, r) for r in range(world_size)}
    finally:
        with launch.uninterrupted():
            shutil.rmtree(folder.path, ignore_errors=True)
    if end is not None and end.interrupted:
        if end.message:
            output.show(end.message)
        stop = KeyboardInterrupt()
        # IPython: where everyone was stands above; the notebook's own frames would hide it.
        stop._render_traceback_ = lambda: ["KeyboardInterrupt: the ranks are ended"]
        raise stop
    if end is not None:
        error = _error(end, {r: o for r, o in found.items() if o is not None})
        error.output = outputs
        raise error from None
    values, merged = _values(list(found.values()), trace)
    return Result(values, outputs, merged)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text and text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)


def _values(found: list[tuple], trace: bool) -> tuple[list, Any]:
    for r, (kind, value, _) in enumerate(found):
        if kind != "value":
            raise RankError(f"rank {r} {value}")
    values = [value for _, value, _ in found]
    if not trace:
        return values, None
    from ..tracing.merge import merge

    return values, merge([recorded for *_, recorded in found])


def _error(end: follow.End, found: dict[int, tuple]) -> RankError:
    """What to raise for a run that was ended; `found` has the outcomes of ranks that have one."""
    causes = {r: value for r, (kind, value, _) in found.items() if kind == "error"}
    for r, cause in causes.items():
        with contextlib.suppress(Exception):  # an exception's own methods may raise anything
            cause.add_note(diagnose.whole(found[r][2]))
    if end.message:
        return RankError(end.message, causes, end.hung)
    deaths = {r.rank: r.died for r in end.ranks if r.died is not None and r.rank not in found}
    said: dict[int, str] = {}
    for r in range(len(end.ranks)):
        kind, value, more = found.get(r, ("death", deaths.get(r), None))
        if kind == "error" and deaths and diagnose.lost_connection(value):
            continue  # an effect of a rank's end, which some ranks notice and others don't
        if kind == "error":
            value = diagnose.raised(value, more)
        if kind != "value" and value is not None:
            said[r] = value
    lines = [f"{output.ranks_text(ranks)} {text}" for text, ranks in diagnose.folded(said).items()]
    unwritten = [isinstance(e, NotImplementedError) for e in causes.values()]
    if unwritten and all(unwritten) and not deaths:
        return NotWritten("\n".join(lines), causes)
    lines += diagnose.states(end.ranks, end.ledger, leave_out=set(said))
    return RankError("\n".join(lines), causes)
