"""Examine an answer in a process of its own, so that it can hang, flood or die and harm nobody.

The process is forked from a fork server that holds torch and the checks already, and the ranks a
check starts come from the same server. Whatever is left when the verdict is there, or the deadline
has passed, is killed before the next answer is examined. It guards against accidents and is no
sandbox: an answer may do to files and to the network what its user may.
"""

import contextlib
import dataclasses
import importlib
import linecache
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

import torch

from .. import _seams
from ..chapters import CHAPTERS
from ..notebook.lab import unwritten
from ..ranks import output as ranks_output
from ..ranks.processes import end_descendants
from .answers import SCRATCH, Answers, Loaded, Missing, NotLoaded, load
from .report import Property, Verdict, checks_of
from .statements import statements

FORKS = "forkserver" in multiprocessing.get_all_start_methods()
START = 300  # seconds until the first process runs: it waits for the server's import of torch
FLOOD = 2**20  # bytes that an answer, or a rank of it, may print while it is examined
FLOOD_LOADING = 100 * FLOOD  # what a file prints on its own is not the answer's
HINT = "call it on a small input in a cell; with sb.run, the message tells which rank waits where"


@dataclasses.dataclass
class Examined:
    """A verdict, and whether the deadline passed before the answer gave a reason for one."""

    verdict: Verdict
    hung: bool = False


def examine(answers: Answers, chapter: int, exercise: str, deadline: float) -> Examined:
    """The verdict on one exercise, within `deadline` seconds whatever the answer does.

    What hangs while the answer is loaded is noted in `answers`, so that no other waits for it.
    """
    context = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    printed, output = context.Pipe(duplex=False)
    os.set_blocking(printed.fileno(), False)
    scratch = tempfile.mkdtemp(prefix="shardbook-check-")
    args = (theirs, output, answers, chapter, exercise, deadline, scratch)
    child = context.Process(target=_child, args=args)
    child.start()
    theirs.close()
    output.close()
    try:
        return _Watch(ours, printed, child, deadline).follow(answers, exercise)
    finally:
        ours.close()
        printed.close()
        with contextlib.suppress(Exception):
            child.kill()
            child.join(5)
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


