"""Chapter 21, averaging gradients. Rank functions gather facts, the checks judge them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import calls
from ...devices import device
from ...memory import held_bytes
from ..compare import close, expect, random, widest
from ..groups import last_ranks
from ..report import check
from ..wrong import Wrong

SIZES = (1, 2, 3, 4)  # group sizes


def on_cpu(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copies, None where there is none."""
    return {k: None if t is None else t.detach().cpu().clone() for k, t in tensors.items()}


def near(
    actual: Any, expected: Tensor, what: str, factors: dict[float, str], tolerance: float = 1e-5
) -> None:
    """`close`, and where all values are off by one factor that is known, the hint that says why."""
    try:
        close(actual, expected, what, tolerance)
    except Wrong as wrong:
        if wrong.kind != "value" or not expected.is_floating_point():
            raise
        for factor, hint in factors.items():
            times, off = factor * expected.double(), factor != 1 and bool(expected.any())
            if off and torch.allclose(actual.double(), times, rtol=tolerance, atol=tolerance):
                said = f"{wrong}; every value is {factor:.4g} times the expected one"
                raise Wrong(said, hint=hint) from None
        raise


def scales(world: int) -> dict[float, str]:
    """What the mean over `world` of four ranks is multiplied by when it is taken wrongly."""
    return {
        world: "this is the sum over the ranks: divide by the number of ranks",
        1 / world: "the mean was divided again: divide by the number of ranks, once",
        world / 4: "this is divided by all 4 ranks: take the size of that group",
    }


def gradient_calls(log: list[calls.Call], params: int) -> list[calls.Call]:
    """The calls that carry gradients: no broadcast of buffers, no flags of who has a gradient."""

    def flags(c: calls.Call) -> bool:
        return not c.dtype.is_floating_point and c.nbytes <= 8 * params * len(c.group)

    return [c for c in log if c.op != "broadcast" and not flags(c)]


# average_gradients_


