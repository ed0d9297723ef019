"""What each rank was doing when a run failed or hung, in words."""

import linecache
import os
import re
import traceback
from collections import defaultdict

import torch

from .ledger import Ledger, Rank, at, place
from .output import ranks_text

LONG = 4000  # characters of an exception's text; .causes has it whole
_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_OURS = tuple(os.path.join(_HERE, f) for f in ("worker.py", "ranks.py", "in_place.py", "calls.py"))


def hang(ranks: list[Rank], ledger: Ledger, stacks: dict[int, str], limit: str) -> str:
    """Why the run does not end, who waits for whom, and where the others are."""
    doing = {r.rank: _doing(r, ledger, stacks) for r in ranks}
    waits = [e for r in ranks for e in r.waiting.values() if ledger.missing(e)]
    if not waits:  # DDP waits in C++, unseen: what it waits for is at least open
        waits = [e for r in ranks for e in r.calls.values() if ledger.missing(e) and not e.p2p]
    collectives = [e for e in waits if not e.p2p]
    if collectives:
        first = min(collectives, key=lambda e: (e.index, e.rank))
        missing = ledger.missing(first)
        same = [
            e.rank for e in collectives if (e.group, e.index) == (first.group, first.index)
        ]  # fmt: skip
        verb = "is" if len(same) == 1 else "are"
        head = (
            f"{ranks_text(missing)} never entered {first.name(ledger.world_size)}"
            f"{at(first.where)}; {ranks_text(same)} {verb} waiting"
        )
        told = same
    elif waits:
        first = waits[0]
        head = f"rank {first.rank} waits in {first.name(ledger.world_size)}{at(first.where)}"
        if first.op == "recv":
            who = f"rank {first.peer}" if first.peer >= 0 else "no rank"
            head += f", but {who} " + ("never sends it" if first.peer >= 0 else "sends")
        else:
            head += f", but rank {first.peer} does not receive it"
        back = [e for r in ranks if r.rank == first.peer for e in r.waiting.values()]
        if first.op == "send" and any(e.op == "send" for e in back):
            head += ": it is in a send itself (use isend, or let one side receive first)"
        told = [first.rank]
    else:
        head, told = f"no end after {limit}", []
    if limit and (collectives or waits):
        head += f" (ended after {limit})"
    return "\n".join([head, *_grouped({r: t for r, t in doing.items() if r not in told})])


def _doing(rank: Rank, ledger: Ledger, stacks: dict[int, str]) -> str:
    if rank.died is not None:
        return rank.died
    if rank.returned:
        return "returned"
    entry = rank.last_wait if rank.finished else next(iter(rank.waiting.values()), None)
    if entry is not None:
        return f"waiting in {entry.name(ledger.world_size)}{at(entry.where)}"
    if not rank.started:
        return "not started"
    line = stacks.get(rank.rank)
    return f"at {line}" if line else "still running"


def _grouped(said: dict[int, str]) -> list[str]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for r, text in said.items():
        by_text[text].append(r)
    return [f"  {ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]


def states(ranks: list[Rank], ledger: Ledger, leave_out: set[int]) -> list[str]:
    """A line for what the other ranks were doing, those that did the same together."""
    return _grouped({r.rank: _doing(r, ledger, {}) for r in ranks if r.rank not in leave_out})


def stack_line(text: str) -> str:
    """ "cell line 3 in step: time.sleep(100)" from what faulthandler wrote, the main thread's."""
    main = text.split("\n\n")[-1]
    return _innermost(re.findall(r'File "(.*)", line (\d+) in (.*)', main))


def frame_line(frame) -> str:
    """The same from a frame of this process."""
    stack = traceback.extract_stack(frame)[::-1]
    return _innermost([(f.filename, f.lineno, f.name) for f in stack])


def _innermost(frames: list[tuple]) -> str:
    for file, line, name in frames:
        if not _internal(file) and not file.startswith(os.path.dirname(os.__file__) + os.sep):
            source = linecache.getline(file, int(line)).strip()
            return f"{place(file, line)} in {name}" + (f": {source}" if source else "")
    return ""


def _internal(file: str) -> bool:
    return file.startswith((_TORCH, "<frozen")) or file in _OURS


def lost_connection(error: BaseException) -> bool:
    """What gloo raises on the ranks that talked to one that has died."""
    return isinstance(error, RuntimeError) and bool(
        re.search(r"Connection (closed|reset) by peer|Broken pipe", str(error))
    )


def raised(name: str, error: BaseException, frames: list[tuple]) -> str:
    """What a rank raised and where, and the lines that led there; to be read after "rank 2 "."""
    text = str(error)
    if isinstance(error, RuntimeError):
        text = text.removeprefix(f"{name}: ")  # an exception that can't be sent became this one
    if len(text) > LONG:
        text = f"{text[:LONG]} … ({len(text):,} characters)"
    frames = [f for f in frames if not _internal(f[0])]
    line = f" ({place(*frames[-1][:2])})" if frames else ""
    if isinstance(error, SystemExit):
        head = f"called sys.exit({'' if error.code is None else repr(error.code)}){line}"
    else:
        head = f"raised {name}{f': {text}' if text else ''}{line}"
    lines = []
    for file, number, function in frames[-5:]:
        source = linecache.getline(file, number).strip()
        lines.append(f"    {place(file, number)} in {function}" + (f": {source}" if source else ""))
    return "\n".join([head, *lines])