class _Watch:
    """Reads what the process of an answer says until it has a verdict, or one can be given."""

    def __init__(self, ours, printed, child, deadline: float):
        self.ours, self.printed, self.child, self.deadline = ours, printed, child, deadline
        self.began = time.monotonic() + START
        self.loaded, self.flood = False, 0
        self.statement: int | None = None  # of a notebook, that is being run

    def follow(self, answers: Answers, exercise: str) -> Examined:
        while True:
            why, hung, verdict = self._next()
            if verdict is not None:
                return Examined(verdict)
            if why:
                break
        seconds = max(0.0, time.monotonic() - self.began)
        if self.loaded:
            wrong = [
                Property("ends, prints little and leaves its process alone", False, f"it {why}")
            ]
            return Examined(Verdict(exercise, "wrong", wrong, HINT, seconds), hung)
        if self.statement is None:
            return Examined(not_examined(exercise, f"loading it {why}", seconds))
        answers.stuck[self.statement] = why
        where = statements(answers.parts)[self.statement].where
        return Examined(not_examined(exercise, f"{where} {why}", seconds))

    def _next(self) -> tuple[str, bool, Verdict | None]:
        """Wait for news. (why the answer must be ended or "", whether it hangs, the verdict)."""
        left = self.began + self.deadline - time.monotonic()
        if left <= 0:
            hangs = f"did not finish within {self.deadline:g} s: it hangs, or is far too slow"
            return hangs, True, None
        sources = [self.ours, self.child.sentinel, *([self.printed] if self.printed else [])]
        ready = multiprocessing.connection.wait(sources, left)
        if self.printed in ready:
            self._drain()
            most = FLOOD if self.loaded else FLOOD_LOADING
            if self.flood > most:
                return f"printed more than {most // 2**20} MB", False, None
        if self.ours in ready:
            try:
                kind, said = self.ours.recv()
            except (EOFError, OSError):
                self.child.join(5)
                return _ending(self.child.exitcode), False, None
            except Exception:  # it wrote into the pipe itself
                return "broke the connection to its check", False, None
            return "", False, self._said(kind, said)
        if self.child.sentinel in ready and not self.ours.poll(0.2):  # no last words in the pipe
            return _ending(self.child.exitcode), False, None
        return "", False, None

    def _said(self, kind: str, said: Any) -> Verdict | None:
        if kind == "started":
            self.began = time.monotonic()
        elif kind == "statement":
            self.statement = said
        elif kind == "loaded":
            self._drain()
            self.loaded, self.flood = True, 0
        return said if kind == "verdict" else None

    def _drain(self) -> None:
        """Read and drop what was printed, and count it. At its end the pipe is not asked again."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(2 * FLOOD >> 16):
                read = len(os.read(self.printed.fileno(), 1 << 16)) if self.printed else 0
                if not read:
                    self.printed = None
                    return
                self.flood += read


def not_examined(exercise: str, why: str, seconds: float = 0.0) -> Verdict:
    """There is no verdict: the file, or what defines the exercise, could not be loaded."""
    property = Property("what defines it can be loaded", False, why)
    return Verdict(exercise, "not examined", [property], "", seconds)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed the connection to its check"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed its process ({signal.Signals(-code).name})"
    return f"ended its process (exit code {code})"


# In the process of the answer


def _child(
    pipe, output, answers: Answers, chapter: int, exercise: str, deadline: float, scratch: str
) -> None:
    pipe.send(("started", None))
    if FORKS:
        _seams.keep_parents_fork_server()  # it serves this process's ranks too
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in (1, 2):  # what an answer prints is only counted
        os.dup2(output.fileno(), fd)
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", errors="replace")
    os.environ.update({"SHARDBOOK_PROGRESS": "", SCRATCH: scratch, "TMPDIR": scratch})
    tempfile.tempdir = scratch  # what sb.run leaves when it is killed goes with it

    def say(kind: str, what: Any = None) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        pipe.send((kind, what))

    began = time.monotonic()
    verdict = _verdict(answers, chapter, exercise, deadline, say)
    verdict.seconds = time.monotonic() - began
    say("verdict", verdict)
    os._exit(0)  # no thread and no atexit handler of the answer delays the next one


def _verdict(answers: Answers, chapter: int, exercise: str, deadline: float, say) -> Verdict:
    torch.set_num_threads(1)  # several on a busy machine wait for each other: 1 s becomes 80 s
    ranks_output.MOST_BYTES = FLOOD  # a run ends as soon as one of its ranks prints more
    checks = checks_of(importlib.import_module(f"shardbook.checks.{CHAPTERS[chapter]}"))
    try:
        loaded = load(answers, exercise, lambda index: say("statement", index))
    except Missing as error:
        return Verdict(exercise, "not written", [], str(error), 0.0)
    except NotLoaded as error:
        return not_examined(exercise, str(error))
    except BaseException as error:
        return not_examined(exercise, _where(error, answers))
    say("loaded")
    if not callable(loaded.answer):
        what = f"{exercise} is {type(loaded.answer).__name__}, expected a function or a class"
        wrong = [Property("can be called", False, what)]
        return Verdict(exercise, "wrong", wrong, "define it with def or class", 0.0)
    try:
        found = checks[exercise].examine(loaded.answer, timeout=min(30.0, deadline / 2))
    except BaseException as error:  # KeyboardInterrupt raised by the answer, for one
        wrong = [Property("runs", False, f"raised {type(error).__name__}")]
        return Verdict(exercise, "wrong", wrong, HINT, 0.0)
    return _without_what_failed(found, loaded)


def _without_what_failed(found: Verdict, loaded: Loaded) -> Verdict:
    """An answer is not wrong for lack of a name that another statement failed to make."""
    said = " ".join(p.detail for p in found.properties if not p.ok)
    for name, why in loaded.failed.items():
        if found.status == "wrong" and f"name {name!r} is not defined" in said:
            return not_examined(found.exercise, f"it uses {name}, and {why}")
    return found


def _where(error: BaseException, answers: Answers) -> str:
    """ "line 3: NameError: name 'x' is not defined (y = x + 1)", of the answers' innermost line."""
    at, source, trace = "it", "", error.__traceback__
    titles = {title for title, _ in answers.parts}
    while trace:
        file, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if file in titles:
            at = f"{file}, line {number}" if answers.notebook else f"line {number}"
            source = f" ({linecache.getline(file, number).strip()[:100]})"
        trace = trace.tb_next
    if text := unwritten(error):
        return f"{at} uses what is not written: {text}"
    text = ""
    with contextlib.suppress(Exception):
        text = str(error).strip().split("\n")[0][:500]
    return f"{at}: {type(error).__name__}{': ' if text else ''}{text}{source}"
