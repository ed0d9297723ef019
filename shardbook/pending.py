"""The real end of async calls, waited for or not: while a trace is open, a thread asks for it."""

import atexit
import contextlib
import threading
import time
from typing import Protocol

from torch.distributed import Work


class Ends(Protocol):
    """What is known of a call: when it started, when it ended, whether that end was seen."""

    start_ns: int
    end_ns: int | None
    complete: bool | None


traces = 0
"""How many traces are open: without one nobody asks."""
_pending: list[tuple[Work, Ends]] = []
_poller: threading.Thread | None = None
_lock = threading.Lock()


def watch_for_end(work: Work, call: Ends) -> None:
    """Have a thread ask the work from time to time whether it is done.

    A callback of its future would be exact, but would run in a thread of the backend: where the
    peer never comes, the process could not end (gloo's destructor waits for that thread).
    """
    global _poller
    with _lock:
        _pending.append((work, call))
        if _poller is None or not _poller.is_alive():  # it does not survive a fork
            _poller = threading.Thread(target=_poll, name="shardbook.pending", daemon=True)
            _poller.start()


def _poll() -> None:
    global _poller
    while True:
        with _lock:
            if not traces:
                _pending.clear()
            settle()
            if not _pending:
                _poller = None
                return
            age = (time.monotonic_ns() - _pending[-1][1].start_ns) / 1e9
        time.sleep(min(max(age / 20, 0.0002), 0.005))  # late by a twentieth at most, nearly free


def settle() -> None:
    """Note the end of every async call that is done by now."""
    for item in list(_pending):
        work, call = item
        if call.complete is False and work.is_completed():
            call.end_ns, call.complete = time.monotonic_ns(), True
        if call.complete:
            with contextlib.suppress(ValueError):
                _pending.remove(item)


@atexit.register
def _stop_polling() -> None:
    thread = _poller
    _pending.clear()
    if thread is not None:
        thread.join(1)
