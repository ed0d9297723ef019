"""What properties are said with. Each raises Wrong with one sentence that tells what differs."""

import contextlib
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices import device
from .wrong import Wrong


def expect(condition: bool, message: str, kind: str = "value") -> None:
    """The condition holds, or Wrong(message) of that kind."""
    if not condition:
        raise Wrong(message, kind)


def same(actual: Any, expected: Any, what: str, kind: str = "value") -> None:
    """Equal, for what is no floating-point tensor."""
    if isinstance(expected, Tensor):
        close(actual, expected, what, tolerance=0.0)
        return
    wanted = (numbers.Number, np.generic)
    wanted = wanted if isinstance(expected, numbers.Number) else type(expected)
    said = f"{what} {_is(what)} {_short(actual)}, expected {_short(expected)}"
    if not isinstance(actual, wanted):
        alike = isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple))
        hint = ""
        if alike and list(actual) == list(expected):
            got, asked = type(actual).__name__, type(expected).__name__
            hint = f"the entries are right: return a {asked}, not a {got}"
        raise Wrong(said, "none" if actual is None else "type", hint)
    expect(bool(actual == expected), said, kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


def close(actual: Any, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """A tensor of expected's shape and dtype whose worst error is within tolerance.

    The tolerance is absolute for values up to 1 and relative beyond, since sums in another order
    differ by a few units in the last place of the largest term.
    """
    if actual is None:
        raise Wrong(f"{what} {_is(what)} None, expected a tensor: is a return missing?", "none")
    got = type(actual).__name__
    expect(isinstance(actual, Tensor), f"{what} {_is(what)} {got}, expected a tensor", "type")
    shape, wanted = list(actual.shape), list(expected.shape)
    expect(shape == wanted, f"{what} {_has(what)} shape {shape}, expected {wanted}", "shape")
    kinds = f"{actual.dtype}, expected {expected.dtype}"
    expect(actual.dtype == expected.dtype, f"{what} {_is(what)} {kinds}", "dtype")
    if not expected.numel():
        return
    a, e = actual.detach().cpu(), expected.detach().cpu()
    if not e.is_floating_point():
        differ = f"{what} {_is(what, 'differ', 'differs')} in {int((a != e).sum())} of {e.numel()}"
        expect(torch.equal(a, e), f"{differ} places")
        return
    a, e = a.double(), e.double()
    alike = (a == e) | (a.isnan() & e.isnan())  # infinities of one sign are alike
    error = torch.where(alike, 0.0, (a - e).abs() / e.abs().clamp(min=1.0))
    error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = error.max().item()
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), e.shape))
    if worst == torch.inf:
        values = f"{a[where].item():.4g} at {list(where)}, expected {e[where].item():.4g}"
        raise Wrong(f"{what} {_is(what)} {values}")
    off = f"{what} {_is(what)} off by {worst:.2g} at {list(where)}"
    expect(worst <= tolerance, f"{off} (tolerance {tolerance:g})")


def all_close(
    pairs: Mapping[str, tuple[Any, Tensor]], where: str = "", tolerance: float = 1e-5
) -> None:
    """``{name: (actual, expected)}`` are close; the message tells which of them are and which not.

    >>> all_close({"out": (out, whole), "dq": (dq, dq_whole)}, "on rank 1 of 2")
    """
    wrong: dict[str, Wrong] = {}
    for name, (actual, expected) in pairs.items():
        try:
            close(actual, expected, f"{name} {where}" if where else name, tolerance)
        except Wrong as found:
            wrong[name] = found
    if not wrong:
        return
    first, *others = wrong
    fine = [name for name in pairs if name not in wrong]
    said = str(wrong[first])
    if others:
        said += f"; {listed(others)} {'is' if len(others) == 1 else 'are'} wrong too"
    if fine:
        said += f"; {listed(fine)} {'holds' if len(fine) == 1 else 'hold'}"
    raise Wrong(said, wrong[first].kind, wrong[first].hint)


def agree(got: Any, want: Any, what: str, tolerance: float = 1e-5) -> None:
    """Tensors close, lists and tuples of them entry by entry, everything else equal."""
    if isinstance(want, Tensor):
        close(got, want, what, tolerance)
    elif isinstance(want, (list, tuple)) and any(isinstance(w, Tensor) for w in want):
        agree_in_number(got, want, what)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            agree(g, w, f"tensor {i} of {what}", tolerance)
    else:
        same(got, want, what)


def agree_in_number(got: Any, want: Sequence, what: str) -> None:
    """A list or tuple of as many as are wanted."""
    if not isinstance(got, (list, tuple)):
        kind = "none" if got is None else "type"
        raise Wrong(f"{what} is {type(got).__name__}, expected {len(want)} tensors", kind)
    same(len(got), len(want), f"the number of tensors in {what}", "type")


def listed(words: Iterable[object]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *front, last = [str(word) for word in words] or [""]
    return f"{', '.join(front)} and {last}" if front else last


_PREPOSITIONS = re.compile(
    r"\b(?:of|on|for|in|at|from|after|before|where|with|without|over|under|by|to|that)\b"
)
_SINGULAR = re.compile(r"(?:ss|us|is|has|bias)$")


def _is(what: str, plural: str = "are", singular: str = "is") -> str:
    """The verb that goes with what: "the tokens of rank 1" are, "the loss of the tokens" is."""
    parts = [part.strip() for part in _PREPOSITIONS.split(what)]
    named = [part for part in parts if re.search(r"\bthe\b", part)] or list(filter(None, parts))
    words = re.findall(r"[A-Za-z_]+", named[0]) if named else []
    many = " and " in f" {named[0]} " if named else False
    many = many or bool(words and words[-1].endswith("s") and not _SINGULAR.search(words[-1]))
    return plural if many else singular


def _has(what: str) -> str:
    return _is(what, "have", "has")


def refuses(fn: Callable, *args, what: str, error: type[Exception] = ValueError, **kwargs) -> None:
    """``fn(*args)`` raises `error` with a message that says something."""
    try:
        fn(*args, **kwargs)
    except NotImplementedError:
        raise
    except error as e:
        says = f"the message {str(e)!r}, too short to help" if str(e) else "no message"
        expect(len(str(e)) > 8, f"the {error.__name__} for {what} has {says}", "refusal")
    except Exception as e:
        said = f"{what} raised {type(e).__name__} ({e}), expected {error.__name__}"
        raise Wrong(said, "refusal") from e
    else:
        raise Wrong(f"{what} was accepted, expected {error.__name__}", "refusal")


@contextlib.contextmanager
def unchanged(what: str, *tensors: Tensor) -> Iterator[None]:
    """The block leaves the tensors as they were."""
    before = [t.detach().clone() for t in tensors]
    yield
    for i, (old, new) in enumerate(zip(before, tensors, strict=True)):
        equal = torch.equal(old.nan_to_num(), new.detach().nan_to_num())
        said = f"{what} changed its input {i + 1 if len(tensors) > 1 else ''}".rstrip()
        expect(equal, said, "kept")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random normal data drawn on the CPU, the same on every device and rank; never constant."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def total(calls: Sequence, op: str) -> tuple[int, int]:
    """(calls, bytes) of one operation in a list of `shardbook.calls.Call`."""
    mine = [c for c in calls if c.op == op]
    return len(mine), sum(c.nbytes for c in mine)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, through lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def widest() -> torch.dtype:
    """The widest floating-point dtype that this device computes in: an NPU has no float64."""
    return torch.float64 if device().type in ("cpu", "cuda") else torch.float32
