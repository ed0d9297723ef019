"""Which checks a learner has passed, in a small file of theirs: a line of JSON for each verdict.

``SHARDBOOK_PROGRESS`` names the file; set to nothing, nothing is recorded. Only what a person runs
counts: a check in a live notebook, or ``python -m shardbook check``; no test, and neither a lesson
nor a solution of this book. Lines are only ever appended, so nothing that a reader can't make sense
of is lost, and two writers need no lock.
"""

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from ..chapters import CHAPTERS, exercises


def path() -> Path | None:
    """Where progress is kept, or None if it is switched off."""
    named = os.environ.get("SHARDBOOK_PROGRESS")
    if named is not None:
        return Path(named) if named else None
    if os.environ.get("CI") or os.environ.get("PYTEST_CURRENT_TEST"):
        return None
    return platformdirs.user_data_path("shardbook", appauthor=False) / "progress.jsonl"


def load() -> dict[int, dict[str, dict]]:
    """``{chapter: {exercise: {"tries": n, "passed": date or None}}}``; empty if there is none."""
    where, known = path(), {}
    if where is None:
        return known
    for file in dict.fromkeys([where.with_suffix(".json"), where]):  # the first is the older form
        for chapter, exercise, tries, passed in _stored(file):
            entries = known.setdefault(chapter, {})
            entry = entries.setdefault(exercise, {"tries": 0, "passed": None})
            entry["tries"] += tries
            entry["passed"] = entry["passed"] or passed  # what was passed once stays passed
    return known


_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _stored(file: Path) -> Iterator[tuple[int, str, int, str | None]]:
    """(chapter, exercise, tries, date passed) a line, oldest first; a damaged one is skipped."""
    try:
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
    except OSError:
        return
    with contextlib.suppress(*_DAMAGED):
        first, end = json.JSONDecoder().raw_decode(text)
        if "exercise" not in first:  # the older form: one object for everything
            for chapter, entries in first.items():
                for exercise, entry in entries.items():
                    yield int(chapter), exercise, int(entry["tries"]), entry["passed"]
            text = text[end:]
    for line in text.splitlines():
        with contextlib.suppress(*_DAMAGED):
            verdict = json.loads(line)
            right = {"right": True, "wrong": False}[verdict["status"]]
            date = str(verdict["at"])[:10] if right else None
            yield int(verdict["chapter"]), str(verdict["exercise"]), 1, date


def record(chapter: int, exercise: str, status: str) -> None:
    """Note one verdict, "right" or "wrong", with one write that no other writer can split."""
    where = path()
    if where is None or status not in ("right", "wrong"):
        return
    at = datetime.datetime.now().isoformat(timespec="seconds")
    line = json.dumps({"at": at, "chapter": chapter, "exercise": exercise, "status": status})
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    flags |= getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not hang us
    with contextlib.suppress(OSError):  # a full or read-only disk spoils no check
        where.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(where, flags, 0o644)
        try:
            os.write(file, f"{_break(file)}{line}\n".encode())
        finally:
            os.close(file)


def _break(file: int) -> str:
    """A line break where the file ends without one: what follows half a line stays readable."""
    if not os.fstat(file).st_size:
        return ""
    os.lseek(file, -1, os.SEEK_END)
    return "" if os.read(file, 1) == b"\n" else "\n"


def record_in_notebook(chapter: int, exercise: str, status: str, answer: object) -> None:
    """The same from a cell: only in a live notebook, for an answer defined there."""
    notebook = _live_notebook()
    if notebook is None or is_shown(notebook):
        return
    if getattr(answer, "__module__", None) == "__main__":
        record(chapter, exercise, status)


def is_shown(notebook: str | Path) -> bool:
    """Whether it is a notebook of this book in which the book answers: a lesson or a solution.

    Wherever it lies: the metadata say that the book made it, and a lab says that it is one.
    """
    for file in (Path(notebook), Path(Path(notebook).name)):  # some servers give a relative path
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(file.read_bytes())
            texts = ["".join(cell["source"]) for cell in found["cells"]]
            is_lab = any(text.startswith("This is the lab.") for text in texts)
            return "shardbook" in found["metadata"] and not is_lab
    return False


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
