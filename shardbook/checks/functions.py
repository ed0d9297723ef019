"""Families of properties of a function in one process: what `report.function` gives.

See `families` for how a check is written with it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..devices import device
from .compare import agree, agree_in_number, all_close, expect, random, refuses, tensors_in
from .wrong import Hint

Args = tuple[Any, ...]


class Call(tuple):
    """The arguments of a call, and in `told` what is special about them; made by `called`."""

    told = ""


def called(told: str, *args: Any) -> Call:
    """Arguments that a message names: ``called("where rows differ", a, b)``."""
    call = Call(args)
    call.told = f" {told}"
    return call


class Function:
    """Properties of a function that an oracle computes too. Calls are tuples of arguments.

    `names` are those of several results, `what` is that of one.
    """

    def __init__(
        self,
        report: Any,  # the Report that asks
        answer: Callable,
        oracle: Callable,
        what: str = "the result",
        names: tuple[str, ...] = (),
    ):
        self.report, self.answer, self.oracle = report, answer, oracle
        self.what, self.names = what, names

    def only(self, i: int) -> "Function":
        """The same of the result of this number alone, for a property and a hint of its own."""

        def picked(fn: Callable) -> Callable:
            return functools.wraps(fn)(lambda *args: fn(*args)[i])

        return Function(self.report, picked(self.answer), picked(self.oracle), self.names[i])

    def value(
        self,
        name: str,
        *calls: Args,
        hint: Hint,
        tolerance: float = 1e-5,
        oracle: Callable | None = None,
    ) -> None:
        """The oracle's value, of tensors of these strides and dtypes, which stay as they were."""
        with self.report.property(name, hint):
            for args in calls:
                self._judge(args, tolerance, oracle or self.oracle)

    def _judge(self, args: Args, tolerance: float, oracle: Callable) -> None:
        mine, told = placed(args), self._told(args)
        got, want = self.answer(*mine), oracle(*args)
        if self.names:
            agree_in_number(got, want, self.what + told)
            pairs = zip(got, want, strict=True)
            all_close(dict(zip(self.names, pairs, strict=True)), told.strip(), tolerance)
        else:
            agree(got, want, self.what + told, tolerance)
        for old, new in zip(tensors_in(args), tensors_in(mine), strict=True):
            kept = torch.equal(old.nan_to_num(), new.detach().cpu().nan_to_num())
            expect(kept, f"an input was changed{told}", "kept")

    def _told(self, args: Args) -> str:
        return _told(args, self.oracle)

    def view(self, name: str, *calls: Args, hint: Hint) -> None:
        """The result lies in the memory of the first argument."""
        with self.report.property(name, hint):
            for args in calls:
                mine = placed(args)
                shares = _memory(self.answer(*mine)) == _memory(mine[0])
                expect(shares, f"{self.what} lies in new memory{self._told(args)}", "memory")

    def copy(self, name: str, *calls: Args, hint: Hint) -> None:
        """The result lies in memory of its own, not in that of an argument."""
        with self.report.property(name, hint):
            for args in calls:
                mine = placed(args)
                own = _memory(self.answer(*mine)) not in {_memory(t) for t in tensors_in(mine)}
                expect(
                    own,
                    f"{self.what} lies in the memory of an input{self._told(args)}",
                    "memory",
                )

    def dtypes(self, name: str, args: Args, hint: Hint, kinds: Sequence = (), **more) -> None:
        """The oracle's value and dtype in bf16, int64 and bool, or in the dtypes given."""
        kinds = kinds or (torch.bfloat16, torch.int64, torch.bool)
        self.value(name, *(_mapped(args, _typed(kind)) for kind in kinds), hint=hint, **more)

    def gradient(self, name: str, *calls: Args, hint: Hint, tolerance: float = 1e-5) -> None:
        """The oracle's gradient of every floating-point argument."""
        with self.report.property(name, hint):
            for args in calls:
                wanted = _gradients(self.oracle, args, None)
                got = _gradients(self.answer, placed(args), self.what)
                names = [f"the gradient of {n}" for n in _names(self.oracle, args)]
                pairs = zip(got, wanted, strict=True)
                all_close(
                    dict(zip(names, pairs, strict=True)),
                    self._told(args).strip(),
                    tolerance,
                )

    def no_grad(self, name: str, *calls: Args, hint: Hint, tolerance: float = 1e-5) -> None:
        """The same value where no gradient is wanted."""
        with self.report.property(name, hint), torch.no_grad():
            for args in calls:
                self._judge(args, tolerance, self.oracle)

    def again(self, name: str, *calls: Args, hint: Hint, tolerance: float = 1e-5) -> None:
        """One call after another, each as if it were the first."""
        self.value(name, *calls, *reversed(calls), hint=hint, tolerance=tolerance)

    def refuses(self, name: str, *calls: tuple[Args, str], hint: Hint) -> None:
        """A ValueError that says something, for each (arguments, what they are)."""
        with self.report.property(name, hint):
            for args, what in calls:
                refuses(self.answer, *placed(args), what=what)


