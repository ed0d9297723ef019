"""Chapter 21, the norm of gradients in shards, and what a rank holds in each stage."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import calls
from ...devices import device
from ..compare import close, expect, random, refuses, same
from ..groups import last_ranks
from ..report import check
from .gradients import SIZES, on_cpu

# clip_grad_norm_sharded_


def _shards(rank: int, size: int, kind: str) -> list[nn.Parameter]:
    """This rank's parameters: uneven, one empty, one without gradient; "bare": none on rank 0."""
    shapes = [(5 + rank,), (0,) if rank % 2 else (3, 4), (7, 2), (2,)]
    params = [nn.Parameter(random(*s, seed=i).to(device())) for i, s in enumerate(shapes)]
    for i, p in enumerate(params[:3]):
        if kind != "bare" or rank:
            p.grad = (0.3 + rank) * random(*p.shape, seed=60 + 10 * rank + i).to(device())
    return params


def _clipped(answer, kind: str, max_norm: float, group=None, rank=None, size=4):
    rank = dist.get_rank() if rank is None else rank
    params = _shards(rank, size, kind)
    before = on_cpu({str(i): p for i, p in enumerate(params)})
    options = {} if group is None else {"group": group}
    with calls.record() as log:
        norm = answer(iter(params), max_norm, **options)
    grads = [None if p.grad is None else p.grad.cpu() for p in params]
    return float(norm), grads, before, on_cpu({str(i): p for i, p in enumerate(params)}), log


def _clipped_in_groups(answer):
    return [(n, _clipped(answer, "all", 0.7, g, r, n)) for n, g, r in last_ranks()]


HALVES = (  # what squares end or stand still at: (dtype, gradient, parameters of one element)
    (torch.float16, 300.0, 8),  # 300^2 is beyond 65504
    (torch.bfloat16, 1.0, 400),  # 256 + 1 is 256
)


def _clipped_halves(answer) -> list[tuple[float, Tensor]]:
    """Of each dtype the norm and the first gradient after clipping to 5."""
    found = []
    for dtype, value, count in HALVES:
        params = [nn.Parameter(torch.ones(1, dtype=dtype, device=device())) for _ in range(count)]
        for p in params:
            p.grad = torch.full_like(p, value)
        found.append((float(answer(params, 5.0)), params[0].grad.cpu()))
    return found


def _judge_clipping(results: list, kind: str, max_norm: float, size: int) -> None:
    full = [p for rank in range(size) for p in _shards(rank, size, kind)]
    expected = float(nn.utils.clip_grad_norm_(full, max_norm))
    for rank, (norm, grads, before, after, _) in enumerate(results):
        where = f"on rank {rank} of {size}"
        close(torch.tensor(norm), torch.tensor(expected), f"the norm {where}")
        for i, grad in enumerate(grads):
            wanted = full[4 * rank + i].grad
            if wanted is None:
                expect(grad is None, f"a parameter without gradient got one {where}")
            else:
                close(grad, wanted.cpu(), f"gradient {i} {where} with max_norm {max_norm}")
            close(after[str(i)], before[str(i)], f"parameter {i} {where}", 0.0)


@check("clip_grad_norm_sharded_")
def clip_grad_norm_sharded_(answer, report):
    """The norm, the scaling, bytes, ranks without gradients, groups."""
    values = None
    with report.property(
        "clips to the norm of the full gradient, the same on every rank",
        hint="add up the squares over this rank's gradients and over the ranks, then take the "
        "root; every shard is on one rank only, so nothing is averaged",
    ):
        values = report.ranks(_clipped, 4, answer, "all", 0.7)
        _judge_clipping(values, "all", 0.7, 4)
    with report.property(
        "leaves gradients below max_norm as they are",
        hint="the factor is max_norm / norm, but never more than 1",
    ):
        _judge_clipping(report.ranks(_clipped, 4, answer, "all", 1e4), "all", 1e4, 4)
    with report.property(
        "sends a few numbers, not the gradients",
        hint="one all-reduce of the sum of squares is enough",
    ):
        for *_, log in values or report.ranks(_clipped, 4, answer, "all", 0.7):
            moved = sum(c.nbytes for c in log)
            expect(len(log) > 0, "the ranks never communicated")
            expect(
                len(log) <= 2 and moved <= 64,
                f"{len(log)} collective calls with {moved} bytes, expected one of a few bytes",
            )
    with report.property(
        "a rank without gradients takes part",
        hint="it contributes 0, and calls the same collective as the others",
    ):
        _judge_clipping(report.ranks(_clipped, 4, answer, "bare", 0.7), "bare", 0.7, 4)
    with report.property(
        "adds the squares of 16-bit gradients in float32",
        hint="g.float().square().sum(): a square beyond 65504 is inf in fp16, and a sum in bf16 "
        "stands still at 256 times what is added",
    ):
        for found in report.ranks(_clipped_halves, 2, answer):
            for (dtype, value, count), (norm, grad) in zip(HALVES, found, strict=True):
                expected = value * (2 * count) ** 0.5
                what = f"of {2 * count} gradients of {value:g} in {dtype}"
                close(torch.tensor(norm), torch.tensor(expected), f"the norm {what}", 1e-2)
                wanted = torch.tensor([value * 5 / expected], dtype=dtype)
                close(grad, wanted, f"a clipped gradient {what}", 1e-2)
    with report.property(
        "groups of 1 to 4 ranks clip on their own",
        hint="pass group= to the all-reduce",
    ):
        found = report.ranks(_clipped_in_groups, 4, answer)
        for size in SIZES:
            _judge_clipping([r for rank in found for n, r in rank if n == size], "all", 0.7, size)


# training_memory


@check("training_memory")
def training_memory(answer, report):
    """The paper's figures, rounding, and what cannot be."""
    with report.property(
        "gives the 120, 31.4, 16.6 and 1.9 GB of the ZeRO paper (7.5 B parameters, 64 ranks)",
        hint="2 bytes a parameter, 2 a gradient, 12 for the optimizer; stage 1 divides the "
        "optimizer's, 2 the gradients as well, 3 the parameters as well",
    ):
        for stage, gigabytes in enumerate((120.0, 31.4, 16.6, 1.9)):
            found = answer(7_500_000_000, 64, stage)
            keys = ["grads", "optimizer", "params"]
            same(sorted(found), keys, f"the sorted keys at stage {stage}")
            sum_gb = round(sum(found.values()) / 1e9, 1)
            same(sum_gb, gigabytes, f"the sum in GB at stage {stage}")
    with report.property(
        "each part is cut at its stage, and shards are rounded up to whole elements",
        hint="a shard has ceil(num_params / world_size) elements; multiply by the bytes afterwards",
    ):
        for n, world in ((10, 4), (7, 3), (5, 1), (3, 8), (107_008, 6)):
            shard = (n + world - 1) // world
            for stage in range(4):
                found = answer(n, world, stage)
                wanted = {
                    "params": 2 * (n if stage < 3 else shard),
                    "grads": 2 * (n if stage < 2 else shard),
                    "optimizer": 12 * (n if stage < 1 else shard),
                }
                for key, value in wanted.items():
                    what = f"{key} of {n} parameters on {world} ranks at stage {stage}"
                    same(found[key], value, what)
                    expect(isinstance(found[key], int), f"{what} is no int")
    with report.property(
        "refuses a stage or a world that does not exist",
        hint="raise ValueError for stages other than 0 to 3 and for fewer than one rank",
    ):
        refuses(answer, 10, 4, 4, what="stage 4")
        refuses(answer, 10, 4, -1, what="stage -1")
        refuses(answer, 10, 0, 1, what="world size 0")
