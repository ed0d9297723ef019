"""Examine an answer in a process of its own, so that it can hang, flood or die and harm nobody.

The process is forked from a fork server that holds torch already, and the ranks a check starts
come from the same server. Whatever is left when the verdict is there, or the deadline has passed,
is killed before the next answer is examined.
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time

from .. import _seams
from ..chapters import CHAPTERS
from ..notebook.lab import unwritten
from ..ranks.processes import end_descendants
from .answers import SCRATCH, Answers, Missing, load
from .report import Property, Verdict, checks_of

FORKS = "forkserver" in multiprocessing.get_all_start_methods()


def start(chapter: int) -> None:
    """Start the fork server with what the chapter's checks need. Call it once, before examine."""
    if not FORKS:
        return
    _seams.start_fork_server(["shardbook.ranks.preload", f"shardbook.checks.{CHAPTERS[chapter]}"])


@dataclasses.dataclass
class Examined:
    """A verdict, and whether the file could not even be loaded (then `trouble` says why)."""

    verdict: Verdict
    trouble: str = ""


def examine(answers: Answers, chapter: int, exercise: str, deadline: float) -> Examined:
    """The verdict on one exercise, within `deadline` seconds whatever the answer does."""
    context = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    printed, output = context.Pipe(duplex=False)
    os.set_blocking(printed.fileno(), False)
    began = time.monotonic() + START  # the first start waits until the server has imported torch
    scratch = tempfile.mkdtemp(prefix="shardbook-check-")
    args = (theirs, output, answers, chapter, exercise, deadline, scratch)
    child = context.Process(target=_child, args=args)
    child.start()
    theirs.close()
    output.close()
    loaded, flood = False, 0
    try:
        while True:
            left = began + deadline - time.monotonic()
            if left <= 0:
                why = f"did not finish within {deadline:g} s: it hangs, or is far too slow"
                break
            ready = multiprocessing.connection.wait([ours, printed, child.sentinel], left)
            if printed in ready:
                flood += _drain(printed)
                if loaded and flood > FLOOD:
                    why = f"printed more than {FLOOD // 1_000_000} MB"
                    break
            if ours in ready:
                try:
                    kind, found = ours.recv()
                except (EOFError, OSError):
                    child.join(5)
                    why = _ending(child.exitcode)
                    break
                except Exception:  # it wrote into the pipe itself
                    why = "broke the connection to its check"
                    break
                if kind == "verdict":
                    return Examined(found)
                if kind == "trouble":
                    return Examined(found, found.properties[0].detail)
                if kind == "started":
                    began = time.monotonic()
                    continue
                _drain(printed)
                loaded, flood = True, 0  # what the file printed on its own is not the answer's
            elif child.sentinel in ready and not ours.poll(0.2):  # no last words in the pipe
                why = _ending(child.exitcode)
                break
        seconds = max(0.0, time.monotonic() - began)
        if not loaded:
            return Examined(unusable(exercise, f"loading it {why}", seconds), f"loading it {why}")
        wrong = [Property("ends, prints little and leaves its process alone", False, f"it {why}")]
        return Examined(Verdict(exercise, "wrong", wrong, _HINT, seconds))
    finally:
        ours.close()
        printed.close()
        with contextlib.suppress(Exception):
            child.kill()
            child.join(5)
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _drain(pipe) -> int:
    """Read and drop what was printed; its length. The pipe's end is closed once it is reached."""
    read = 0
    with contextlib.suppress(BlockingIOError):
        while data := os.read(pipe.fileno(), 1 << 16):
            read += len(data)
            if read > 2 * FLOOD:
                break
        else:
            os.dup2(_NEVER[0], pipe.fileno())  # at its end: it must not wake the wait any more
    return read


_NEVER = os.pipe()  # nobody writes into it
START = 300  # seconds
FLOOD = 1_000_000  # bytes an answer may print while it is examined


_HINT = "call it on a small input in a cell; with sb.run, the message tells which rank waits where"


def unusable(exercise: str, why: str, seconds: float) -> Verdict:
    """The schema of --json has three statuses; of these, only "not written" is no verdict."""
    return Verdict(
        exercise, "not written", [Property("the file can be used", False, why)], "", seconds
    )


def _ending(code: int | None) -> str:
    if code is None:
        return "closed the connection to its check"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed its process ({signal.Signals(-code).name})"
    return f"ended its process (exit code {code})"


def _child(
    pipe, output, answers: Answers, chapter: int, exercise: str, deadline: float, scratch: str
) -> None:
    """Runs in the process of the answer."""
    began = time.monotonic()
    pipe.send(("started", None))
    if FORKS:
        _seams.keep_parents_fork_server()  # it serves this process's ranks too
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in (1, 2):  # what an answer prints is only counted
        os.dup2(output.fileno(), fd)
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", errors="replace")
    os.environ.update({"SHARDBOOK_PROGRESS": "", SCRATCH: scratch, "TMPDIR": scratch})
    tempfile.tempdir = scratch  # what sb.run leaves when it is killed goes with it
    checks = checks_of(importlib.import_module(f"shardbook.checks.{CHAPTERS[chapter]}"))

    def say(kind: str, verdict: Verdict | None = None) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        pipe.send((kind, verdict))

    def seconds() -> float:
        return time.monotonic() - began

    try:
        answer = load(answers, exercise)
    except Missing as error:
        say("verdict", Verdict(exercise, "not written", [], str(error), seconds()))
    except BaseException as error:
        say("trouble", unusable(exercise, _where(error, answers), seconds()))
    else:
        say("loaded")
        if not callable(answer):
            what = f"{exercise} is {type(answer).__name__}, expected a function or a class"
            wrong = [Property("can be called", False, what)]
            say("verdict", Verdict(exercise, "wrong", wrong, "define it with def or class", 0.0))
        else:
            try:
                found = checks[exercise].examine(answer, timeout=min(30.0, deadline / 2))
            except BaseException as error:  # KeyboardInterrupt raised by the answer, for one
                wrong = [Property("runs", False, f"raised {type(error).__name__}")]
                found = Verdict(exercise, "wrong", wrong, _HINT, seconds())
            say("verdict", found)
    os._exit(0)  # no thread and no atexit handler of the answer delays the next one


def _where(error: BaseException, answers: Answers) -> str:
    """ "line 3: NameError: name 'x' is not defined", of the innermost line of the answers."""
    line, trace = "", error.__traceback__
    titles = {title for title, _ in answers.parts}
    while trace:
        if trace.tb_frame.f_code.co_filename in titles:
            title = trace.tb_frame.f_code.co_filename
            line = f"line {trace.tb_lineno}" + (f" of {title}" if answers.notebook else "")
        trace = trace.tb_next
    if text := unwritten(error):
        return f"{line or 'it'} uses what is not written: {text}"
    try:
        text = str(error).strip().split("\n")[0][:500]
    except Exception:
        text = ""
    return f"{line}: {type(error).__name__}" + (f": {text}" if text else "")