def placed(value: Any) -> Any:
    """The same on this rank's device, with its strides; tensors are copies."""

    def place(t: Tensor) -> Tensor:
        once = t.detach()
        for dim, stride in enumerate(t.stride()):
            if stride == 0 and t.shape[dim]:  # expanded: one element stands for many
                once = once.narrow(dim, 0, 1)
        moved = torch.empty_strided(once.shape, once.stride(), dtype=t.dtype, device=device())
        return moved.copy_(once).expand(t.shape)

    return _mapped(value, place)


def strided(*shape: int, seed: int = 0) -> list[Tensor]:
    """Random tensors of a shape that are not contiguous: transposed, every other, expanded."""
    *front, last = shape
    return [
        random(last, *front, seed=seed).movedim(0, -1),
        random(*front, 2 * last, seed=seed)[..., ::2],
        random(*front, 1, seed=seed).expand(shape),
    ]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_mapped(v, change) for v in value)
    return value


def _typed(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Random numbers as values of a dtype that differ from each other."""
    if dtype.is_floating_point:
        return lambda t: t.to(dtype)
    return lambda t: t > 0 if dtype == torch.bool else (t * 100).to(dtype)


def _memory(value: Any) -> int:
    expect(isinstance(value, Tensor), f"the result is {type(value).__name__}", "type")
    return value.untyped_storage().data_ptr()


def _told(args: Args, oracle: Callable) -> str:
    """What is special about these arguments: strides, dtype, numbers; "" for plain tensors."""
    if isinstance(args, Call):
        return args.told
    words = []
    for name, arg in zip(inspect.signature(oracle).parameters, args, strict=False):
        if isinstance(arg, Tensor):
            odd = not arg.is_contiguous()
            words += [f"strides {tuple(arg.stride())}"] if odd else []
            words += [str(arg.dtype)] if arg.dtype != torch.float32 else []
        elif isinstance(arg, (int, float, str)):
            words.append(f"{name}={arg!r}")
    return f" for {', '.join(words)}" if words else ""


def _names(oracle: Callable, args: Args) -> list[str]:
    """The names of the floating-point tensors among the arguments."""
    names = []
    for name, arg in zip(inspect.signature(oracle).parameters, args, strict=False):
        found = [t for t in tensors_in(arg) if t.is_floating_point()]
        many = not isinstance(arg, Tensor)
        names += [f"{name}[{i}]" if many else name for i in range(len(found))]
    return names


def _gradients(fn: Callable, args: Args, what: str | None) -> list[Tensor]:
    leaves = [t for t in tensors_in(args) if t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        made = list(tensors_in(fn(*args)))
        if what:
            expect(bool(made) and made[0].requires_grad, f"{what} carries no gradient")
        pulls = [random(*t.shape, seed=90 + i).to(t) for i, t in enumerate(made)]
        found = torch.autograd.grad(made, leaves, pulls, allow_unused=True)
    finally:
        for leaf in leaves:
            leaf.requires_grad_(False)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
