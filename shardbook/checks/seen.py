"""What ranks saw: a case is run once on the world and on groups of it, and its traces are named.

    def _case(answer, here, causal):                      # on a rank, for every group in turn
        q = here.part(QUERIES, dim=2)
        return here.see(lambda q: answer(q, causal, group=here.group), grad=PULL, q=q)

    seen = report.on_groups(_case, answer, True)          # in the check: runs when first read
    seen.each(lambda s: close(s.value, expected(s.place, s.size), f"out on {s.where}"))

Several cases make one run, ``report.on_groups(_case, answer, cases=[True, False])``, of which
``seen.of(True)`` is a part: starting four ranks takes longer than most cases.

The world comes first: what is wrong with the algorithm shows before what is wrong with groups. All
ranks are in some group at any time, so that a collective on the wrong group gives a wrong value and
no hang, and the ranks of a group are not 0, 1, 2, so that a rank of the world taken for one of the
group shows. Where a run fails, the groups before the failure have been seen and are judged; then
the failure is told, once; whatever else needs that run is "not examined".
"""

import contextlib
import copy
import dataclasses
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .. import calls
from ..devices import device
from ..ranks.result import NotWritten, RankError
from ..ranks.worker import dumps
from .compare import listed, tensors_in
from .wrong import NOTHING, NotExamined, Wrong, say

Rounds = Sequence[Sequence[Sequence[int]]]
ROUNDS: Rounds = ([[0, 1, 2, 3]], [[0, 2, 3], [1]], [[1, 3], [0, 2]])
"""Groups that exist at the same time, round by round: sizes 4, 3, 1 and 2 (twice)."""
WORLD: Rounds = ([[0, 1, 2, 3]],)


@dataclasses.dataclass
class Seen:
    """What one rank of one group did in one case. Tensors are on the cpu."""

    value: Any = None  # what the answer returned
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)  # by input
    forward: list[calls.Call] = dataclasses.field(default_factory=list)
    backward: list[calls.Call] = dataclasses.field(default_factory=list)
    kept: bool = True  # the inputs are as they were
    aliased: bool = False  # the result lies in the memory of an input
    changed: bool = False  # another call changed the result
    saved: int = 0  # elements of tensors with more than 2 dimensions, kept for backward
    flops: int = 0  # of the forward pass
    held: int = 0  # bytes or elements, as the case counts them
    refused: str = ""  # what is wrong with how it refused; "" if nothing is
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # a case's own findings
    case: Any = None
    ranks: tuple[int, ...] = ()  # of the group, in the world
    place: int = 0  # of this rank in the group
    world: int = 4

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.ranks[self.place]

    @property
    def where(self) -> str:
        """ "rank 1 of 4", or "rank 1 of 2 in the group of ranks 1 and 3"."""
        group = "" if self.size == self.world else f" in {_group(self.ranks)}"
        return f"rank {self.place} of {self.size}{group}"

    @property
    def sent(self) -> list[calls.Call]:
        """The messages of the forward pass."""
        return [call for call in self.forward if call.op == "send"]


def _group(ranks: Sequence[int]) -> str:
    return f"the group of rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


# On a rank


