"""What went wrong with an answer: of which kind it is, where the learner's line is, in which words.

Whether a line is ours is decided by the module it runs in, never by the name of its file: a
learner's file may be called answers.py or report.py too.
"""

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping

import torch

from ..notebook import lab
from ..ranks.result import NotWritten, RankError
from ..words import place

NOTHING = "something came back as None: is a return missing?"
LONG = 2000  # characters of what is said about one error

Hint = str | Mapping[str, str]
"""One hint for every way to fail, or one a kind: see `hints`."""

_USUAL = {  # what helps with failures of these kinds, whatever the property is about
    "none": "a function without a return gives None: return the result",
    "signature": "it is called with the arguments of the exercise: keep their names and order",
}


class Wrong(AssertionError):
    """A property does not hold; the message says what was expected and what came.

    `kind` tells how it does not: type, shape, dtype, value, kept, traffic, memory, refusal, none.
    `hint` is the one that goes with this failure, where it is no matter of the property.
    `in_group` is set where the whole world holds it, and a group of some ranks does not.
    """

    in_group = False

    def __init__(self, message: str, kind: str = "value", hint: str = ""):
        super().__init__(message)
        self.kind, self.hint = kind, hint


class NotExamined(Exception):
    """A property needs what a run that failed did not leave; that was told in a line above."""


def hints(otherwise: str, **by_kind: str) -> dict[str, str]:
    """A hint for each kind of failure: those of Wrong, "hang", "raised" or "signature".

    `group` is for what holds on the whole world and not on groups of some ranks.
    """
    return {"otherwise": otherwise} | by_kind


def hint_for(error: BaseException, hint: Hint) -> str:
    """The hint that goes with how the property failed."""
    kind = kind_of(error)
    if getattr(error, "in_group", False) and not isinstance(hint, str) and "group" in hint:
        return hint["group"]
    given = {"otherwise": hint} if isinstance(hint, str) else hint
    usual = getattr(error, "hint", "") or _USUAL.get(kind, "")
    return given.get(kind) or usual or given["otherwise"]


def kind_of(error: BaseException) -> str:
    """How an answer failed, in one word."""
    if isinstance(error, Wrong):
        return error.kind
    if getattr(error, "hung", False):
        return "hang"
    kinds = [kind_of(e) for e in getattr(error, "causes", {}).values()]
    if kinds:
        return kinds[0] if len(set(kinds)) == 1 else "raised"
    if nothing_came(error):
        return "none"
    return "signature" if _called_wrongly(error) else "raised"


def _called_wrongly(error: BaseException) -> bool:
    """The answer does not take the arguments that a check calls it with."""
    if not isinstance(error, TypeError) or not re.search(r"\(\) .*arguments?\b", text_of(error)):
        return False
    return getattr(error, "in_a_check", False) or in_a_check(error)


def nothing_came(error: BaseException) -> bool:
    """A check, not the answer, could not go on with a None that the answer returned."""
    return "'NoneType' object" in text_of(error) and in_a_check(error)


# Where an error comes from


def in_a_check(error: BaseException) -> bool:
    """Whether it was raised by a line of a check, or by torch for it, and not by the answer."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not _library(frame)]
    return bool(frames) and _ours(frames[-1])


def line_of(error: BaseException) -> str:
    """ "answers.py:12", the innermost line of the answer itself; "" where there is none."""
    lines = [line for line in traceback.walk_tb(error.__traceback__) if not _library(line[0])]
    if not lines or _ours(lines[-1][0]):
        return ""
    frame, number = lines[-1]
    return place(frame.f_code.co_filename, number)


def _ours(frame) -> bool:
    return frame.f_globals.get("__name__", "").startswith("shardbook.checks.")


_LIBRARIES = (os.path.dirname(torch.__file__), "<frozen", sysconfig.get_path("stdlib"))


def _library(frame) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file


# On a rank: the traceback stays there, so what it tells is noted on the error


def noting(fn: Callable, *args, **kwargs):
    """``fn(*args)`` on a rank. Notes on an error which lines of its traceback are a check's."""
    try:
        return fn(*args, **kwargs)
    except BaseException as error:
        inside = in_a_check(error)
        if nothing_came(error):
            raise Wrong(NOTHING, "none") from None
        with contextlib.suppress(Exception):
            error.in_a_check = inside
            error.of_checks = _told(error)
        raise


def _told(error: BaseException) -> list[str]:
    """The lines about frames of ours, as a RankError tells them; the first is the innermost."""
    told = []
    for f, (frame, number) in zip(
        traceback.extract_tb(error.__traceback__),
        traceback.walk_tb(error.__traceback__),
        strict=True,
    ):
        if _ours(frame):
            source = f": {f.line}" if f.line else ""
            told.append(f"    {place(f.filename, number)} in {f.name}{source}")
    return told[::-1]


def _without_ours(error: RankError) -> str:
    """The message without lines of checks: only what the answer did helps its author."""
    lines = text_of(error).split("\n")
    for cause in error.causes.values():
        told = getattr(cause, "of_checks", [])
        lines = [line for line in lines if line not in told]
        if told and getattr(cause, "in_a_check", False):
            at = f" ({told[0].split(' in ')[0].strip()})"
            lines = [line.removesuffix(at) for line in lines]
    return "\n".join(lines)


# In words


def unwritten(error: BaseException) -> bool:
    """The answer says it is not written, here or on a rank; not an op that a backend lacks."""
    if lab.unwritten(error):
        return True
    causes = getattr(error, "causes", None) if isinstance(error, NotWritten) else None
    errors = list(causes.values()) if causes else [error]
    return all(
        isinstance(e, NotImplementedError) and not text_of(e).startswith(_TORCHS_OWN)
        for e in errors
    )


# What torch raises as NotImplementedError though the answer is written.
_TORCHS_OWN = ("Could not run 'aten::", "Could not run 'c10d::", "Module [", "The operator '")


def text_of(error: BaseException) -> str:
    """Its text, "" where even that raises."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def say(error: BaseException) -> str:
    """What a ✗ line tells of it."""
    text = text_of(error)
    if isinstance(error, RankError):
        text = _without_ours(error)
    elif nothing_came(error):
        text = NOTHING
    elif not isinstance(error, Wrong):
        text = f"raised {type(error).__name__}: {text.splitlines()[0] if text else '(no message)'}"
        text = text if len(text) <= LONG else _cut(text)
        text += f" ({at})" if (at := line_of(error)) else ""
    return _cut(text.encode("utf-8", "backslashreplace").decode())


def _cut(text: str) -> str:
    return text if len(text) <= LONG + 200 else f"{text[:LONG]} … ({len(text):,} characters)"
