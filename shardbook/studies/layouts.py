"""Chapter 11: what each layout operation returns, whether it copies, what undoes it, measured."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..tracing import Trace
from ..tracing.tables import Table


def operations(named: Mapping[str, Tensor], inverses: Mapping[str, str | None]) -> Table:
    """A row per operation, from running it: given, returned, copied or not, what undoes it.

    named: the tensors that expressions use; the first name in an expression is what it is given.
    inverses: the expression of an operation -> the expression that gives back what it was given,
    where y is what the operation returned; None where values are lost. An inverse that gives
    anything else is a ValueError.
    """
    rows = []
    for expression, inverse in inverses.items():
        x = next(named[word] for word in _words(expression) if word in named)
        given = list(x) if isinstance(x, (tuple, list)) else [x]
        y = eval(expression, {"torch": torch, **named})
        pieces = list(y) if isinstance(y, (tuple, list)) else [y]
        rows.append(
            {
                "operation": expression,
                "given": _sizes(given),
                "returns": _sizes(pieces),
                "strides": str(pieces[0].stride()),
                "copies": not all(shares_memory(piece, given[0]) for piece in pieces),
                "inverse": _undo(expression, inverse, y, given, named),
            }
        )
    columns = {name: lambda row, name=name: row[name] for name in rows[0]}
    columns["copies"] = lambda row: "COPY" if row["copies"] else "free"
    return Table(rows, columns)


def _undo(expression: str, inverse: str | None, y, given: list[Tensor], named) -> str:
    if inverse is None:
        kept = torch.cat([piece.flatten() for piece in (y if isinstance(y, tuple) else [y])])
        lost = given[0].numel() - len(set(kept.tolist()))
        if not lost:
            raise ValueError(f"{expression} loses no value: name what undoes it")
        return f"none: {lost} of {given[0].numel()} values are gone"
    back = eval(inverse, {"torch": torch, "y": y, **named})
    back = list(back) if isinstance(back, (tuple, list)) else [back]
    if len(back) != len(given) or not all(map(torch.equal, back, given)):
        raise ValueError(f"{inverse} does not undo {expression}")
    return inverse


def _words(expression: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in expression).split()


def _sizes(pieces: list[Tensor]) -> str:
    sizes = [str(list(piece.shape)) for piece in pieces]
    if len(set(sizes)) == 1:
        return f"{len(sizes)} of {sizes[0]}" if len(sizes) > 1 else sizes[0]
    return ", ".join(sizes)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def gigabytes_per_second(copy: Callable[[], Tensor], repeats: int = 5) -> float:
    """The best rate of a copy that returns what it wrote: bytes read and written per second."""
    best = float("inf")
    for _ in range(repeats + 1):  # one more: the first touches the memory
        start = time.perf_counter()
        result = copy()
        float(result.flatten()[0])  # a device is asynchronous: wait for the value
        best = min(best, time.perf_counter() - start)
    return 2 * result.nbytes / best / 1e9


def marked(trace: Trace) -> dict[str, float]:
    """Milliseconds in each mark of a trace, by the mark's name, in the order of their starts."""
    found: dict[str, float] = {}
    for event in trace.chrome()["traceEvents"]:
        if event.get("cat") == "mark":
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"] / 1e3
    return found