@dataclasses.dataclass
class Here:
    """This rank's place in the group that a case runs on."""

    group: dist.ProcessGroup | None  # None for the whole world
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @property
    def options(self) -> dict[str, dist.ProcessGroup]:
        """``group=`` for a call; for the world it is left out."""
        return {} if self.group is None else {"group": self.group}

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's equal part of x along dim, on its device."""
        share = x.shape[dim] // self.size
        return x.narrow(dim, self.place * share, share).to(device())

    def see(
        self,
        call: Callable,
        grad: Tensor | Callable[[Any], Tensor] | None = None,
        work: bool = False,
        module: nn.Module | None = None,
        then: Callable[[], Any] | None = None,
        **inputs: Any,
    ) -> Seen:
        """Call it on the inputs and, given the gradient of its result, go back to all of them.

        `grad` may be a function of the result; with `module` the way back goes to its parameters
        as well, by ``backward()``, as in training. `then` is another call, which must leave the
        result alone. `work` counts its FLOPs, which slows every operation down.
        """
        flat = [t for x in inputs.values() for t in tensors_in(x)]
        before = [t.detach().clone() for t in flat]
        seen = Seen()

        def pack(t: Tensor) -> Tensor:
            seen.saved += t.numel() if t.dim() > 2 else 0
            return t

        with contextlib.ExitStack() as watched:
            if grad is not None:
                for t in filter(Tensor.is_floating_point, flat):
                    t.requires_grad_()
                hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
                watched.enter_context(hooks)
            flops = watched.enter_context(FlopCounterMode(display=False)) if work else None
            seen.forward = watched.enter_context(calls.record())
            value = call(*inputs.values())
        seen.flops, grads = flops.get_total_flops() if flops else 0, []
        if grad is not None:
            if value is None:
                raise Wrong(NOTHING, "none")
            if not any(t.requires_grad for t in tensors_in(value)):
                raise Wrong("the result carries no gradient", "gradient")
            leaves = {n: t for n, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}
            pull = grad if isinstance(grad, Tensor) else grad(value)
            if module is not None:
                leaves |= {n: p for n, p in module.named_parameters() if p.requires_grad}
            with calls.record() as seen.backward:
                if module is None:
                    grads = torch.autograd.grad(value, [*leaves.values()], pull, allow_unused=True)
                else:
                    value.backward(pull)
                    grads = [t.grad for t in leaves.values()]
            seen.grads = dict(zip(leaves, _cpu(grads), strict=True))
        same = [id(t) for x in inputs.values() for t in tensors_in(x)] == [id(t) for t in flat]
        pairs = zip(flat, before, strict=True)
        seen.kept = same and all(torch.equal(a.detach(), b) for a, b in pairs)
        at = {t.untyped_storage().data_ptr() for t in flat if t.numel()}
        seen.aliased = any(t.untyped_storage().data_ptr() in at for t in tensors_in(value))
        seen.value = _cpu(value)
        if then is not None:
            then()
            now = _cpu([*tensors_in(value), *tensors_in(list(grads))])
            was = [*tensors_in(seen.value), *tensors_in(list(seen.grads.values()))]
            seen.changed = not all(map(torch.equal, now, was))
        return seen


def _cpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cpu(v) for v in value]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _on_rank(fn: Callable, answer: Any, cases: list, args: tuple, rounds: Rounds, folder: str):
    """Every case on every group; what was seen is in a file at once, should the next case fail."""
    world, me = dist.get_world_size(), dist.get_rank()
    places = []
    for parts in rounds:
        made = [dist.new_group(list(p)) if len(p) < world else None for p in parts]
        ranks, group = next((p, g) for p, g in zip(parts, made, strict=True) if me in p)
        places.append(Here(group, tuple(ranks), ranks.index(me)))
    with open(f"{folder}/{me}", "wb") as file:
        for k, case in enumerate(cases):
            for number, here in enumerate(places):
                seen = fn(answer, here, *case, *args)
                if seen is not None:  # the case is not for a group of this size
                    found = (case[0] if case else None, here.ranks, here.place, world)
                    seen.case, seen.ranks, seen.place, seen.world = found
                file.write(dumps((k, number, seen)))
                file.flush()


# In the check


