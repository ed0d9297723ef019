"""How messages name ranks and lines, and whose line it is.

A line is the learner's, that of another package, or one of the machinery under both.
"""

import contextlib
import functools
import importlib.util
import os
import re
import sysconfig
import types
from collections.abc import Collection, Iterator

MACHINERY = ("shardbook", "torch", "torch_npu", "typing_extensions", "cloudpickle")
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input|^<cell")


@functools.cache
def _machinery() -> tuple[str, ...]:
    found = ["<frozen "]
    for name in MACHINERY:
        spec = None
        with contextlib.suppress(ValueError):  # a module put together by hand has no spec
            spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            package = spec.submodule_search_locations
            found += [os.path.join(p, "") for p in package] if package else [spec.origin]
    return tuple(found)


@functools.cache
def _library() -> str:
    return os.path.join(sysconfig.get_path("stdlib"), "")


@functools.cache
def foreign(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(re.split(r"[/\\]", file))


@functools.cache
def hidden(file: str) -> bool:
    """Whether no message names lines of this file: shardbook's, torch's, the standard library's."""
    if file.startswith(_machinery()):
        return True
    return file.startswith(_library()) and not foreign(file)


def ranks_text(ranks: Collection[int]) -> str:
    """``[0, 1, 2, 5]`` as "ranks 0-2, 5"; ``[3]`` as "rank 3"."""
    spans: list[list[int]] = []
    for r in sorted(ranks):
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def place(file: str, line: int | str) -> str:
    """ "cell line 14" for what a notebook defines, else "file.py:14"."""
    if _CELL.search(file):
        return f"cell line {line}"
    return f"{os.path.basename(file)}:{line}"


def at(where: str) -> str:
    """ " (cell line 14)" from a call's "file:line"; "" if that is not known."""
    file, _, line = where.rpartition(":")
    return f" ({place(file, line)})" if file else ""


def learners(frames: list[tuple]) -> tuple | None:
    """Of (file, line, …) from the outermost in: the innermost of the learner's own files.

    Of an installed package if there is none; None if all is machinery.
    """
    shown = [f for f in frames if not hidden(f[0])]
    own = [f for f in shown if not foreign(f[0])]
    return (own or shown or [None])[-1]


def callers_line(frame: types.FrameType | None) -> str:
    """ "file:line" of the learner's line that led to this frame; "" if there is none."""
    package = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not hidden(file):
            if not foreign(file):
                return f"{file}:{frame.f_lineno}"
            package = package or f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return package


def learners_line(trace: types.TracebackType | None) -> str:
    """The learner's innermost line of a traceback, as `place` names it; "" if there is none."""
    found = learners(list(_lines(trace)))
    return place(*found) if found else ""


def _lines(trace: types.TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
