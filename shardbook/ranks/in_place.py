"""sb.run under torchrun: this process is already a rank, so the function runs right here."""

import atexit
import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from .. import calls
from ..devices import backend, set_rank_device, too_few
from ..words import at
from . import diagnose, output, pickles, worker
from .captured import Captured
from .result import NotWritten, RankError, Result


def run(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    world_size: int,
    timeout: float,
    trace: bool,
    echo: bool,
    env: dict[str, str],
) -> Result:
    """``fn(*args, **kwargs)`` on this rank; the Result has the values of all ranks of all hosts.

    What all ranks print is shown once, by the first rank, lines that several printed folded. A rank
    that fails prints what it had, raises and so ends its process, upon which torchrun ends the
    others. The first rank's `env` is set on all hosts while the function runs.
    """
    if not dist.is_initialized():
        local_rank, local_size = _place()
        if local_rank == 0 and (note := too_few(local_size)):
            print(note)
        set_rank_device(local_rank, local_size)
        dist.init_process_group(backend(), timeout=timedelta(seconds=timeout + 15))
        atexit.register(_leave)
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != world_size and rank == 0:
        print(f"sb.run: {size} ranks, as torchrun started them (world_size={world_size} is unused)")
    calls.install()
    captured = Captured(live=echo and rank == 0)
    with _deadline(rank, timeout, captured), _environ(env):
        worker.in_rank = True
        captured.begin()
        try:
            if trace:
                from ..tracing.record import start_rank_trace

                recorder = start_rank_trace()
            try:
                value = fn(*args, **kwargs)
            finally:
                recorded = recorder.stop() if trace else None
        except NotImplementedError as error:
            raise NotWritten(f"rank {rank} raised NotImplementedError: {error}") from error
        except Exception as error:
            raise RankError(
                f"rank {rank} raised {type(error).__name__}: {error}", {rank: error}
            ) from error
        else:
            captured.end()
        finally:
            worker.in_rank = False
            captured.give_up()
        if trace:
            from ..tracing.clock import offset

            recorded.clock = offset()
        found: list = [None] * size
        dist.all_gather_object(found, (_packed(value, recorded, rank), captured.text))
    outputs = [text for _, text in found]
    if echo and rank == 0 and (shown := output.fold(captured.tail.rest(outputs))):
        output.show(shown)
    pairs = [pickle.loads(packed) for packed, _ in found]
    merged = None
    if trace:
        from ..tracing.merge import merge

        merged = merge([t for _, t in pairs])
    return Result([v for v, _ in pairs], outputs, merged)


def _leave() -> None:
    """End gloo's threads while Python still runs.

    One of them may hold the last call's tensors; where it lets go of them after Python has ended,
    the process aborts. A thread does it, since gloo waits for calls whose peer never came. A rank
    that fails ends at once.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(5)


def _place() -> tuple[int, int]:
    """(rank on this host, ranks on it) as the launcher says."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in names if name not in os.environ]
    if absent:
        raise RuntimeError(
            f"RANK and WORLD_SIZE are set, so this process is a rank of some launcher, but "
            f"{', '.join(absent)} is not: start with torchrun, or unset RANK to start ranks here"
        )
    try:
        local_rank, local_size = (int(os.environ[name]) for name in names[2:4])
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise RuntimeError(
            f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers ({error})"
        ) from None
    return local_rank, local_size


def _packed(value: object, recorded: object, rank: int) -> bytes:
    try:
        return pickles.dumps((value, recorded))
    except Exception as error:
        raise RankError(
            f"rank {rank} {pickles.cannot_send(value, error)}", {rank: error}
        ) from error


@contextlib.contextmanager
def _environ(env: dict[str, str]) -> Iterator[None]:
    """The first rank's variables, on every rank of every host, until the block ends."""
    said = [env]
    dist.broadcast_object_list(said, src=0)
    before = {name: os.environ.get(name) for name in said[0]}
    os.environ.update(said[0])
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deadline(rank: int, timeout: float, captured: Captured) -> Iterator[None]:
    """End this process, with a line that says where it is, if the block takes too long."""
    waiting: list[calls.Call] = []
    main = threading.get_ident()

    def note(event: str, call: calls.Call) -> None:
        if event == "wait":
            waiting.append(call)
        elif event == "done" and call in waiting:
            waiting.remove(call)

    def end() -> None:
        if waiting:
            call = waiting[-1]
            peer = f" (peer: rank {call.peer})" if call.peer is not None else ""
            line = f", {at(call.where)[2:-1]}" if call.where else ""
            here = f"waits in {call.op}{peer}{line}"
        else:
            here = f"is at {diagnose.frame_line(sys._current_frames()[main])}"
        captured.give_up()
        text = f"RankError: rank {rank} did not end within {timeout:g} s: it {here}\n"
        os.write(2, text.encode())
        os._exit(1)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    before, calls.watch = calls.watch, note
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        calls.watch = before
