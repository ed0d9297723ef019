"""Which checks a learner has passed, in a small file of theirs.

``SHARDBOOK_PROGRESS`` names the file; set to nothing, nothing is recorded. Only what a person runs
counts: a check in a live notebook that is no solution, or ``python -m shardbook check``; no test.
"""

import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..chapters import CHAPTERS, exercises

try:
    import fcntl
except ImportError:  # Windows: the later of two writers wins
    fcntl = None


def path() -> Path | None:
    """Where progress is kept, or None if it is switched off."""
    named = os.environ.get("SHARDBOOK_PROGRESS")
    if named is not None:
        return Path(named) if named else None
    if os.environ.get("CI") or os.environ.get("PYTEST_CURRENT_TEST"):
        return None
    if sys.platform == "win32":
        data = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        data = Path.home() / "Library" / "Application Support"
    else:
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "shardbook" / "progress.json"


def load() -> dict[int, dict[str, dict]]:
    """``{chapter: {exercise: {"tries": n, "passed": date or None}}}``; empty if there is none."""
    where = path()
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if where is not None:
            stored = json.loads(where.read_text())
            return {int(k): {n: dict(e) for n, e in v.items()} for k, v in stored.items()}
    return {}


def record(chapter: int, exercise: str, status: str) -> None:
    """Note one verdict: "right" or "wrong". What was passed once stays passed."""
    where = path()
    if where is None or status not in ("right", "wrong"):
        return
    with contextlib.suppress(OSError), _alone(where):  # a full or read-only disk spoils no check
        known = load()
        entry = known.setdefault(chapter, {}).setdefault(exercise, {"tries": 0, "passed": None})
        entry["tries"] = entry.get("tries", 0) + 1
        if status == "right" and not entry.get("passed"):
            entry["passed"] = datetime.date.today().isoformat()
        handle, half = tempfile.mkstemp(dir=where.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as f:
            json.dump({str(k): known[k] for k in sorted(known)}, f, indent=1)
        os.replace(half, where)


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Two notebooks that check at the same time write one after the other; both verdicts stay."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with open(where.with_suffix(".lock"), "w") as lock:
        end = time.monotonic() + 5
        while fcntl is not None and time.monotonic() < end:  # a check never hangs for its record
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing it lets go
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # a file system without locks
                break
        yield


def record_in_notebook(chapter: int, exercise: str, status: str, answer: object) -> None:
    """The same from a cell: only in a live notebook, for an answer defined there."""
    notebook = _live_notebook()
    if notebook is None or "solutions" in Path(notebook).parts:
        return
    if getattr(answer, "__module__", None) == "__main__":
        record(chapter, exercise, status)


def _live_notebook() -> str | None:
    """The notebook this kernel was opened for; None under nbval, nbclient and plain Python."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return None
    opened_in_code = getattr(shell, "user_ns", {}).get("__vsc_ipynb_file__")
    return os.environ.get("JPY_SESSION_NAME") or opened_in_code


def table(width: int = 12) -> str:
    """A line a chapter: passed exercises of all, as people read it."""
    known = load()
    lines = []
    for chapter, name in CHAPTERS.items():
        names = exercises(chapter)
        if not names:
            continue
        passed = [n for n in names if known.get(chapter, {}).get(n, {}).get("passed")]
        done = round(width * len(passed) / len(names))
        bar = "█" * done + "░" * (width - done)
        left = [n for n in names if n not in passed]
        rest = f"  next: {left[0]}" if left and passed else ""
        title = f"{chapter} {name.replace('_', ' ')}"
        lines.append(f"{title:<24} {bar} {len(passed)}/{len(names)}{rest}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command `progress`: the table, and where it is kept."""
    print(table())
    print(f"\nkept in {path() or 'nothing: recording is switched off'}")
    return 0
