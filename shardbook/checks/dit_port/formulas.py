"""Chapter 44, in one process: real-valued rotary positions over three axes, and preference."""

import math

import torch
from torch import Tensor

from ...devices import device
from ..compare import close, expect, random, same
from ..diffusion import narrow, turn
from ..functions import called
from ..report import check
from ..tensors import told


def _tables(positions: Tensor, head_dim: int, split: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    columns = []
    for axis, channels in enumerate(split):
        for pair in range(channels // 2):
            angle = positions[:, axis].double() * 10_000 ** (-2 * pair / channels)
            columns += [angle, angle]
    angles = torch.stack(columns, dim=1)
    return angles.cos().float(), angles.sin().float()


@check("rope_3d")
def rope_3d(answer, report):
    """Tables over frames, rows and columns."""
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(5))
    some = torch.tensor([[7, 4, 2], [3, 6, 3], [2, 9, 1], [5, 5, 8]])
    it = report.function(answer, _tables, names=("cos", "sin"))
    it.value(
        "each axis turns its own block of channels, pair (2i, 2i+1) by one angle",
        *(
            called(f"for a split of {split}", grid, 12, split)
            for split in ((4, 6, 2), (2, 2, 8), (0, 6, 6), (12, 0, 0))
        ),
        hint="the angle is position * 10000^(-2i / channels of the axis); both channels of a pair "
        "hold it; the blocks stand in the order frame, row, column",
    )
    it.value(
        "any positions, in any order: a rank's part of the tokens starts anywhere",
        called("of some positions", some, 8, (2, 4, 2)),
        called("of as many other positions, asked next,", some.flip(0), 8, (2, 4, 2)),
        called("of one token", torch.tensor([[3, 1, 2]]), 2, (0, 2, 0)),
        hint="read the positions, do not count from 0",
    )
    with report.property(
        "fp32 tables from integer or fp32 positions; no float64, no complex numbers",
        hint="make the frequencies in fp32 on the positions' device",
    ):
        for positions in (grid, grid.float()):
            cos, sin = narrow(lambda p=positions: answer(p.to(device()), 12, (4, 4, 4)), "rope_3d")
            same((cos.dtype, sin.dtype), (torch.float32,) * 2, "the dtypes of the tables")
        tables = told(answer)(grid.to("meta"), 12, (4, 4, 4))
        where = [t.device.type for t in tables]
        same(where, ["meta"] * 2, "the devices of the tables for positions on meta")
    it.refuses(
        "ValueError for an odd split, or one that does not sum to head_dim",
        ((grid, 12, (5, 5, 2)), "a split of (5, 5, 2)"),
        ((grid, 12, (4, 4, 2)), "a split of 10 channels for a head of 12"),
        hint="channels turn in pairs",
    )


@check("apply_rope")
def apply_rope(answer, report):
    """Turn queries and keys."""
    angle = random(7, 5, seed=1).repeat_interleave(2, dim=1)
    cos, sin = angle.cos(), angle.sin()
    x = random(2, 3, 7, 10, seed=2)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    it = report.function(answer, turn, what="the turned x")
    it.value(
        "pair (a, b) becomes (a cos - b sin, b cos + a sin)",
        (x, cos, sin),
        called("of one sample, head and token", x[:1, :1, :1, :2], cos[:1, :2], sin[:1, :2]),
        called("for a strided x", strided, cos, sin),
        hint="neighbours 2i and 2i+1 are a pair here; other code pairs i with i + D/2",
    )
    with report.property(
        "lengths are kept, and scores depend on the distance of positions only",
        hint="cos and sin of the same angle for both channels of a pair",
    ):
        got = answer(*(t.to(device()) for t in (x, cos, sin))).cpu()
        close(got.norm(dim=-1), x.norm(dim=-1), "the length of each vector")
    with report.property(
        "x gets its gradient", hint="queries and keys are learned: nothing may leave the graph"
    ):
        leaf, pull = x.to(device()).requires_grad_(), random(2, 3, 7, 10, seed=3)
        out = answer(leaf, cos.to(device()), sin.to(device()))
        expect(out.requires_grad, "the gradient is lost: the result has no graph", "gradient")
        (got,) = torch.autograd.grad(out, leaf, pull.to(device()))
        close(got, turn(pull, cos, -sin), "the gradient of x")
    with report.property(
        "the result has x's dtype; no float64, no complex numbers",
        hint="compute in fp32, convert back",
    ):
        for dtype in (torch.float32, torch.bfloat16):
            low = x.to(dtype).to(device())
            got = narrow(lambda v=low: answer(v, cos.to(device()), sin.to(device())), "apply_rope")
            same(got.dtype, dtype, "the dtype")
        want = turn(x.bfloat16().float(), cos, sin)
        close(got.float(), want, "the result in bf16", 2e-2)
        rounding = want.abs() / 256 + 1e-6  # half of bf16's last place, at most
        more = int(((got.cpu().float() - want).abs() > 1.01 * rounding).sum())
        expect(not more, f"{more} of {want.numel()} results in bf16 were rounded more than once")


def _preference(
    win: Tensor, lose: Tensor, ref_win: Tensor, ref_lose: Tensor, beta: float
) -> Tensor:
    better = -beta * ((win - ref_win) - (lose - ref_lose)).double()
    return torch.log1p(torch.exp(-better)).mean().float()  # -log sigmoid


@check("video_dpo_loss")
def video_dpo_loss(answer, report):
    """Diffusion-DPO."""
    errors = [random(6, seed=s).abs() for s in (1, 2, 3, 4)]
    it = report.function(answer, _preference, what="the loss")
    it.value(
        "mean of -logsigmoid(-beta ((win - ref win) - (lose - ref lose)))",
        *((*errors, beta) for beta in (0.1, 1.0, 5.0)),
        hint="errors, not log-likelihoods: a SMALLER error on the winner is better",
    )
    it.value(
        "log 2 where the model equals its reference",
        called("where the model equals its reference", *errors[:2], *errors[:2], 3.0),
        oracle=lambda *_: torch.tensor(math.log(2.0)),
        hint="then nothing is preferred yet",
    )
    with report.property(
        "its gradient lowers the winner's error and raises the loser's",
        hint="the reference is a constant",
    ):
        leaves = [e.to(device()).requires_grad_() for e in errors[:2]]
        loss = answer(*leaves, *[e.to(device()) for e in errors[2:]], 2.0)
        win, lose = torch.autograd.grad(loss, leaves)
        expect(bool((win > 0).all() and (lose < 0).all()), "the gradients point the wrong way")
        exact = [e.clone().requires_grad_() for e in errors[:2]]
        want = torch.autograd.grad(_preference(*exact, *errors[2:], 2.0), exact)
        close(win, want[0], "the gradient of the winner's error")
        close(lose, want[1], "the gradient of the loser's error")
    big = [torch.full((3,), v) for v in (5e3, 0.0, 0.0, 0.0)]
    it.value(
        "large differences do not overflow",
        called("for a difference of 5000", *big, 1.0),
        oracle=lambda *_: torch.tensor(5e3),
        hint="logsigmoid, not log of sigmoid",
    )
