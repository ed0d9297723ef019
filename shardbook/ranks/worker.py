"""What happens in a rank: its process is tied to the notebook's, its calls are written down.

A rank leaves three files in the run's folder: what it printed, a log of its calls (read by
`diagnose`), and its outcome. When it is done it waits to be ended, so that a rank which leaves
early is told apart from one whose connection broke.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
import types
import warnings
from collections import ChainMap
from datetime import timedelta
from typing import ClassVar

import cloudpickle
import torch
import torch.distributed as dist

from .. import calls
from ..devices import backend, set_rank_device
from . import processes

in_rank = False  # True in a process that `sb.run` started


def _code_with_its_file(code: types.CodeType) -> tuple:
    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in args)


class _Pickler(cloudpickle.Pickler):
    # cloudpickle forgets where code comes from; the messages need its file and line.
    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: object) -> bytes:
    """Pickle by value what cells and the main file define, by reference what modules define."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def main(local_rank: int, folder: str) -> None:
    """Run the job of this folder as this rank; never returns."""
    global in_rank
    in_rank = True
    with open(f"{folder}/job", "rb") as f:
        job = pickle.load(f)
    _capture(f"{folder}/output-{local_rank}")
    log = _Log(f"{folder}/calls-{local_rank}")
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a group of its own, so that what this rank starts can be ended with it
    log.write("S", os.getpid())
    _end_with_parent()
    processes.adopt_orphans()
    warnings.formatwarning = lambda message, kind, *_, **__: f"{kind.__name__}: {message}\n"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the notebook's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(f"{folder}/stack-{local_rank}", "w") as stack:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # The last resort, should this process be stuck where no Python runs and the parent be gone.
        faulthandler.dump_traceback_later(job["timeout"] + 30, exit=True, file=stack)
        rank = os.getpid()
        kind, outcome = _attempt(job, local_rank, log)
        with contextlib.suppress(Exception):  # closed, or replaced by something else
            sys.stdout.flush()
        if os.getpid() != rank:  # a child that the function forked: the rank itself reports
            os._exit(0)
        with open(f"{folder}/outcome-{local_rank}", "wb") as f:
            f.write(outcome)
        log.write("F", kind)
        threading.Event().wait()


def _attempt(job: dict, local_rank: int, log: "_Log") -> tuple[str, bytes]:
    try:
        os.environ.clear()
        os.environ.update(job["environ"] | _environment(job, local_rank))
        torch.set_num_threads(1)
        fn, args, kwargs = cloudpickle.loads(job["call"])
        set_rank_device(local_rank, job["world_size"])
        calls.install()
        calls.watch = log.call
        # Ours comes first and says more; torch's own deadline is the second line.
        limit = timedelta(seconds=job["timeout"] + 15)
        dist.init_process_group(backend(), timeout=limit)
        if job["trace"]:
            from ..tracing.record import start_rank_trace

            trace = start_rank_trace()
        try:
            value = fn(*args, **kwargs)
        finally:
            recorded = trace.stop() if job["trace"] else None
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: every rank reports
        return "error", _failure(error)
    try:
        return "value", dumps(("value", value, recorded))
    except BaseException as error:
        return "unsendable", dumps(("unsendable", cannot_send(value, error), None))


def cannot_send(value: object, error: BaseException) -> str:
    """Why a return value that can't be pickled is refused, and what to return instead."""
    reason = f"{type(error).__name__}: {_text(error)}".splitlines()[0]
    return (
        f"returned {_kind(value)}, which can't be sent back ({reason}); "
        "return tensors, numbers or lists"
    )


def _kind(value) -> str:
    name = type(value).__qualname__
    if isinstance(value, (list, tuple)) and value:
        return f"a {name} of {', '.join(dict.fromkeys(type(v).__qualname__ for v in value))}"
    if isinstance(value, dict) and value:
        kinds = ", ".join(dict.fromkeys(type(v).__qualname__ for v in value.values()))
        return f"a dict with values of type {kinds}"
    return f"an object of type {name}"


def _failure(error: BaseException) -> bytes:
    frames = [
        (f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)
    ]
    name = type(error).__name__
    for candidate in (error, RuntimeError(f"{name}: {_text(error)}")):
        try:
            str(candidate)  # it is shown, so it must have a text
            payload = dumps(("error", candidate, (name, frames)))
            cloudpickle.loads(payload)  # some exceptions pickle, but don't come back
            return payload
        except BaseException:  # an exception's own methods may raise anything
            continue
    raise AssertionError("a RuntimeError can always be pickled")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(its text can't be shown)"


def _environment(job: dict, local_rank: int) -> dict[str, str]:
    """What torchrun sets, so that code which reads it works in a cell too."""
    size = str(job["world_size"])
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job["run_id"],
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _capture(path: str) -> None:
    # By descriptor, so that what C++ and subprocesses print is this rank's too.
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end_with_parent() -> None:
    # The pipe from the notebook's process closes however that process ends.
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait():
        multiprocessing.connection.wait([parent.sentinel])
        processes.end_trees([os.getpid()])
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=wait, daemon=True).start()


class _Log:
    """One line an event, in one write each, so that the file is whole whenever this process ends.

    S pid / C number op count group ranks peer tag shape dtype nbytes where / W number / D number
    / T (a thread other than the first has made a call) / F kind (the outcome is written).
    """

    def __init__(self, path: str):
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.number = 0
        self.counts: dict[tuple, int] = {}
        self.main = threading.get_ident()
        self.threads = False

    def write(self, *fields) -> None:
        os.write(self.fd, ("\t".join(map(str, fields)) + "\n").encode("utf-8", "replace"))

    def call(self, event: str, call: calls.Call) -> None:
        if event == "enter":
            if not self.threads and threading.get_ident() != self.main:
                self.threads = True
                self.write("T")
            key = (call.op, call.group_name, call.peer if call.op in ("send", "recv") else None)
            self.counts[key] = self.counts.get(key, 0) + 1
            call.number, self.number = self.number, self.number + 1
            self.write(
                "C",
                call.number,
                call.op,
                self.counts[key],
                call.group_name,
                ",".join(map(str, call.group)),
                -1 if call.peer is None else call.peer,
                call.tag,
                ",".join(map(str, call.shape)),
                str(call.dtype).removeprefix("torch."),
                call.nbytes,
                call.where,
            )
        elif hasattr(call, "number"):
            self.write("W" if event == "wait" else "D", call.number)
