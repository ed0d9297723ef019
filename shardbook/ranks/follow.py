"""Follow a run from outside: until all ranks have returned, or it is clear that they won't."""

import contextlib
import dataclasses
import os
import pickle
import signal
import time

from . import diagnose, output
from .folder import Folder
from .launch import uninterrupted
from .ledger import Ledger
from .log import Rank
from .mismatch import left_over, mismatch

_START_LIMIT = 120  # seconds until the first rank runs: the fork server imports torch once
_SETTLE = 0.3  # seconds without news before ranks that can't go on count as hung
_GRACE = 3.0  # seconds for the other ranks to end after one has failed


@dataclasses.dataclass
class End:
    """Why a run was ended. Without a message the failed ranks' own outcomes say it."""

    message: str = ""
    hung: bool = False
    interrupted: bool = False
    ranks: list[Rank] = dataclasses.field(default_factory=list)
    ledger: Ledger | None = None


def follow(processes: list, folder: Folder, timeout: float, tail: output.Tail | None) -> End | None:
    """Follow the ranks until all have returned (None) or the run can't go on."""
    ranks = [Rank(r, folder.calls(r)) for r in range(len(processes))]
    ledger = Ledger(len(ranks))
    start = time.monotonic()
    try:
        return _follow(processes, folder, timeout, tail, ranks, ledger)
    except KeyboardInterrupt:
        with uninterrupted():
            for r in ranks:
                r.read(ledger)
            stacks = _stacks(processes, ranks, folder)
            after = f"interrupted after {time.monotonic() - start:.0f} s"
            running = all(r.started for r in ranks)
            text = diagnose.hang(ranks, ledger, stacks, after) if running else ""
            return End(text, interrupted=True)


def _follow(
    processes: list,
    folder: Folder,
    timeout: float,
    tail: output.Tail | None,
    ranks: list[Rank],
    ledger: Ledger,
) -> End | None:
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
            return End(mismatch(ledger))
        bad = [r for r in ranks if r.gone and not r.returned]
        if not bad and all(r.finished for r in ranks):
            left = left_over(ledger)
            return End(left) if left else None
        if flooded := [r.rank for r in ranks if _printed(folder, r.rank) > output.MOST_BYTES]:
            most = f"{output.MOST_BYTES // 2**20} MB"
            return End(f"{output.ranks_text(flooded)} printed more than {most}")
        stuck = all(r.gone or _stuck(r, ledger) for r in ranks)
        quiet = now - news > _SETTLE and not any(r.threads for r in ranks)
        settled = stuck and (quiet or all(r.gone for r in ranks))
        if bad:
            failed = failed or now
            if settled or now - failed > _GRACE:
                return End(ranks=ranks, ledger=ledger)
        elif ledger.abandoned(ranks):
            failed = failed or now
            if settled or now - failed > _GRACE:
                return End(diagnose.hang(ranks, ledger, {}, ""), hung=True)
        elif settled:
            return End(diagnose.hang(ranks, ledger, {}, ""), hung=True)
        started = started or (now if any(r.started for r in ranks) else None)
        if started is None and now - start > _START_LIMIT:
            return End(f"no rank has started within {_START_LIMIT} s", hung=True)
        if started is not None and now - started > timeout:
            stacks = _stacks(processes, ranks, folder)
            return End(
                diagnose.hang(ranks, ledger, stacks, f"ended after {timeout:g} s"), hung=True
            )


def _stuck(rank: Rank, ledger: Ledger) -> bool:
    return bool(rank.waiting) and all(ledger.missing(e) for e in rank.waiting.values())


def _printed(folder: Folder, rank: int) -> int:
    try:
        return os.stat(folder.output(rank)).st_size
    except FileNotFoundError:
        return 0


def outcome(folder: Folder, rank: int) -> tuple | None:
    """("value", value, trace), ("error", exception, links), ("unsendable", why, None)."""
    try:
        with open(folder.outcome(rank), "rb") as f:
            outcome = f.read()
    except FileNotFoundError:
        return None
    try:
        return pickle.loads(outcome)
    except (EOFError, pickle.UnpicklingError):
        return None  # the rank ended while writing it
    except (Exception, SystemExit) as error:
        return "unsendable", f"returned what can't be read here ({error!r})", None


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            more = " (os.abort, or a failed assertion in C++)" if name == "SIGABRT" else ""
            return f"was killed by {name}{more}"
    return f"ended with exit code {code}"


def _stacks(processes: list, ranks: list[Rank], folder: Folder) -> dict[int, str]:
    """Where the Python code of each running rank is."""
    if not hasattr(signal, "SIGUSR1"):
        return {}
    running = [r.rank for r in ranks if r.started and not r.gone and not r.waiting]
    if not running:
        return {}
    for r in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[r].pid, signal.SIGUSR1)
    time.sleep(0.3)
    found = {}
    for r in running:
        with contextlib.suppress(OSError), open(folder.stack(r)) as f:
            found[r] = diagnose.stack_line(f.read())
    return found
