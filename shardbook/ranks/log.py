"""The log of a rank's calls: its lines are written and read here, fields by their names.

One line an event, in one write each, so that the file is whole whenever its rank ends:
["start", {"pid"}], ["call", the fields of Entry], ["wait", {"number", "blocking"}],
["done", {"number"}], ["threads", {}] once a second thread makes calls, and ["finish", {"kind"}]
when the outcome is written.
"""

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from .. import calls
from ..words import learners_line


@dataclasses.dataclass
class Entry:
    """One call in a rank's log. `count` numbers the calls of this op, `index` what it must meet."""

    rank: int
    number: int  # of all calls of this rank
    op: str
    count: int
    group: str
    label: str  # what the program calls the group, if it does
    members: tuple[int, ...]
    peer: int | None
    tag: int
    reduce: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str
    handling: str  # the exception on its way while this call is made, as in `finally: barrier()`
    blocking: bool = False  # waited for inside the call, as dist.send does and isend does not
    index: int = 0

    @property
    def p2p(self) -> bool:
        return self.op in ("send", "recv")


class Log:
    """The writing end, in the rank. `call` is what `calls.watch` wants."""

    def __init__(self, path: str, rank: int):
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.rank, self.number = rank, 0
        self.counts: dict[tuple, int] = {}
        self.main = threading.get_ident()
        self.threads = False
        self._write("start", pid=os.getpid())

    def finish(self, kind: str) -> None:
        """The outcome is written, and is of this kind."""
        self._write("finish", kind=kind)

    def call(self, event: str, call: calls.Call) -> None:
        """Note that a call is entered, waited for, or done."""
        if event == "enter":
            if not self.threads and threading.get_ident() != self.main:
                self.threads = True
                self._write("threads")
            self._write("call", **self._fields(call))
            call.number = self.number
            self.number += 1
        elif hasattr(call, "number"):
            if event == "wait":
                self._write("wait", number=call.number, blocking=not call.is_async)
            else:
                self._write("done", number=call.number)

    def _fields(self, call: calls.Call) -> dict[str, Any]:
        key = (call.op, call.group_name, call.peer if call.op in ("send", "recv") else None)
        self.counts[key] = self.counts.get(key, 0) + 1
        return {
            "rank": self.rank,
            "number": self.number,
            "op": call.op,
            "count": self.counts[key],
            "group": call.group_name,
            "label": call.label,
            "members": call.group,
            "peer": call.peer,
            "tag": call.tag,
            "reduce": call.reduce,
            "shape": call.shape,
            "dtype": str(call.dtype).removeprefix("torch."),
            "nbytes": call.nbytes,
            "where": call.where,
            "handling": _handling(),
        }

    def _write(self, event: str, **fields) -> None:
        os.write(self.fd, json.dumps([event, fields]).encode() + b"\n")


def _handling() -> str:
    error = sys.exc_info()[1]
    if error is None:
        return ""
    try:
        text = str(error).strip().split("\n")[0][:200]
    except Exception:  # its text can't be shown
        text = ""
    line = learners_line(error.__traceback__)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({line})" if line else "")


class Reader:
    """The reading end, in the notebook's process."""

    def __init__(self, path: str):
        self.path = path
        self._at, self._tail = 0, b""

    def new(self) -> Iterator[tuple[str, Any]]:
        """(event, its fields) of what was written since; the fields of a call are an Entry."""
        try:
            with open(self.path, "rb") as f:
                f.seek(self._at)
                text = f.read()
        except FileNotFoundError:
            return
        self._at += len(text)
        *lines, self._tail = (self._tail + text).split(b"\n")
        for line in lines:
            event, fields = json.loads(line)
            if event == "call":
                fields["members"], fields["shape"] = (
                    tuple(fields["members"]),
                    tuple(fields["shape"]),
                )
                yield event, Entry(**fields)
            else:
                yield event, fields


class Takes(Protocol):
    """What is told of calls: a Ledger."""

    def add(self, entry: Entry) -> None:
        """A call is entered."""

    def done(self, entry: Entry) -> None:
        """A call is done."""


class Rank:
    """The state of one rank, as far as its log has been read."""

    def __init__(self, rank: int, path: str):
        self.rank, self._log = rank, Reader(path)
        self.started = self.finished = self.returned = self.threads = False
        self.died: str | None = None
        self.calls: dict[int, Entry] = {}  # issued and not known to be done
        self.waiting: dict[int, Entry] = {}
        self.last_wait: Entry | None = None

    def read(self, ledger: Takes) -> bool:
        """Take in what is new in the log, and tell the ledger; True if there was anything."""
        event = None
        for event, fields in self._log.new():
            if event == "start":
                self.started = True
            elif event == "finish":
                self.finished, self.returned = True, fields["kind"] == "value"
            elif event == "threads":
                self.threads = True
            elif event == "call":
                self.calls[fields.number] = fields
                ledger.add(fields)
            elif event == "wait" and fields["number"] in self.calls:
                entry = self.calls[fields["number"]]
                entry.blocking = fields["blocking"]
                self.waiting[entry.number] = self.last_wait = entry
            elif event == "done":
                self.waiting.pop(fields["number"], None)
                if (entry := self.calls.pop(fields["number"], None)) is not None:
                    ledger.done(entry)
        return event is not None

    @property
    def gone(self) -> bool:
        return self.finished or self.died is not None
