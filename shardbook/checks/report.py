"""What a check is made of: named properties, each with a hint for the one who does not hold it.

A check is a function ``(answer, report)`` with one ``with report.property(...)`` block a property.
The block fails by raising; what it raises becomes the ✗ line. Nothing printed for an answer that
holds depends on the machine: a worst error is told only when it is too large.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from ..chapters import chapter_of
from ..notebook import lab, progress
from ..ranks import run
from ..ranks.result import NotWritten, RankError
from .families import OnGroups
from .functions import Function
from .seen import ROUNDS, Rounds
from .wrong import Hint, NotExamined, Wrong, hint_for, noting, say, unwritten

RUNS = "runs"  # the property that fails when the answer raises outside all others


class _Stop(Exception):
    """Ends a check early: not written, hung, or the caller asked for the first failure only."""


@dataclasses.dataclass
class Property:
    """One line of a check's verdict."""

    name: str
    ok: bool
    detail: str = ""
    hint: str = ""
    status: str = ""  # "ok", "failed", or "not examined" where a run that it needs has failed

    def __post_init__(self):
        self.status = self.status or ("ok" if self.ok else "failed")


@dataclasses.dataclass
class Verdict:
    """What a check found. status is "right", "wrong" or "not written"."""

    exercise: str
    status: str
    properties: list[Property]
    hint: str  # of the first property that failed
    seconds: float

    def lines(self) -> list[str]:
        """The verdict as people read it, the same on every machine when all holds."""
        if self.status == "not written":
            return [f"✎ {self.exercise} is not written yet"]
        lines, told = [], {""}
        for p in self.properties:
            mark = {"ok": "✓", "failed": "✗"}.get(p.status, "–")
            lines.append(f"{mark} {p.name}" + (f": {p.detail}" if p.detail else ""))
            if p.hint not in told:  # two properties may fail for one reason
                lines.append(f"  hint: {p.hint}")
            told.add(p.hint)
        if self.hint not in told:
            lines.append(f"  hint: {self.hint}")
        return lines


class Report:
    """Collects the properties of one answer."""

    def __init__(self, exercise: str, first_only: bool = False, timeout: float = 30):
        self.exercise, self.first_only, self.timeout = exercise, first_only, timeout
        self.properties: list[Property] = []
        self.written = True
        self._runs: dict[tuple, _Run] = {}

    @property
    def hint(self) -> str:
        """The hint of the first property that failed."""
        return next((p.hint for p in self.properties if p.hint), "")

    @contextlib.contextmanager
    def property(self, name: str, hint: Hint = "") -> Iterator[None]:
        """A property named as a learner reads it, and the hint, or hints by kind, if it fails."""
        try:
            yield
        except _Stop:
            raise
        except KeyboardInterrupt:  # the person at the keyboard
            raise
        except NotExamined:
            self._not_examined(name)
        except BaseException as error:  # sys.exit and the like too
            if unwritten(error):
                self.written = False
                raise _Stop from error
            if self._follows(error):
                self._not_examined(name)
                return
            self.properties.append(Property(name, False, say(error), hint_for(error, hint)))
            if self.first_only or getattr(error, "hung", False):
                raise _Stop from error
        else:
            self.properties.append(Property(name, True))

    def _not_examined(self, name: str) -> None:
        why = "not examined, a line above failed"
        self.properties.append(Property(name, False, why, status="not examined"))

    def _follows(self, error: BaseException) -> bool:
        """The check itself lacks a variable or an entry that a failed property would have set."""
        frame = [f for f, _ in traceback.walk_tb(error.__traceback__)][-1]
        ours = frame.f_globals.get("__name__", "").startswith("shardbook.checks.")
        failed = any(not p.ok for p in self.properties)
        return failed and ours and isinstance(error, (UnboundLocalError, KeyError))

    def ranks(self, fn: Callable, world_size: int, *args, **kwargs) -> list:
        """``fn(*args, **kwargs)`` on real ranks; the values by rank. A failing rank is a Wrong.

        The same call again gives the same values, without running; where it failed, that was told,
        and NotExamined says so.
        """
        key = (fn, world_size, _frozen(args), _frozen(kwargs))
        if key not in self._runs:
            self._runs[key] = kept = _Run((args, kwargs))
            try:
                options = {"world_size": world_size, "timeout": self.timeout}
                kept.values = self._run(fn, *args, **options, **kwargs)
            except BaseException:
                kept.failed = True
                raise
        if self._runs[key].failed:
            raise NotExamined
        return self._runs[key].values

    def function(self, answer: Callable, oracle: Callable, **named) -> Function:
        """The families of properties of a function in one process; see `families`."""
        return Function(self, answer, oracle, **named)

    def on_groups(
        self,
        fn: Callable,
        answer: Any,
        *args,
        cases: Iterable | None = None,
        rounds: Rounds = ROUNDS,
        timeout: float | None = None,
    ) -> OnGroups:
        """``fn(answer, here, *args)`` on the world and on groups of it, what each rank saw.

        With `cases`, ``fn(answer, here, case, *args)`` for each of them. It runs when it is first
        read, and once: the same call again gives the same runs.
        """
        cases = [()] if cases is None else [(case,) for case in cases]
        key = (fn, _frozen((answer, args, cases, rounds)))
        if key not in self._runs:
            world = sum(len(part) for part in rounds[0])

            def start(*given) -> None:
                self._run(*given, world_size=world, timeout=timeout or self.timeout)

            kept = OnGroups(self, start, fn, answer, cases, args, rounds)
            self._runs[key] = _Run((answer, args, cases), kept)
        return self._runs[key].values

    def _run(self, fn: Callable, *args, **kwargs) -> list:
        try:
            return run(noting, fn, *args, **kwargs).values
        except NotWritten:
            raise
        except RankError as error:
            wrong = [e for e in getattr(error, "causes", {}).values() if isinstance(e, Wrong)]
            if wrong:
                raise wrong[0] from error
            raise


