"""Run a function on N real ranks from a notebook cell, with a warm fork server.

Ranks are started by torch.multiprocessing, the layer under torchrun's launcher, and see the
environment torchrun gives. The launcher itself is left out: its rendezvous takes four times as long
as the ranks, its signal handlers stay in the kernel, and it can't end a run for a reason of ours.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from . import diagnose, output, worker
from .device import too_few

_START_LIMIT = 120  # seconds until the first rank runs: the fork server imports torch once
_SETTLE = 0.3  # seconds without news before ranks that can't go on count as hung
_GRACE = 3.0  # seconds for the other ranks to end after one has failed


class RankError(RuntimeError):
    """A run failed. `.causes` maps rank -> the exception of that rank, where there is one.

    `.hung` is True if the ranks waited for each other or the time ran out; `.output` is what each
    rank had printed.
    """

    def __init__(self, message: str, causes: dict | None = None, hung: bool = False):
        super().__init__(message)
        self.causes: dict[int, BaseException] = causes or {}
        self.hung = hung
        self.output: list[str] = []

    def _render_traceback_(self) -> list[str]:
        # IPython: the message says it all; the notebook's own frames would hide it.
        return [f"{type(self).__name__}: {self}"]


class NotWritten(RankError, NotImplementedError):
    """Every rank that failed met an exercise that is not written yet."""


@dataclasses.dataclass(repr=False)
class Result:
    """What a run left: `values` and `output` by rank, and the `trace` of all ranks if asked for."""

    values: list
    output: list[str]
    trace: Any = None

    def __repr__(self) -> str:
        return f"<Result of {len(self.values)} ranks: .values, .output, .trace>"


def run(
    fn: Callable,
    *args,
    world_size: int = 4,
    timeout: float = 60,
    trace: bool = False,
    echo: bool = True,
    **kwargs,
) -> Result:
    """Run ``fn(*args, **kwargs)`` on every one of `world_size` ranks, torch.distributed ready.

    `fn` may be defined in a cell. What the ranks print is shown when they are done, identical lines
    once (`echo=False` keeps it in the result only). Under torchrun `fn` runs in place, as the rank
    torchrun made of this process.

    Raises RankError for ranks that fail, hang or don't end within `timeout` seconds, NotWritten if
    all they met is an unwritten exercise, and ValueError for arguments that can't work.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}: it must be a whole number, at least 1")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}: it must be a number of seconds above 0")
    if not callable(fn):
        raise ValueError(f"the first argument is {fn!r}: it must be a function, not its result")
    if worker.in_rank:
        raise RuntimeError(
            "sb.run was called inside a rank: ranks can't start ranks, call the function instead"
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from . import in_place

        return in_place.run(fn, args, kwargs, world_size, timeout, trace)
    _say_once(too_few(world_size))
    try:
        call = worker.dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(
            f"{getattr(fn, '__name__', fn)!s} or one of its arguments can't be sent to the ranks "
            f"({type(error).__name__}: {error}); make it inside the function instead"
        ) from error
    folder = tempfile.mkdtemp(prefix="shardbook-")
    try:
        with _store() as store:
            job = {
                "call": call,
                "environ": dict(os.environ) | _defaults(),
                "world_size": world_size,
                "port": store.port,
                "run_id": os.path.basename(folder),
                "timeout": timeout,
                "trace": trace,
            }
            with open(f"{folder}/job", "wb") as f:
                pickle.dump(job, f)
            with _started(world_size, folder) as processes:
                tail = output.Tail(f"{folder}/output-0") if echo else None
                end = _watch(processes, folder, timeout, tail)
        outputs = [output.read(f"{folder}/output-{r}") for r in range(world_size)]
        if tail is not None and (text := output.fold(tail.rest(outputs))):
            print(text, flush=True)
        found = {r: _outcome(folder, r) for r in range(world_size)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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


def _defaults() -> dict[str, str]:
    """Environment of the ranks, unless the user has set it."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted = {
        "GLOO_SOCKET_IFNAME": loopback,  # works without a network, and behind a VPN
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {k: v for k, v in wanted.items() if k not in os.environ}


@contextlib.contextmanager
def _store() -> Iterator[dist.TCPStore]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody but this host
    listener.listen(1024)
    port = listener.getsockname()[1]
    yield dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextlib.contextmanager
def _started(world_size: int, folder: str) -> Iterator[list]:
    """The ranks' processes; whatever happens, none is left when the block ends."""
    before = set(multiprocessing.active_children())
    context = None
    try:
        method = "spawn"
        if "forkserver" in multiprocessing.get_all_start_methods():
            method = "forkserver"
            forkserver = multiprocessing.get_context(method)
            forkserver.set_forkserver_preload(["shardbook._preload"])
        with _no_main():
            context = torch.multiprocessing.start_processes(
                worker.main, (folder,), nprocs=world_size, join=False, start_method=method
            )
        yield context.processes
    finally:
        mine = context.processes if context else set(multiprocessing.active_children()) - before
        for process in mine:
            process.kill()
        for process in mine:
            process.join(10)


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


@dataclasses.dataclass
class _End:
    """Why a run was ended. Without a message the failed ranks' own outcomes say it."""

    message: str = ""
    hung: bool = False
    ranks: list[diagnose.Rank] = dataclasses.field(default_factory=list)
    ledger: diagnose.Ledger | None = None


def _watch(processes: list, folder: str, timeout: float, tail: output.Tail | None) -> _End | None:
    """Follow the ranks until all have returned (None) or the run can't go on."""
    ranks = [diagnose.Rank(r, folder) for r in range(len(processes))]
    ledger = diagnose.Ledger(len(ranks))
    start = news = time.monotonic()
    started = failed = None
    pause = 0.002
    while True:
        time.sleep(pause)
        pause = min(0.05, pause * 1.1)
        dead = [r for r in ranks if r.died is None and not processes[r.rank].is_alive()]
        now = time.monotonic()
        if any([r.read(ledger) for r in ranks]):  # a list: every one is read
            news = now
        for r in dead:  # after the last of its log is read
            r.died = _death(processes[r.rank].exitcode)
        if tail is not None:
            tail.poll()
        if ledger.bad:
            time.sleep(0.15)  # let the others come to it too
            for r in ranks:
                r.read(ledger)
            return _End(ledger.mismatch())
        bad = [r for r in ranks if r.gone and not r.returned]
        if not bad and all(r.finished for r in ranks):
            skipped = ledger.skipped()
            return _End(skipped) if skipped else None
        if flooded := [r.rank for r in ranks if _printed(folder, r.rank) > output.MOST_BYTES]:
            most = f"{output.MOST_BYTES // 2**20} MB"
            return _End(f"{output.ranks_text(flooded)} printed more than {most}")
        stuck = all(r.gone or _stuck(r, ledger) for r in ranks)
        quiet = now - news > _SETTLE and not any(r.threads for r in ranks)
        settled = stuck and (quiet or all(r.gone for r in ranks))
        if bad:
            failed = failed or now
            if settled or now - failed > _GRACE:
                return _End(ranks=ranks, ledger=ledger)
        elif ledger.abandoned(ranks):
            failed = failed or now
            if settled or now - failed > _GRACE:
                return _End(diagnose.hang(ranks, ledger, {}, ""), hung=True)
        elif settled:
            return _End(diagnose.hang(ranks, ledger, {}, ""), hung=True)
        started = started or (now if any(r.started for r in ranks) else None)
        if started is None and now - start > _START_LIMIT:
            return _End(f"no rank has started within {_START_LIMIT} s", hung=True)
        if started is not None and now - started > timeout:
            stacks = _stacks(processes, ranks, folder)
            return _End(diagnose.hang(ranks, ledger, stacks, f"{timeout:g} s"), hung=True)


def _stuck(rank: diagnose.Rank, ledger: diagnose.Ledger) -> bool:
    return bool(rank.waiting) and all(ledger.missing(e) for e in rank.waiting.values())


def _printed(folder: str, rank: int) -> int:
    try:
        return os.stat(f"{folder}/output-{rank}").st_size
    except FileNotFoundError:
        return 0


def _outcome(folder: str, rank: int) -> tuple | None:
    """("value", value, trace), ("error", exception, (type, frames)), ("unsendable", why, None)."""
    try:
        with open(f"{folder}/outcome-{rank}", "rb") as f:
            outcome = f.read()
    except FileNotFoundError:
        return None
    try:
        return pickle.loads(outcome)
    except (EOFError, pickle.UnpicklingError):
        return None  # the rank ended while writing it
    except Exception as error:
        return "unsendable", f"returned what can't be read here ({error!r})", None


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            more = " (os.abort, or a failed assertion in C++)" if name == "SIGABRT" else ""
            return f"was killed by {name}{more}"
    return f"left its process with exit code {code}"


def _stacks(processes: list, ranks: list, folder: str) -> dict[int, str]:
    """Where the Python code of each running rank is."""
    if not hasattr(signal, "SIGUSR1"):
        return {}
    running = [r.rank for r in ranks if r.started and not r.gone and not r.waiting]
    for r in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[r].pid, signal.SIGUSR1)
    time.sleep(0.3)
    found = {}
    for r in running:
        with contextlib.suppress(OSError), open(f"{folder}/stack-{r}") as f:
            found[r] = diagnose.stack_line(f.read())
    return found


def _values(found: list[tuple], trace: bool) -> tuple[list, Any]:
    for r, (kind, value, _) in enumerate(found):
        if kind != "value":
            raise RankError(f"rank {r} {value}")
    values = [value for _, value, _ in found]
    return values, merge_traces([recorded for *_, recorded in found]) if trace else None


def merge_traces(recorded: list) -> Any:
    """One trace of what each rank recorded, by rank."""
    from .trace.merge import merge

    return merge(recorded)


def _error(end: _End, found: dict[int, tuple]) -> RankError:
    """What to raise for a run that was ended; `found` has the outcomes of ranks that have one."""
    causes = {r: value for r, (kind, value, _) in found.items() if kind == "error"}
    if end.message:
        return RankError(end.message, causes, end.hung)
    deaths = {r.rank: r.died for r in end.ranks if r.died is not None and r.rank not in found}
    said: dict[str, list[int]] = {}
    for r in range(len(end.ranks)):
        kind, value, more = found.get(r, ("death", deaths.get(r), None))
        if kind == "error" and deaths and diagnose.lost_connection(value):
            continue  # an effect of a rank's end, which some ranks notice and others don't
        if kind == "error":
            value = diagnose.raised(more[0], value, more[1])
        if kind != "value" and value is not None:
            said.setdefault(value, []).append(r)
    lines = [f"{output.ranks_text(ranks)} {text}" for text, ranks in said.items()]
    unwritten = [isinstance(e, NotImplementedError) for e in causes.values()]
    if unwritten and all(unwritten) and not deaths:
        return NotWritten("\n".join(lines), causes)
    told = {r for ranks in said.values() for r in ranks}
    lines += diagnose.states(end.ranks, end.ledger, leave_out=told)
    return RankError("\n".join(lines), causes)
