"""Chapter 23, tied embeddings: one weight on the first and the last stage."""

import torch
import torch.distributed as dist
from torch import nn

from ... import calls
from ...devices import device
from ..compare import close, expect, random
from ..report import check
from ..wrong import hints


def _tied(answer, case: str):
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(1, size))) if case == "group" else None
    first_rank, last_rank = (1, size - 1) if case == "group" else (0, size - 1)
    weight = None
    if rank in (first_rank, last_rank):
        dtype = torch.bfloat16 if case == "bf16" else torch.float32
        weight = nn.Parameter(random(11, 6, seed=1).to(device(), dtype))
        grad = random(11, 6, seed=3 if rank == first_rank else 4).to(device(), dtype)
        if not (case == "none" and rank == first_rank):
            # As a matmul with a transposed weight leaves it: strided, on one of the two.
            weight.grad = grad.t().contiguous().t() if rank == last_rank else grad
    with calls.record() as log:
        if case != "group" or rank >= 1:
            first = weight if rank == first_rank else None
            answer(first, weight if rank == last_rank else None, group)
    out = None if weight is None or weight.grad is None else weight.grad.detach().cpu()
    kept = weight is None or torch.equal(weight.detach().cpu(), random(11, 6, seed=1).to(dtype))
    return out, kept, log


def _alone(answer):
    one, first, last = (nn.Parameter(random(11, 6, seed=1).to(device())) for _ in range(3))
    for weight, seed in ((one, 3), (first, 3), (last, 4)):
        weight.grad = random(11, 6, seed=seed).to(device())
    tied = nn.Parameter(random(11, 6, seed=1).to(device()))
    again = nn.Parameter(tied.detach())  # the same memory, but a gradient of its own
    tied.grad, again.grad = (random(11, 6, seed=s).to(device()) for s in (3, 4))
    for pair in ((one, one), (first, last), (tied, again)):
        answer(*pair, None)
    found = [p.grad.cpu().clone() for p in (one, first, last, tied, again)]
    first.grad.zero_()
    return found, torch.equal(last.grad.cpu(), found[2])


@check("sync_tied_embeddings_")
def sync_tied_embeddings_(answer, report):
    """One weight on two stages."""
    values = None
    both = random(11, 6, seed=3) + random(11, 6, seed=4)
    with report.property(
        "both copies hold the sum of both gradients, and the weights stay",
        hint=hints(
            "the tied weight is used twice, so its gradient is the SUM of both uses",
            raised="a gradient may be strided, what is sent and received into must be contiguous",
            hang="the two ranks that hold a copy each send and each receive; the others hold "
            "neither and have nothing to wait for",
        ),
    ):
        values = report.ranks(_tied, 4, answer, "default")
        for rank, (grad, kept, _) in enumerate(values):
            if rank in (0, 3):
                expect(grad is not None, f"rank {rank} has no gradient")
                close(grad, both, f"the gradient on rank {rank}")
            expect(kept, f"rank {rank} changed the weight itself")
    with report.property(
        "in a group that does not start at rank 0",
        hint="ranks of a group are not global ranks; ask the group",
    ):
        for rank, (grad, *_) in enumerate(report.ranks(_tied, 4, answer, "group")):
            if rank in (1, 3):
                close(grad, both, f"the gradient on global rank {rank}")
    with report.property(
        "a copy without gradient counts as zero",
        hint="a stage that got no gradient must not keep the other one waiting",
    ):
        values_none = report.ranks(_tied, 4, answer, "none")
        for rank in (0, 3):
            grad = values_none[rank][0]
            expect(grad is not None, f"rank {rank} has no gradient")
            close(grad, random(11, 6, seed=4), f"the gradient on rank {rank}")
    with report.property(
        "on one rank, one Parameter is left alone, and two get the sum",
        hint="with one stage both arguments may be the same object, whose gradient autograd has "
        "summed already; two objects hold a gradient each",
    ):
        (one, *two, tied, again), apart = report.ranks(_alone, 1, answer)[0]
        close(one, random(11, 6, seed=3), "the gradient of the one Parameter")
        for grad in two:
            close(grad, both, "the gradient of one of two Parameters on one rank")
        for grad in (tied, again):
            close(grad, both, "the gradient of one of two Parameters in the same memory")
    with report.property(
        "two Parameters on one rank have a gradient each, in memory of its own",
        hint="one tensor as both gradients is scaled twice by what scales each: clone the sum",
    ):
        expect(apart, "to change the gradient of one of two Parameters changes the other's", "kept")
    with report.property(
        "only the two ranks that hold a copy move gradients",
        hint="an all-reduce over the whole pipeline makes the stages between carry others' data",
    ):
        nbytes = both.numel() * 4
        for rank, (_, _, log) in enumerate(values):
            big = sum(c.nbytes for c in log if c.nbytes >= nbytes and c.op != "recv")
            limit = nbytes if rank in (0, 3) else 0
            expect(big <= limit, f"rank {rank} sent {big} bytes of gradients, expected {limit}")
    with report.property(
        "and in bf16",
        hint="receive into a buffer of the gradient's own dtype",
    ):
        for rank, (grad, *_) in enumerate(report.ranks(_tied, 4, answer, "bf16")):
            if rank in (0, 3):  # bf16 has 8 bits of mantissa
                close(grad, both.bfloat16(), f"the gradient on rank {rank}", 3e-2)
