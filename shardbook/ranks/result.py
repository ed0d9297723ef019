"""What a run leaves, or says: Result, RankError and NotWritten."""

import dataclasses
from typing import Any


class RankError(RuntimeError):
    """A run failed. `.causes` maps rank -> the exception of that rank, where there is one.

    `.hung` is True if the ranks waited for each other or the time ran out; `.output` is what each
    rank had printed.
    """

    def __init__(self, message: str, causes: dict | None = None, hung: bool = False):
        super().__init__(message)
        self.causes: dict[int, BaseException] = causes or {}
        self.hung = hung
        self.output: list[str] = []

    def _render_traceback_(self) -> list[str]:
        # IPython: the message says it all; the notebook's own frames would hide it.
        return [f"{type(self).__name__}: {self}"]


class NotWritten(RankError, NotImplementedError):
    """Every rank that failed met an exercise that is not written yet."""


@dataclasses.dataclass(repr=False)
class Result:
    """What a run left: `values` and `output` by rank, and the `trace` of all ranks if asked for."""

    values: list
    output: list[str]
    trace: Any = None

    def __repr__(self) -> str:
        return f"<Result of {len(self.values)} ranks: .values, .output, .trace>"