class _Run:
    """One run on ranks of all cases, case by case on all groups, and how it ended."""

    def __init__(self, start: Callable[[str], None], cases: list[tuple], rounds: Rounds):
        self.start, self.cases, self.rounds = start, cases, rounds
        self.world = sum(len(part) for part in rounds[0])
        self.found: dict[tuple, dict[int, Seen | None]] | None = None  # (case, round) -> by rank
        self.error: BaseException | None = None
        self.failed = len(cases)  # the case in which it ended
        self.told = False

    def groups(self, k: int) -> Iterator[list[Seen]]:
        """What the members of each group saw in one case."""
        if self.found is None:
            self._make()
        for number, parts in enumerate(self.rounds):
            by_rank = self.found.get((k, number), {})
            for ranks in parts:
                members = [by_rank.get(rank) for rank in ranks]
                if None not in members:
                    yield members

    def tell(self) -> BaseException:
        """The error, once; afterwards NotExamined."""
        self.told, before = True, self.told
        return NotExamined() if before else self.error

    def _make(self) -> None:
        with tempfile.TemporaryDirectory(prefix="shardbook-seen-") as folder:
            try:
                self.start(folder)
            except NotWritten:
                raise
            except (RankError, Wrong) as error:
                self.error = error
            self.found = {}
            for rank in range(self.world):
                for k, number, seen in _read(f"{folder}/{rank}"):
                    self.found.setdefault((k, number), {})[rank] = seen
        if self.error is None:
            self._look_outside()
        else:
            self._name_place(self.error)

    def _name_place(self, error: BaseException) -> None:
        """Tell on which group, and in which case, the run failed, unless it is the plain world."""
        order = [(k, number) for k in range(len(self.cases)) for number in range(len(self.rounds))]
        short = (at for at in order if len(self.found.get(at, {})) < self.world)
        self.failed, number = next(short, order[-1])
        causes = getattr(error, "causes", {})
        parts = [p for p in self.rounds[number] if not causes or set(p) & set(causes)]
        said = [f"for {self.cases[self.failed][0]}"] if len(self.cases) > 1 else []
        error.in_group = len(parts[0]) < self.world
        if error.in_group:
            said.append(f"in {' and '.join(map(_group, parts))}")
        if said:
            error.args = (f"{' '.join(said)}: {error}", *error.args[1:])

    def _look_outside(self) -> None:
        """A collective that ran on others than its group is an error too."""
        for (k, _), by_rank in self.found.items():
            for seen in filter(None, by_rank.values()):
                for call in [*seen.forward, *seen.backward]:
                    if not set(call.group) <= set(seen.ranks):
                        said = f"{call.op} ran on ranks {list(call.group)}"
                        self.error = Wrong(f"{said}, the group was {list(seen.ranks)}", "traffic")
                        self.error.in_group, self.failed = True, k
                        return


class Runs:
    """Cases on all groups, run when first read."""

    def __init__(self, run: Callable, fn: Callable, answer: Any, cases: list, args, rounds: Rounds):
        def start(folder: str) -> None:
            run(_on_rank, fn, answer, cases, args, rounds, folder)

        self._run = _Run(start, cases, rounds)
        self._mine = range(len(cases))

    def of(self, *cases: Any) -> Self:
        """Only these cases, of the same run."""
        part = copy.copy(self)
        part._mine = [k for k in self._mine if self._run.cases[k][0] in cases]
        return part

    def __iter__(self) -> Iterator[Seen]:
        """What each rank saw, the world first; in the end the failure, or that it was told."""
        for members in self.groups():
            yield from members

    def groups(self) -> Iterator[list[Seen]]:
        """The same by case and group: a list of what its members saw, by place."""
        yield from self._complete()
        self._finish()

    def each(self, judge: Callable[[Seen], None]) -> None:
        """Judge what each rank saw; of what fails, the first is told, and which groups hold."""
        wrong: dict[int, Wrong] = {}
        sizes: dict[int, None] = {}
        for seen in (s for members in self._complete() for s in members):
            sizes[seen.size] = None
            try:
                judge(seen)
            except Wrong as error:
                wrong.setdefault(seen.size, error)
        if wrong:
            raise self._first(wrong, sizes)
        self._finish()

    def _first(self, wrong: dict[int, Wrong], sizes: Iterable[int]) -> Wrong:
        """What failed first, which groups hold it, and what ended the run, if that is untold."""
        first = wrong.get(self._run.world) or next(iter(wrong.values()))
        fine = sorted(set(sizes) - set(wrong), reverse=True)
        many = "" if fine == [1] else "s"
        said = f"{first}; it holds on {listed(fine)} rank{many}" if fine else str(first)
        told = Wrong(said, first.kind, first.hint)
        told.in_group = self._run.world in fine
        if self._run.failed in self._mine and not self._run.told:
            error = self._run.tell()
            told.hung = getattr(error, "hung", False)
            told.args = (f"{said}; then, {say(error)}",)
        return told

    def _complete(self) -> Iterator[list[Seen]]:
        for k in self._mine:
            yield from self._run.groups(k)

    def _finish(self) -> None:
        if self._run.error is not None and self._run.failed <= max(self._mine):
            raise self._run.tell()


def _read(path: str) -> Iterator[tuple[int, int, Seen | None]]:
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)
