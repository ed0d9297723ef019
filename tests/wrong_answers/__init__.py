"""Wrong answers that every check must reject, and right ones, written differently, it must accept.

One module a chapter (``c22_tensor_parallel.py``), whose functions and classes are marked:

    @wrong("split_heads", says="head")      # the verdict's detail or hint matches this regexp
    def heads_last(x, num_heads): ...

    @right("split_heads")
    def with_einops(x, num_heads): ...

    right("split_heads")(tensors.split_heads)  # the reference; chapter=11 outside such a module
"""

import re
import sys
from collections.abc import Callable

ANSWERS: list[tuple[int, str, str, Callable, str | None]] = []
"""(chapter, exercise, name of the answer, answer, regexp or None for a right one)"""


def wrong(exercise: str, says: str, chapter: int | None = None) -> Callable:
    chapter = chapter or _chapter(sys._getframe(1))
    re.compile(says)
    return lambda answer: _mark(chapter, exercise, answer, says)


def right(exercise: str, chapter: int | None = None) -> Callable:
    chapter = chapter or _chapter(sys._getframe(1))
    return lambda answer: _mark(chapter, exercise, answer, None)


def _mark(chapter: int, exercise: str, answer: Callable, says: str | None) -> Callable:
    name = getattr(answer, "__name__", type(answer).__name__)
    ANSWERS.append((chapter, exercise, name, answer, says))
    return answer


def _chapter(frame) -> int:
    module = frame.f_globals["__name__"].rsplit(".", 1)[-1]
    found = re.match(r"c(\d\d)_", module)
    if not found:
        raise ValueError(f"{module} is no c11_….py: pass chapter=")
    return int(found[1])
