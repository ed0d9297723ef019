"""Wrong answers that every check must reject, and right ones, written differently, it must accept.

One module a chapter (``c22_tensor_parallel.py``), whose functions and classes are marked:

    @wrong("split_heads", says="head")      # the verdict's detail or hint matches this regexp
    def heads_last(x, num_heads): ...

    @right("split_heads")
    def with_einops(x, num_heads): ...
"""

from collections.abc import Callable

ANSWERS: list[tuple[int, str, str, Callable, str | None]] = []
"""(chapter, exercise, name of the answer, answer, regexp or None for a right one)"""


def wrong(exercise: str, says: str) -> Callable:
    def mark(answer):
        ANSWERS.append((_chapter(answer), exercise, answer.__name__, answer, says))
        return answer

    return mark


def right(exercise: str) -> Callable:
    def mark(answer):
        ANSWERS.append((_chapter(answer), exercise, answer.__name__, answer, None))
        return answer

    return mark


def _chapter(answer) -> int:
    return int(answer.__module__.rsplit(".", 1)[-1][1:3])