class _Loose(nn.Module):
    """Parameters of many kinds, whose gradients the check sets itself."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(random(5, 7, seed=1))
        self.strided = nn.Parameter(random(9, 6, seed=2).t())
        self.brain = nn.Parameter(random(11, seed=3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(random(1, seed=4)[0])
        self.some = nn.Parameter(random(3, 2, seed=5))  # no gradient on odd ranks, where asked
        self.none = nn.Parameter(random(4, 8, seed=6))  # no gradient on any rank, where asked


def _loose_gradient(p: Tensor, name: str, rank: int) -> Tensor:
    seed = 100 * (rank + 1) + len(name)
    return (random(p.numel(), seed=seed).view(p.shape).to(p.dtype) + rank).to(p.device)


def _averaged(answer, missing: bool, group=None, rank=None):
    model = _Loose().to(device())
    rank = dist.get_rank() if rank is None else rank
    options = {} if group is None else {"group": group}
    if missing:  # a step before had every gradient: who lacks one is asked at each
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        answer(model, **options)
        model.zero_grad()
    for name, p in model.named_parameters():
        absent = missing and (name == "none" or (name == "some" and rank % 2))
        if not absent:
            p.grad = torch.empty_like(p).copy_(_loose_gradient(p, name, rank))
    before = on_cpu(dict(model.named_parameters()))
    with calls.record() as log:
        answer(model, **options)
    grads = on_cpu({name: p.grad for name, p in model.named_parameters()})
    return grads, before, on_cpu(dict(model.named_parameters())), log


def _averaged_32_megabytes(answer) -> tuple[list[tuple[float, float]], int]:
    """Least and largest mean of each gradient; bytes that a second step leaves behind."""
    sizes = 3_000_000, 5_000_000
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, device=device())) for n in sizes)
    held = []
    for _ in range(2):
        for i, p in enumerate(model):
            p.grad = torch.full_like(p, 2.0 * dist.get_rank() + i)
        answer(model)
        means = [(float(p.grad.min()), float(p.grad.max())) for p in model]
        model.zero_grad()
        held.append(held_bytes())
    return means, held[1] - held[0]


def _averaged_of_many_kinds(answer) -> dict[str, Tensor | None]:
    """Gradients of an empty parameter, a frozen one and a float64 one, which an NPU has not."""
    precise = widest()
    model = nn.ParameterDict(
        {
            "frozen": nn.Parameter(torch.zeros(4), requires_grad=False),
            "empty": nn.Parameter(torch.zeros(0, 5)),
            "precise": nn.Parameter(torch.zeros(3, dtype=precise)),
        }
    ).to(device())
    model["empty"].grad = torch.zeros_like(model["empty"])
    odd = 2.0**-40 * (1 + 2 * dist.get_rank())
    model["precise"].grad = torch.ones_like(model["precise"]) + odd
    answer(model)
    grads = on_cpu({name: p.grad for name, p in model.items()})
    return grads | {"thawed": model["frozen"].requires_grad}


def _averaged_in_groups(answer):
    return [(size, *_averaged(answer, True, group, rank)[:1]) for size, group, rank in last_ranks()]


def _mean_of(name: str, world: int, missing: bool) -> Tensor | None:
    p = dict(_Loose().named_parameters())[name]
    if missing and name == "none":
        return None
    having = [r for r in range(world) if not (missing and name == "some" and r % 2)]
    return sum(_loose_gradient(p, name, r).double() for r in having) / world


def _judge_means(grads: dict, world: int, missing: bool, names: tuple[str, ...]) -> None:
    for name in names:
        expected = _mean_of(name, world, missing)
        if expected is None:
            expect(
                grads[name] is None,
                f"the gradient of a parameter that no rank used is a tensor on {world} ranks, "
                "expected None",
            )
            continue
        actual = grads[name]
        expect(actual is not None, f"the gradient of {name!r} is None, expected the mean")
        # bf16 has 8 bits of mantissa: a sum of four and a division round by up to 1 %
        dtype, tolerance = (torch.bfloat16, 3e-2) if name == "brain" else (torch.float32, 1e-5)
        what = f"the gradient of {name!r} on {world} rank{'s' * (world > 1)}"
        near(actual, expected.to(dtype), what, scales(world), tolerance)


@check("average_gradients_")
def average_gradients_(answer, report):
    """Means, missing gradients, number of collectives, groups."""
    every = ("matrix", "strided", "brain", "scalar", "some", "none")
    values = None
    with report.property(
        "every gradient is the mean over 4 ranks",
        hint="sum the gradients over the ranks, then divide by the number of ranks, once; "
        "write the result into p.grad, whatever its strides and dtype, and keep nothing else; of "
        "more than 25 MB every piece is reduced",
    ):
        values = report.ranks(_averaged, 4, answer, False)
        for grads, before, after, _ in values:
            _judge_means(grads, 4, False, every)
            for name in every:
                close(after[name], before[name], f"the parameter {name!r}", 0.0)
        for means, grown in report.ranks(_averaged_32_megabytes, 2, answer):
            expect(
                means == [(1.0, 1.0), (2.0, 2.0)],
                "a gradient of 12 or 20 MB is not the mean over 2 ranks everywhere",
            )
            expect(grown <= 0, f"each step leaves {grown} bytes behind when gradients are dropped")
    with report.property(
        "at most one collective per dtype and one small one, as all fits in 25 MB",
        hint="flatten the gradients of a dtype into one tensor and reduce that, in pieces of at "
        "most 25 MB",
    ):
        if values is None:
            values = report.ranks(_averaged, 4, answer, False)
        nbytes = sum(p.nbytes for p in _Loose().parameters())
        for *_, log in values:
            expect(len(log) > 0, "the ranks never communicated")
            sent = gradient_calls(log, len(every))
            expect(
                len(sent) <= 3,
                f"a rank made {len(sent)} collective calls for gradients of two dtypes, "
                "expected at most 2 and one small one",
            )
            moved = sum(c.nbytes for c in sent)
            expect(
                moved <= nbytes + 4 * 8 * len(every),
                f"a rank handed {moved} bytes to collectives for {nbytes} bytes of gradients",
            )
            rest = sum(c.nbytes for c in log) - moved  # flags, also pickled ones
            expect(rest <= 512, f"a rank handed {rest} bytes more to collectives")
    with report.property(
        "a parameter without gradient counts as zero, and stays None if no rank has one",
        hint="ranks must agree on the parameters they reduce: one small all-reduce of flags says "
        "which have a gradient anywhere; a rank without one sends zeros and gets the mean",
    ):
        for grads, *_ in report.ranks(_averaged, 4, answer, True):
            _judge_means(grads, 4, True, every)
    with report.property(
        "float64, empty and frozen parameters keep their dtype, shape and None",
        hint="reduce every dtype as it is: float32 has half of float64's digits; a frozen "
        "parameter has no gradient on any rank",
    ):
        for grads in report.ranks(_averaged_of_many_kinds, 2, answer):
            got = grads["precise"]
            expect(got is not None, "the gradient of a parameter is None, expected the mean")
            wanted = torch.ones(3, dtype=got.dtype) + 2.0**-39
            close(got, wanted, "the gradient in float64", 0.0)
            close(grads["empty"], torch.zeros(0, 5), "the gradient of an empty parameter")
            expect(grads["frozen"] is None, "a frozen parameter has got a gradient")
            expect(not grads["thawed"], "a frozen parameter is trained afterwards")
    with report.property(
        "groups of 1 to 4 ranks average among themselves",
        hint="pass group= to every collective and divide by the size of that group",
    ):
        for results in report.ranks(_averaged_in_groups, 4, answer):
            for size, grads in results:
                _judge_means(grads, size, True, every)
