"""Chapter 22, the six pairs: what one does forward, its partner does to the gradient."""

import dataclasses

import torch
from torch import Tensor

from ...devices import device
from ..compare import close, expect, random, widest
from ..groups import cut, refusal
from ..report import check
from ..seen import Here, Seen

PAIRS = {  # exercise -> (has a dim, collective forward, backward)
    "copy_to_group": (False, "", "all_reduce"),
    "reduce_from_group": (False, "all_reduce", ""),
    "gather_from_group": (True, "all_gather", ""),
    "scatter_to_group": (True, "", "all_gather"),
    "reduce_scatter_to_group": (True, "reduce_scatter", "all_gather"),
    "all_gather_to_group": (True, "all_gather", "reduce_scatter"),
}
WIDEST = "float64"  # or the widest dtype that the ranks' device has


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor of every rank, along which dimension it is cut, and whether a gradient is wanted."""

    shape: tuple[int, ...] = (12, 5)
    dim: int = 0
    memory: str = "contiguous"
    kind: str = "float32"
    seed: int = 10
    train: bool = True

    def __str__(self) -> str:
        return f"{self.memory} {self.kind} x {list(self.shape)} along dim {self.dim}"

    def laid(self, x: Tensor) -> Tensor:
        """x, transposed in memory where this case is."""
        return x.mT.contiguous().mT if self.memory == "transposed" else x

    def input(self, place: int, wide: torch.dtype) -> Tensor:
        """What a rank has; float64 and int64 hold what fp32 would round."""
        if self.kind == "int64":
            return torch.arange(60).view(12, 5) + 2**40 + place
        x = random(*self.shape, seed=self.seed + place)
        return self.laid({WIDEST: x.to(wide) / 3, "bf16": x.bfloat16()}.get(self.kind, x))

    def pull(self, y: Tensor, place: int) -> Tensor:
        """The gradient of a rank's result."""
        return self.laid(random(*y.shape, seed=self.seed + 40 + place))


PLAIN = [
    Case((12, 5, 7), 0),
    Case((5, 12, 7), 1),
    Case((5, 7, 12), -1, "transposed"),
]
KINDS = [Case(kind=kind, train=False) for kind in ("bf16", WIDEST, "int64")]
TWICE = [Case((12, 5, 7), seed=70)]  # of a shape that came before, and then once more
UNEVEN = "a dimension that does not divide"


# On a rank


def _pair(answer, here: Here, case: Case | str, with_dim: bool) -> Seen | None:
    if case == UNEVEN:
        return _refused(answer, here)
    more = {"wide": widest()}  # where the ranks run, which may not be where the check does
    grads: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        y = answer(x, *([case.dim] if with_dim else []), **here.options)
        more["memory"] = y.untyped_storage().nbytes() / y.nbytes
        return y

    def pull(y: Tensor) -> Tensor:
        grads.append(case.pull(y, here.place).to(y.device))
        return grads[0]

    def again() -> None:
        x = case.input(here.place + 7, torch.float32).to(device()).requires_grad_()
        y = call(x)
        torch.autograd.grad(y, x, case.pull(y, here.place + 7).to(y.device))

    x = case.input(here.place, more["wide"]).to(device())
    with torch.set_grad_enabled(case.train):
        twice = again if case in TWICE else None
        seen = here.see(call, pull if case.train else None, then=twice, x=x)
    for grad in grads:
        more["grad kept"] = torch.equal(grad.cpu(), case.pull(seen.value, here.place))
    seen.more = more
    return seen


def _refused(answer, here: Here) -> Seen | None:
    if here.size < 3:
        return None
    what, x = f"a dimension of 10 on {here.size} ranks", random(5, 10, seed=here.place)
    return Seen(refused=refusal(answer, x.to(device()), 1, what=what, **here.options))


# In the check


def _one_way(op: str, tensors: list[Tensor], place: int, dim: int) -> Tensor:
    """What a rank has after a collective: "own" is its slice of its own tensor."""
    size = len(tensors)
    if op == "all_reduce":
        return torch.stack(tensors).sum(0)
    if op == "all_gather":
        return torch.cat(tensors, dim)
    if op == "reduce_scatter":
        return cut(torch.stack(tensors).sum(0), dim, size, place)
    return cut(tensors[place], dim, size, place) if op == "own" else tensors[place]


