"""What a check is made of: named properties, each with a hint for the one who does not hold it.

A check is a function ``(answer, report)`` with one ``with report.property(...)`` block a property.
The block fails by raising; what it raises becomes the ✗ line. Nothing printed for an answer that
holds depends on the machine: a worst error is told only when it is too large.
"""

import contextlib
import dataclasses
import functools
import inspect
import numbers
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..chapters import chapter_of
from ..notebook import lab, progress
from ..ranks import run
from ..ranks.result import NotWritten, RankError


class Wrong(AssertionError):
    """A property does not hold; the message says what was expected and what came."""


class _Stop(Exception):
    """Ends a check early: not written, hung, or the caller asked for the first failure only."""


@dataclasses.dataclass
class Property:
    """One line of a check's verdict."""

    name: str
    ok: bool
    detail: str = ""


RUNS = "runs"  # the property that fails when the answer raises outside all others


@dataclasses.dataclass
class Verdict:
    """What a check found. status is "right", "wrong" or "not written"."""

    exercise: str
    status: str
    properties: list[Property]
    hint: str
    seconds: float

    def lines(self) -> list[str]:
        """The verdict as people read it, the same on every machine when all holds."""
        if self.status == "not written":
            return [f"✎ {self.exercise} is not written yet"]
        lines = []
        for p in self.properties:
            lines.append(f"{'✓' if p.ok else '✗'} {p.name}" + (f": {p.detail}" if p.detail else ""))
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return lines


class Report:
    """Collects the properties of one answer."""

    def __init__(self, exercise: str, first_only: bool = False, timeout: float = 30):
        self.exercise, self.first_only, self.timeout = exercise, first_only, timeout
        self.properties: list[Property] = []
        self.hint = ""
        self.written = True

    @contextlib.contextmanager
    def property(self, name: str, hint: str = "") -> Iterator[None]:
        """A property named as a learner reads it, and the hint shown if it is the first to fail."""
        try:
            yield
        except _Stop:
            raise
        except KeyboardInterrupt:  # the person at the keyboard
            raise
        except BaseException as error:  # sys.exit and the like too
            if _unwritten(error):
                self.written = False
                raise _Stop from error
            said = "not examined, a line above failed" if self._follows(error) else _say(error)
            self.properties.append(Property(name, False, said))
            self.hint = self.hint or hint
            if self.first_only or _hung(error):
                raise _Stop from error
        else:
            self.properties.append(Property(name, True))

    def _follows(self, error: BaseException) -> bool:
        """The check itself lacks a variable or an entry that a failed property would have set."""
        frame = [f for f, _ in traceback.walk_tb(error.__traceback__)][-1]
        ours = frame.f_globals.get("__name__", "").startswith("shardbook.checks.")
        failed = any(not p.ok for p in self.properties)
        return failed and ours and isinstance(error, (UnboundLocalError, KeyError))

    def ranks(self, fn: Callable, world_size: int, *args, **kwargs) -> list:
        """``fn(*args, **kwargs)`` on real ranks; the values by rank. A failing rank is a Wrong."""
        try:
            return run(fn, *args, world_size=world_size, timeout=self.timeout, **kwargs).values
        except NotWritten:
            raise
        except RankError as error:
            wrong = [e for e in getattr(error, "causes", {}).values() if isinstance(e, Wrong)]
            if wrong:
                raise wrong[0] from error
            first = _text(error).partition("\n")[0]
            at = re.search(r"\((\w+\.py):\d+\)$", first)
            ours = at and (Path(__file__).parent / at[1]).exists()  # a line of a check
            if ours and "'NoneType' object" in first:
                raise Wrong(NOTHING) from error
            raise


NOTHING = "something came back as None: is a return missing?"


def _hung(error: BaseException) -> bool:
    return getattr(error, "hung", False)


# What torch raises as NotImplementedError though the answer is written.
_TORCHS_OWN = ("Could not run 'aten::", "Could not run 'c10d::", "Module [", "The operator '")


def _unwritten(error: BaseException) -> bool:
    """The answer says it is not written, here or on a rank; not an op that a backend lacks."""
    if lab.unwritten(error):
        return True
    causes = getattr(error, "causes", None) if isinstance(error, NotWritten) else None
    errors = list(causes.values()) if causes else [error]
    return all(
        isinstance(e, NotImplementedError) and not _text(e).startswith(_TORCHS_OWN) for e in errors
    )


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:
        return ""


def _say(error: BaseException) -> str:
    text = _text(error)
    if "'NoneType' object" in text and _in_a_check(error):
        text = NOTHING
    elif not isinstance(error, (Wrong, RankError)):
        text = f"raised {type(error).__name__}: {text.splitlines()[0] if text else '(no message)'}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 2000 else f"{text[:2000]} … ({len(text):,} characters)"