@dataclasses.dataclass
class _Run:
    """What came of a run. It holds the arguments, so that their ids stay theirs."""

    args: tuple
    values: Any = None
    failed: bool = False


def _frozen(value: Any) -> Any:
    """A key of arguments: equal plain data is equal, everything else is only itself."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((_frozen(k), _frozen(v)) for k, v in value.items())
    plain = isinstance(value, (bool, int, float, str))
    if plain or value is None or (dataclasses.is_dataclass(value) and type(value).__hash__):
        return type(value), value
    return type(value), id(value)


def check(exercise: str) -> Callable:
    """Decorator: makes ``(answer, report)`` the check of the exercise of that name.

    The result is called with the answer alone and prints its verdict; its `.examine(answer)`
    returns the Verdict without printing and `.exercise` is the name.
    """

    def decorate(fn: Callable[[Any, Report], None]) -> Callable[[Any], None]:
        def examine(answer: Any, first_only: bool = False, timeout: float = 30) -> Verdict:
            report = Report(exercise, first_only, timeout)
            start = time.monotonic()
            with contextlib.suppress(_Stop):
                _examine(fn, answer, report)
            seconds = time.monotonic() - start
            if not report.written:
                return Verdict(exercise, "not written", [], "", seconds)
            if not report.properties:
                raise RuntimeError(f"the check of {exercise} tested nothing: it has no property")
            right = all(p.ok for p in report.properties)
            status = "right" if right else "wrong"
            return Verdict(exercise, status, report.properties, report.hint, seconds)

        @functools.wraps(fn)
        def show(answer: Any) -> None:
            verdict = examine(answer)
            print(lab.readable(verdict.lines()))
            chapter = chapter_of(fn.__module__)
            if chapter:
                progress.record_in_notebook(chapter, exercise, verdict.status, answer)

        show.examine, show.exercise = examine, exercise
        show.__signature__ = inspect.Signature(
            [inspect.Parameter("answer", inspect.Parameter.POSITIONAL_ONLY)]
        )
        return show

    return decorate


def _examine(fn: Callable, answer: Any, report: Report) -> None:
    """What raises outside a property, while the check prepares one, fails a property of its own."""
    before = len(report.properties)
    try:
        fn(answer, report)
    except _Stop:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        with report.property(RUNS, "call it yourself on a small input in a cell"):
            raise
        assert len(report.properties) > before


def checks_of(module: ModuleType) -> dict[str, Callable]:
    """``{exercise name: check}`` of a chapter's module, or of the modules of its folder."""
    found = [c for c in vars(module).values() if callable(c) and hasattr(c, "exercise")]
    return {c.exercise: c for c in found}


def gather(package: dict[str, Any]) -> None:
    """Put the checks of all modules of a folder into the namespace of its ``__init__``."""
    for found in pkgutil.iter_modules(package["__path__"]):
        module = importlib.import_module(f"{package['__name__']}.{found.name}")
        package.update({c.__name__: c for c in checks_of(module).values()})
