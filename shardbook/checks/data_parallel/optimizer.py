"""Chapter 21, ZeroAdamW: the optimizer state in shards."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import calls
from ...devices import device
from ...memory import held_bytes
from ..compare import close, expect, random, same
from ..groups import last_ranks
from ..report import check
from ..wrong import Wrong


def _parameters(count: int = 7) -> list[nn.Parameter]:
    """Uneven shapes, one of them strided; 4 ranks cut right through them."""
    shapes = [(5, 7), (1,), (13,), (3, 2, 5), (11, 6), (2,), (9, 4)][:count]
    params = [nn.Parameter(random(*s, seed=i).to(device())) for i, s in enumerate(shapes)]
    params[0] = nn.Parameter(random(7, 5, seed=0).t().to(device()))
    return params


STEPS = 4


def _gradient(i: int, step: int, rank: int, missing: bool, world: int) -> Tensor | None:
    if missing and ((i == 2 and step == 1) or (i == 5 and step < 2)):
        return None  # on every rank
    if missing and i == 4 and (rank + step) % 2 and world > 1:
        return None  # on some
    p = _shape_of(i)
    return random(*p, seed=1000 * step + 10 * i + rank) * (1 + rank)


def _shape_of(i: int) -> tuple[int, ...]:
    return [(5, 7), (1,), (13,), (3, 2, 5), (11, 6), (2,), (9, 4)][i]


def _options(params: list) -> list[dict]:
    return [
        {"params": params[:3], "lr": 0.05},
        {"params": params[3:], "weight_decay": 0.3},
    ]


ADAMW = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def _stepped(
    make,
    world: int,
    rank: int | None,
    missing: bool,
    resumed: bool = False,
    scale: float = 1.0,
    schedule: bool = True,
) -> list[Tensor]:
    """Parameters after STEPS steps; rank None is the oracle: one process, the mean gradients.

    Resumed: half-way a new optimizer takes over the state of the old one.
    """
    params = _parameters()
    if rank is None:
        params = [nn.Parameter(p.detach().cpu()) for p in params]
    optimizer = make(_options(params), **ADAMW)
    for step in range(STEPS):
        if resumed and step == STEPS // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(_options(params), **ADAMW)
            optimizer.load_state_dict(state)
        if schedule:
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        for i, p in enumerate(params):
            ranks = range(world) if rank is None else [rank]
            found = [_gradient(i, step, r, missing, world) for r in ranks]
            if all(g is None for g in found):
                p.grad = None
                continue
            grad = scale * sum(g for g in found if g is not None) / len(found)
            p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    return [p.detach().cpu() for p in params]


def _zero_steps(answer, missing):
    return _stepped(answer, 4, dist.get_rank(), missing)


def _zero_resumed(answer):
    return _stepped(answer, 4, dist.get_rank(), True, resumed=True)


def _zero_in_groups(answer):
    return [
        (n, _stepped(lambda p, g=g, **o: answer(p, group=g, **o), n, r, True))
        for n, g, r in last_ranks()
    ]


def _zero_memory(answer, shapes: list[tuple[int, ...]]):
    params = [nn.Parameter(random(*s, seed=i).to(device())) for i, s in enumerate(shapes)]

    def gradients():
        for i, p in enumerate(params):
            p.grad = random(*p.shape, seed=i + 50 + dist.get_rank()).to(p.device)

    gradients()
    before = held_bytes()
    optimizer = answer(params, lr=0.1)
    optimizer.step()
    gradients()
    with calls.record() as log:
        optimizer.step()
    return held_bytes() - before, log


def _zero_interface(answer):
    params = _parameters()
    for i, p in enumerate(params):
        p.grad = torch.empty_like(p).copy_(random(*_shape_of(i), seed=i))
    frozen = params[1].requires_grad_(False)
    frozen.grad, before = None, frozen.clone()
    params.append(nn.Parameter(torch.empty(0, 3, device=device())))  # of no elements
    params[-1].grad = torch.empty_like(params[-1])
    optimizer = answer(iter(params), 0.1)

    def closure():
        params[0].sum().backward()
        return torch.tensor(2.5)

    loss = optimizer.step(closure)
    kept = params[0].detach().clone()
    optimizer.zero_grad()
    cleared = all(p.grad is None or not p.grad.any() for p in params)
    optimizer.step()
    unmoved = torch.equal(kept, params[0]) if params[0].grad is None else True
    unmoved = unmoved and torch.equal(before, frozen) and not frozen.requires_grad
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    return is_optimizer, None if loss is None else float(loss), cleared, unmoved


def _without_decay(groups, **options):
    return torch.optim.AdamW([{**g, "weight_decay": 0.0} for g in groups], **options)


def _one_group(groups, **options):
    """What an optimizer does that forgets what is said of a group."""
    return torch.optim.AdamW([{"params": g["params"]} for g in groups], **options)


def _slip(params: list[Tensor], world: int, missing: bool) -> str:
    """The hint where the parameters are those of one known slip; "" where they are of none."""
    adamw = torch.optim.AdamW
    slips = {
        "no weight decay reached the parameters: multiply them by 1 - lr * weight_decay, apart "
        "from the moments": {"make": _without_decay},
        "weight decay went through the moments; in AdamW it is decoupled: it multiplies the "
        "parameters by 1 - lr * weight_decay": {"make": torch.optim.Adam},
        "the gradients were added up over the ranks: divide by the number of ranks": {
            "make": adamw,
            "scale": world,
        },
        "the gradients were divided twice: divide by the number of ranks, once": {
            "make": adamw,
            "scale": 1 / world,
        },
        "the learning rate is that of the construction: read it from the parameter's own group at "
        "every step, for a schedule changes it": {"make": adamw, "schedule": False},
        "a group's own lr and weight_decay were not used: read them from the parameter's own "
        "group at every step": {"make": _one_group},
    }
    for hint, slip in slips.items():
        found = _stepped(
            slip["make"],
            world,
            None,
            missing,
            scale=slip.get("scale", 1.0),
            schedule=slip.get("schedule", True),
        )
        if all(
            p.shape == f.shape and torch.allclose(p, f, 1e-4, 1e-5)
            for p, f in zip(params, found, strict=True)
        ):
            return hint
    return ""


@check("ZeroAdamW")
def zero_adamw(answer, report):
    """AdamW on averaged gradients, None gradients, memory, traffic, groups, the interface."""

    def judge(params, world: int, missing: bool) -> None:
        expected = _stepped(torch.optim.AdamW, world, None, missing)
        for i, (p, e) in enumerate(zip(params, expected, strict=True)):
            what = f"parameter {i} after {STEPS} steps on {world} rank{'s' * (world > 1)}"
            try:
                close(p, e, what)
            except Wrong as wrong:
                raise Wrong(str(wrong), wrong.kind, _slip(params, world, missing)) from None

    with report.property(
        "equals torch.optim.AdamW on the averaged gradients",
        hint="reduce-scatter the gradients, divide by the number of ranks, update your part with "
        "bias-corrected moments and decoupled weight decay, read lr and the rest from the "
        "parameter's own group at every step, then gather the parameters on every rank",
    ):
        for params in report.ranks(_zero_steps, 4, answer, False):
            judge(params, 4, False)
    with report.property(
        "a parameter that no rank has a gradient for is skipped, one that some have is not",
        hint="skipped means: no weight decay, no change of its moments, and its own step count "
        "stands still; ranks must agree on it, and one without a gradient sends zeros",
    ):
        for params in report.ranks(_zero_steps, 4, answer, True):
            judge(params, 4, True)
    shapes = [(37 + 3 * i, 41 - i) for i in range(16)]
    numel, largest = sum(a * b for a, b in shapes), max(a * b for a, b in shapes)
    values = None
    with report.property(
        "a rank keeps a quarter of each moment on 4 ranks",
        hint="create exp_avg and exp_avg_sq for this rank's part only, and keep no full copy of "
        "parameters or gradients after step()",
    ):
        values = report.ranks(_zero_memory, 4, answer, shapes)
        # Two moments, and room for a copy of the rank's part of the parameters.
        most = 4 * 3 * (-(-numel // 4) + largest)
        for grown, _ in values:
            expect(
                grown <= most,
                f"a rank holds {grown / 4 / numel:.2f} values per parameter beside the parameters "
                f"and gradients after step(), expected at most {most / 4 / numel:.2f}",
            )
    with report.property(
        "gradients and parameters travel once a step",
        hint="a reduce-scatter of the gradients and an all-gather of the parameters is all it "
        "takes; gathering every rank's gradients moves P times as much",
    ):
        for _, log in values or report.ranks(_zero_memory, 4, answer, shapes):
            moved = sum(c.nbytes for c in log)
            expect(moved >= 4 * numel, "the ranks hardly communicated")
            most = 2 * 4 * (numel + 4 * len(shapes)) + 64 * 8 * len(shapes)
            expect(
                moved <= most,
                f"{moved / 4 / numel:.2f} values per parameter went through collectives, "
                f"expected at most {most / 4 / numel:.2f}",
            )
    with report.property(
        "groups of 1 to 4 ranks work on their own",
        hint="rank and world size are those of the group: dist.get_rank(group)",
    ):
        for results in report.ranks(_zero_in_groups, 4, answer):
            for size, params in results:
                judge(params, size, True)
    with report.property(
        "behaves like any torch.optim.Optimizer",
        hint="subclass torch.optim.Optimizer; step(closure=None) returns what the closure "
        "returned, and calls it under torch.enable_grad(), for it runs backward; moments kept "
        "in self.state are in state_dict(), and load_state_dict() brings them back",
    ):
        for is_optimizer, loss, cleared, unmoved in report.ranks(_zero_interface, 2, answer):
            expect(is_optimizer, "it is no torch.optim.Optimizer")
            same(loss, 2.5, "what step(closure) returned")
            expect(cleared, "zero_grad() left gradients behind")
            expect(unmoved, "a step without gradients moved a parameter")
        for params in report.ranks(_zero_resumed, 4, answer):
            judge(params, 4, True)