def _in_a_check(error: BaseException) -> bool:
    """Whether it was raised by a line of a check and not of what it examines."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("shardbook.checks.")


def check(exercise: str) -> Callable:
    """Decorator: makes ``(answer, report)`` the check of the exercise of that name.

    The result is called with the answer alone and prints its verdict; its `.examine(answer)`
    returns the Verdict without printing and `.exercise` is the name.
    """

    def decorate(fn: Callable[[Any, Report], None]) -> Callable[[Any], None]:
        def examine(answer: Any, first_only: bool = False, timeout: float = 30) -> Verdict:
            report = Report(exercise, first_only, timeout)
            start = time.monotonic()
            try:
                fn(answer, report)
            except _Stop:
                pass
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if _unwritten(error):
                    report.written = False
                else:  # raised outside a property, while the check prepared one
                    report.properties.append(Property(RUNS, False, _say(error)))
                    report.hint = report.hint or "call it yourself on a small input in a cell"
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
            print("\n".join(verdict.lines()))
            chapter = chapter_of(fn.__module__)
            if chapter:
                progress.record_in_notebook(chapter, exercise, verdict.status, answer)

        show.examine, show.exercise = examine, exercise
        show.__signature__ = inspect.Signature(
            [inspect.Parameter("answer", inspect.Parameter.POSITIONAL_ONLY)]
        )
        return show

    return decorate


def checks_of(module: ModuleType) -> dict[str, Callable]:
    """``{exercise name: check}`` of a chapter's module."""
    found = [c for c in vars(module).values() if callable(c) and hasattr(c, "exercise")]
    return {c.exercise: c for c in found}


# What the properties are said with. Each raises Wrong with one sentence.


def expect(condition: bool, message: str) -> None:
    """The condition holds, or Wrong(message)."""
    if not condition:
        raise Wrong(message)


def same(actual: Any, expected: Any, what: str) -> None:
    """Equal, for what is no floating-point tensor."""
    if isinstance(expected, Tensor):
        close(actual, expected, what, tolerance=0.0)
        return
    number = (numbers.Number, np.generic)
    kind = number if isinstance(expected, numbers.Number) else type(expected)
    expect(isinstance(actual, kind), f"{what} is {_short(actual)}, expected {_short(expected)}")
    expect(bool(actual == expected), f"{what} is {_short(actual)}, expected {_short(expected)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


def close(actual: Any, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """A tensor of expected's shape and dtype whose worst error is within tolerance.

    The tolerance is absolute for values up to 1 and relative beyond, since sums in another order
    differ by a few units in the last place of the largest term.
    """
    expect(isinstance(actual, Tensor), f"{what} is {type(actual).__name__}, expected a tensor")
    shape, wanted = tuple(actual.shape), tuple(expected.shape)
    expect(shape == wanted, f"{what} has shape {list(shape)}, expected {list(wanted)}")
    expect(actual.dtype == expected.dtype, f"{what} is {actual.dtype}, expected {expected.dtype}")
    if not expected.numel():
        return
    a, e = actual.detach().cpu(), expected.detach().cpu()
    if not e.is_floating_point():
        expect(torch.equal(a, e), f"{what} differs in {int((a != e).sum())} of {e.numel()} places")
        return
    a, e = a.double(), e.double()
    alike = (a == e) | (a.isnan() & e.isnan())  # infinities of one sign are alike
    error = torch.where(alike, 0.0, (a - e).abs() / e.abs().clamp(min=1.0))
    worst = error.nan_to_num(nan=float("inf")).max().item()
    where = [
        int(i) for i in torch.unravel_index(error.nan_to_num(nan=float("inf")).argmax(), e.shape)
    ]
    expect(
        worst <= tolerance,
        f"{what} is off by {worst:.2g} at {where} (tolerance {tolerance:g})",
    )


def refuses(fn: Callable, *args, what: str, error: type[Exception] = ValueError, **kwargs) -> None:
    """``fn(*args)`` raises `error` with a message that says something."""
    try:
        fn(*args, **kwargs)
    except NotImplementedError:
        raise
    except error as e:
        says = f"the message {str(e)!r}, too short to help" if str(e) else "no message"
        expect(len(str(e)) > 8, f"the {error.__name__} for {what} has {says}")
    except Exception as e:
        raise Wrong(f"{what} raised {type(e).__name__} ({e}), expected {error.__name__}") from e
    else:
        raise Wrong(f"{what} was accepted, expected {error.__name__}")


@contextlib.contextmanager
def unchanged(what: str, *tensors: Tensor) -> Iterator[None]:
    """The block leaves the tensors as they were."""
    before = [t.detach().clone() for t in tensors]
    yield
    for i, (old, new) in enumerate(zip(before, tensors, strict=True)):
        equal = torch.equal(old.nan_to_num(), new.detach().nan_to_num())
        expect(equal, f"{what} changed its input {i + 1 if len(tensors) > 1 else ''}".rstrip())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random normal data drawn on the CPU, the same on every device and rank; never constant."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def total(calls: Sequence, op: str) -> tuple[int, int]:
    """(calls, bytes) of one operation in a list of `shardbook.calls.Call`."""
    mine = [c for c in calls if c.op == op]
    return len(mine), sum(c.nbytes for c in mine)