def _check_pair(answer, report, name: str, forward_hint: str, backward_hint: str) -> None:
    with_dim, forward, backward = PAIRS[name]
    own = "own" if with_dim else ""  # a slice of its own where nothing travels

    def value(s: Seen) -> None:
        wide, exact = s.more["wide"], {"int64": 0.0, "bf16": 0.05}
        exact[WIDEST] = 1e-14 if wide == torch.float64 else 1e-5
        xs = [s.case.input(i, wide) for i in range(s.size)]
        given = [x.float() for x in xs] if s.case.kind == "bf16" else xs
        want = _one_way(forward or own, given, s.place, s.case.dim).to(xs[0].dtype)
        kind = s.case.memory if s.case.train else s.case.kind
        plain = "" if s.case.train else " under no_grad"
        what = f"the {kind} result{plain} on {s.where}, dim {s.case.dim},"
        close(s.value, want, what, exact.get(s.case.kind, 1e-5))

    def gradient(s: Seen) -> None:
        pulls = [s.case.pull(s.value, i) for i in range(s.size)]
        what = f"the {s.case.memory} gradient on {s.where}, dim {s.case.dim},"
        close(s.grads["x"], _one_way(backward or own, pulls, s.place, s.case.dim), what)

    def kept(s: Seen) -> None:
        expect(s.kept, f"the input was changed on {s.where}", "kept")
        expect(s.more["grad kept"], f"the incoming gradient was changed on {s.where}", "kept")

    def second(s: Seen) -> None:
        value(s)
        gradient(s)
        said = f"a second call on {s.where} changed the result or the gradient of the first"
        expect(not s.changed, said, "kept")

    def whole(s: Seen) -> int:
        x = s.case.input(s.place, s.more["wide"])
        return x.nbytes * (s.size if forward == "all_gather" else 1)

    uneven = [UNEVEN] if name in ("scatter_to_group", "reduce_scatter_to_group") else []
    seen = report.on_groups(_pair, answer, with_dim, cases=[*PLAIN, *KINDS, *TWICE, *uneven])
    plain = seen.of(*PLAIN)
    plain.holds("the right value on 1 to 4 ranks", value, forward_hint)
    plain.holds("the right gradient on 1 to 4 ranks", gradient, backward_hint)
    said = f"{forward or 'nothing'} forward, {backward or 'nothing'} backward, once, of the tensor"
    hint = "count the collectives: each way has one, or none."
    plain.one_collective(said, forward, backward, whole, hint)
    hint = "all_reduce works in place: give it a copy, forward and backward."
    plain.holds("leaves its input and the incoming gradient as they were", kept, hint)
    hint = "no gradient asked for is no reason to skip the collective; a cast is not asked for."
    kinds = seen.of(*KINDS)
    kinds.holds("keeps bf16, float64 and int64, and works under no_grad", value, hint)
    hint = "a buffer kept for the next call is overwritten by it: give every call memory of its own"
    name_of = "a second call of the same shape leaves the first result alone"
    seen.of(*TWICE).holds(name_of, second, f"{hint}.")
    if name == "reduce_scatter_to_group":
        kinds.at_most(
            "the result is no view of something larger",
            "keeps {} times its bytes alive",
            lambda s: round(s.more["memory"]),
            lambda s: 1 if s.size > 1 else 99,
            hint="a slice of the summed whole keeps all of it alive: clone it, or receive only it.",
        )
    if uneven:
        hint = "torch.chunk gives uneven pieces silently; compare the size with the ranks first."
        seen.of(UNEVEN).refused("ValueError where the dimension does not divide", hint)


@check("copy_to_group")
def copy_to_group(answer, report):
    """f: identity forward, all-reduce backward."""
    _check_pair(
        answer,
        report,
        "copy_to_group",
        "every rank already has the whole x: forward has nothing to do.",
        "x is used by every rank, so its gradient is the sum over the ranks of "
        "this group (and autograd does not look inside dist.all_reduce).",
    )


@check("reduce_from_group")
def reduce_from_group(answer, report):
    """g: all-reduce forward, identity backward."""
    _check_pair(
        answer,
        report,
        "reduce_from_group",
        "forward is the sum over the ranks of this group, not the mean.",
        "y = x_0 + x_1 + …: dy/dx_r is 1, so the gradient passes as it is; "
        "reducing it once more scales it by the number of ranks.",
    )


@check("gather_from_group")
def gather_from_group(answer, report):
    """All-gather forward, own slice backward."""
    _check_pair(
        answer,
        report,
        "gather_from_group",
        "the pieces lie along dim, in the order of the ranks in the group.",
        "what follows is the same on every rank, so each keeps its own slice of "
        "the gradient: dist.get_rank(group) counts the slices; a sum would scale it.",
    )


@check("scatter_to_group")
def scatter_to_group(answer, report):
    """Own slice forward, all-gather backward."""
    _check_pair(
        answer,
        report,
        "scatter_to_group",
        "rank i of the group keeps slice i along dim.",
        "the full x's gradient is every rank's slice, side by side along dim.",
    )


@check("reduce_scatter_to_group")
def reduce_scatter_to_group(answer, report):
    """Reduce-scatter forward, all-gather backward."""
    _check_pair(
        answer,
        report,
        "reduce_scatter_to_group",
        "first the sum over the ranks, then slice i along dim for rank i.",
        "every slice of the sum came from every rank: all-gather the gradients.",
    )


@check("all_gather_to_group")
def all_gather_to_group(answer, report):
    """All-gather forward, reduce-scatter backward."""
    _check_pair(
        answer,
        report,
        "all_gather_to_group",
        "the pieces lie along dim, in the order of the ranks in the group.",
        "each rank does other work with the gathered tensor, so the gradients are "
        "summed over the ranks before a rank takes its slice: reduce-scatter, not a slice.",
    )
