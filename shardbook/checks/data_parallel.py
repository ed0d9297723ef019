"""Chapter 21: data parallel and ZeRO. Rank functions gather facts, the checks judge them."""

import itertools
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import calls
from ..device import device
from ..memory import held_bytes
from .framework import check, close, expect, random, refuses, same, total
from .groups import last_ranks

SIZES = (1, 2, 3, 4)  # group sizes


def _cpu(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {k: None if t is None else t.detach().cpu().clone() for k, t in tensors.items()}


def _gradients(log: list[calls.Call], params: int) -> list[calls.Call]:
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
    for name, p in model.named_parameters():
        absent = missing and (name == "none" or (name == "some" and rank % 2))
        if not absent:
            p.grad = torch.empty_like(p).copy_(_loose_gradient(p, name, rank))
    before = _cpu(dict(model.named_parameters()))
    with calls.record() as log:
        answer(model, group) if group is not None else answer(model)
    grads = _cpu({name: p.grad for name, p in model.named_parameters()})
    return grads, before, _cpu(dict(model.named_parameters())), log


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
        close(actual, expected.to(dtype), what, tolerance)


@check("average_gradients_")
def average_gradients_(answer, report):
    """Means, missing gradients, number of collectives, groups."""
    every = ("matrix", "strided", "brain", "scalar", "some", "none")
    values = None
    with report.property(
        "every gradient is the mean over 4 ranks",
        hint="sum the gradients over the ranks, then divide by the number of ranks, once; "
        "write the result into p.grad, whatever its strides and dtype",
    ):
        values = report.ranks(_averaged, 4, answer, False)
        for grads, before, after, _ in values:
            _judge_means(grads, 4, False, every)
            for name in every:
                close(after[name], before[name], f"the parameter {name!r}", 0.0)
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
            expect(
                len(log) <= 3,
                f"a rank made {len(log)} collective calls for gradients of two dtypes, "
                "expected at most 2 and one small one",
            )
            moved = sum(c.nbytes for c in log)
            expect(
                moved <= nbytes + 4 * 8 * len(every),
                f"a rank handed {moved} bytes to collectives for {nbytes} bytes of gradients",
            )
    with report.property(
        "a parameter without gradient counts as zero, and stays None if no rank has one",
        hint="ranks must agree on the parameters they reduce: one small all-reduce of flags says "
        "which have a gradient anywhere; a rank without one sends zeros and gets the mean",
    ):
        for grads, *_ in report.ranks(_averaged, 4, answer, True):
            _judge_means(grads, 4, True, every)
    with report.property(
        "groups of 1 to 4 ranks average among themselves",
        hint="pass group= to every collective and divide by the size of that group",
    ):
        for results in report.ranks(_averaged_in_groups, 4, answer):
            for size, grads in results:
                _judge_means(grads, size, True, every)


# BucketedDataParallel

WIDTHS = (6, 17, 9, 14, 11, 8, 5)


class _Deep(nn.Module):
    """Six linear layers; `stamps` tells when the gradient of each one's input was ready."""

    def __init__(self, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(WIDTHS))
        self.register_buffer("offset", random(WIDTHS[0], seed=seed + 50))
        self.register_buffer("seen", torch.tensor([seed, 7 - seed]))
        self.stamps: dict[int, int] = {}

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + self.offset
        for i, layer in enumerate(self.layers):
            if x.requires_grad:
                x.register_hook(lambda grad, i=i: self.stamps.update({i: time.monotonic_ns()}))
            x = layer(torch.tanh(x))
        return x * scale


def _deep_batch(size: int, step: int, micro: int = 1) -> tuple[Tensor, Tensor]:
    rows = 3 * size * micro
    return random(rows, WIDTHS[0], seed=step + 10), random(rows, WIDTHS[-1], seed=step + 20)


def _deep_loss(model, x: Tensor, y: Tensor) -> Tensor:
    return (model(x, scale=1.5) - y).square().mean()


def _deep_alone(size: int, micro: int = 1, steps: int = 2) -> list[dict[str, Tensor]]:
    """The oracle: one process, the whole batch, plain SGD; gradients of every step."""
    model = _Deep(0)
    found = []
    for step in range(steps):
        x, y = _deep_batch(size, step, micro)
        model.zero_grad()
        _deep_loss(model, x, y).backward()
        found.append(_cpu({n: p.grad for n, p in model.named_parameters()}))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return found


def _trained(answer, bucket_bytes=None, group=None, rank=None, size=4, micro=1):
    """Two steps; of each the gradients, the calls, the stamps, and how many calls no_sync made."""
    rank = dist.get_rank() if rank is None else rank
    model = _Deep(rank).to(device())  # the first rank's parameters must win
    options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    if group is not None:
        options["group"] = group
    wrapped = answer(model, **options)
    steps = []
    for step in range(2):
        x, y = (t.chunk(size)[rank].to(device()) for t in _deep_batch(size, step, micro))
        x.requires_grad_()
        wrapped.zero_grad()
        model.stamps = {}
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        with calls.record() as quiet, wrapped.no_sync() if micro > 1 else _nothing():
            for xs, ys in parts[:-1]:
                (_deep_loss(wrapped, xs, ys) / micro).backward()
        with calls.record() as log:
            (_deep_loss(wrapped, *parts[-1]) / micro).backward()
            wrapped.finish()
        grads = _cpu({n: p.grad for n, p in model.named_parameters()})
        steps.append((grads, log, dict(model.stamps), len(_gradients(quiet, len(grads)))))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return steps


def _constructed(answer):
    model = _Deep(dist.get_rank()).to(device())  # other parameters on each rank
    expect(isinstance(answer(model), nn.Module), "the answer is no nn.Module")
    return _cpu(model.state_dict())


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def _trained_in_groups(answer):
    return [(n, _trained(answer, 900, g, r, size=n)) for n, g, r in last_ranks()]


def _held_up(answer, folder: str) -> bool:
    """Rank 1 lingers in its backward until rank 0 is through with its own. Did rank 0 wait?"""
    rank = dist.get_rank()
    wrapped = answer(_Deep(0).to(device()), bucket_bytes=1)
    x, y = (t.chunk(4)[rank].to(device()) for t in _deep_batch(4, 0))
    x.requires_grad_()
    signal, waited = os.path.join(folder, "through"), []

    def linger(grad):
        deadline = time.monotonic() + 4
        while not os.path.exists(signal) and time.monotonic() < deadline:
            time.sleep(0.002)
        waited.append(not os.path.exists(signal))

    out = wrapped(x, scale=1.5)
    if rank == 1:
        out.register_hook(linger)
    if rank == 0:
        x.register_hook(lambda grad: open(signal, "w").close())
    (out - y).square().mean().backward()
    wrapped.finish()
    return any(waited)


class _Branches(nn.Module):
    """Two branches of equal shapes, one an even rank's and one an odd rank's, and one unused."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Parameter(random(5, 6, seed=1))
        self.left = nn.Parameter(random(6, 7, seed=2))
        self.right = nn.Parameter(random(6, 7, seed=3))
        self.both = nn.Parameter(random(7, 7, seed=4))
        self.unused = nn.Parameter(random(3, seed=5))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(x @ self.stem)
        # Odd ranks meet the branches in the other order, so their buckets fill in another order.
        if rank % 2:
            return torch.tanh(x @ self.right) @ self.both
        return torch.tanh(torch.tanh(x @ self.left) @ self.both) + x @ self.right

    def loss(self, rank: int) -> Tensor:
        x = random(4, 5, seed=30 + rank).to(self.stem.device)
        return self(x, rank).square().sum()


def _branched(answer) -> dict:
    rank = dist.get_rank()
    model = _Branches().to(device())
    wrapped = answer(model, bucket_bytes=1)
    x = random(4, 5, seed=30 + rank).to(device())
    wrapped(x, rank).square().sum().backward()
    wrapped.finish()
    return _cpu({n: p.grad for n, p in model.named_parameters()})


@check("BucketedDataParallel")
def bucketed_data_parallel(answer, report):
    """Broadcast, means, buckets, overlap, accumulation, unused parameters, groups."""
    names = [n for n, _ in _Deep(0).named_parameters()]
    sizes = [p.nbytes for p in _Deep(0).parameters()]
    limit = 900
    state = {}

    def trained():  # one run serves several properties
        if "values" not in state:
            state["values"] = report.ranks(_trained, 4, answer, limit)
        return state["values"]

    with report.property(
        "all ranks start with the parameters and buffers of the first",
        hint="broadcast every parameter and every buffer from the group's first rank",
    ):
        first = _Deep(0).state_dict()
        for rank, start in enumerate(report.ranks(_constructed, 4, answer)):
            for name, expected in first.items():
                close(start[name], expected, f"{name} on rank {rank}", 0.0)
    with report.property(
        "gradients after finish() are those of the whole batch, step after step",
        hint="finish() must wait for every bucket, divide the sum by the number of ranks, and "
        "leave everything ready for the next backward",
    ):
        oracle = _deep_alone(4)
        for steps in trained():
            for step, (grads, *_) in enumerate(steps):
                for name in names:
                    what = f"the gradient of {name} in step {step}"
                    expect(grads[name] is not None, f"{what} is None")
                    close(grads[name], oracle[step][name], what)
    with report.property(
        "one all-reduce a bucket, no byte more than the gradients",
        hint="a bucket takes parameters until the next one would not fit in bucket_bytes, and "
        "leaves in one all-reduce of one flat tensor",
    ):
        for steps in trained():
            for _, log, _, _ in steps:
                sent = _gradients(log, len(names))
                moved, largest = sum(c.nbytes for c in sent), max(c.nbytes for c in sent + log)
                expect(
                    moved == sum(sizes),
                    f"{moved} bytes went through collectives, the gradients have {sum(sizes)}",
                )
                expect(
                    largest <= limit + max(sizes),
                    f"one message has {largest} bytes where bucket_bytes is {limit}",
                )
                most = 2 * -(-sum(sizes) // limit)  # first fit leaves a bucket at least half full
                expect(
                    len(sent) <= most,
                    f"{len(sent)} messages for {sum(sizes)} bytes in buckets of {limit}, "
                    f"expected at most {most}",
                )
        for steps in report.ranks(_trained, 2, answer, None, size=2):
            sent = _gradients(steps[1][1], len(names))
            expect(len(sent) == 1, f"{len(sent)} messages where all fits in one bucket of 25 MB")
    with report.property(
        "buckets leave during backward, last layers first",
        hint="register_post_accumulate_grad_hook tells when a gradient is there; start a bucket "
        "when it is full, not in finish(); fill the buckets from the last parameter to the first",
    ):
        for steps in trained():
            for _, log, stamps, _ in steps:
                sent = _gradients(log, len(names))
                early = [c for c in sent if c.start_ns < stamps[0]]
                expect(
                    len(early) > 0, "no all-reduce started before the backward pass had finished"
                )
                expect(
                    len(early) >= len(sent) - 1,
                    f"only {len(early)} of {len(sent)} buckets started before the backward pass "
                    "had finished",
                )
                expect(
                    sent[0].start_ns < stamps[3],
                    "when backward was half through, the first bucket had not left: it does not "
                    "hold the last layers",
                )
    with report.property(
        "backward does not wait for the other ranks",
        hint="start all-reduce with async_op=True in the hook and wait for the work in finish()",
    ):
        with tempfile.TemporaryDirectory() as folder:
            held_up = report.ranks(_held_up, 4, answer, folder)
        expect(not held_up[1], "rank 0 could not go on with its backward while rank 1 was slow")
    with report.property(
        "no_sync() accumulates without sending, the next backward sends the sum",
        hint="inside no_sync the hook returns at once; outside it the bucket sends p.grad, which "
        "holds the sum of the micro-batches",
    ):
        oracle = _deep_alone(4, micro=3)
        for steps in report.ranks(_trained, 4, answer, limit, micro=3):
            for step, (grads, log, stamps, quiet) in enumerate(steps):
                expect(quiet == 0, f"{quiet} collective calls were made under no_sync()")
                moved = sum(c.nbytes for c in _gradients(log, len(names)))
                expect(moved == sum(sizes), f"{moved} bytes sent for {sum(sizes)} of gradients")
                first = min(c.start_ns for c in _gradients(log, len(names)))
                expect(
                    first < stamps[0],
                    "the backward after no_sync() no longer sends while it computes",
                )
                for name in names:
                    what = f"the accumulated gradient of {name} in step {step}"
                    close(grads[name], oracle[step][name], what)
    with report.property(
        "parameters that a rank did not use count as zero, and nothing hangs",
        hint="finish() starts the buckets that backward did not fill, with zeros for what is "
        "missing; start buckets in their own order on every rank, also if a later one fills first",
    ):
        alone = _Branches()
        (sum(alone.loss(rank) for rank in range(4)) / 4).backward()
        for grads in report.ranks(_branched, 4, answer):
            for name, p in alone.named_parameters():
                if p.grad is not None:
                    close(grads[name], p.grad, f"the gradient of {name!r}")
                elif grads[name] is not None:
                    zero = torch.zeros_like(p)
                    close(grads[name], zero, "the gradient of what no rank used", 0.0)
    with report.property(
        "groups of 1 to 4 ranks work on their own",
        hint="pass group= to every collective; the group's first rank need not be global rank 0",
    ):
        oracles = {size: _deep_alone(size) for size in SIZES}
        for results in report.ranks(_trained_in_groups, 4, answer):
            for size, steps in results:
                for step, (grads, *_) in enumerate(steps):
                    for name in names:
                        what = f"the gradient of {name} on {size} rank{'s' * (size > 1)}"
                        close(grads[name], oracles[size][step][name], what)


# ZeroAdamW


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


def _stepped(make, world: int, rank: int | None, missing: bool) -> list[Tensor]:
    """Parameters after STEPS steps; rank None is the oracle: one process, the mean gradients."""
    params = _parameters()
    if rank is None:
        params = [nn.Parameter(p.detach().cpu()) for p in params]
    optimizer = make(_options(params), **ADAMW)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)  # as a schedule does
        for i, p in enumerate(params):
            ranks = range(world) if rank is None else [rank]
            found = [_gradient(i, step, r, missing, world) for r in ranks]
            if all(g is None for g in found):
                p.grad = None
                continue
            grad = sum(g for g in found if g is not None) / len(found)
            p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    return [p.detach().cpu() for p in params]


def _zero_steps(answer, missing):
    return _stepped(answer, 4, dist.get_rank(), missing)


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
    optimizer = answer(iter(params), 0.1)
    loss = optimizer.step(lambda: torch.tensor(2.5))
    kept = params[0].detach().clone()
    optimizer.zero_grad()
    cleared = all(p.grad is None or not p.grad.any() for p in params)
    optimizer.step()
    unmoved = torch.equal(kept, params[0]) if params[0].grad is None else True
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    return is_optimizer, None if loss is None else float(loss), cleared, unmoved


@check("ZeroAdamW")
def zero_adamw(answer, report):
    """AdamW on averaged gradients, None gradients, memory, traffic, groups, the interface."""

    def judge(params, world: int, missing: bool) -> None:
        expected = _stepped(torch.optim.AdamW, world, None, missing)
        for i, (p, e) in enumerate(zip(params, expected, strict=True)):
            what = f"parameter {i} after {STEPS} steps on {world} rank{'s' * (world > 1)}"
            close(p, e, what)

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
        hint="subclass torch.optim.Optimizer; step(closure=None) returns what the closure returned",
    ):
        for is_optimizer, loss, cleared, unmoved in report.ranks(_zero_interface, 2, answer):
            expect(is_optimizer, "it is no torch.optim.Optimizer")
            same(loss, 2.5, "what step(closure) returned")
            expect(cleared, "zero_grad() left gradients behind")
            expect(unmoved, "a step without gradients moved a parameter")


# FullySharded

LAYERS = ((10, 13), (13, 9), (9, 14), (14, 7))
_probes: list[tuple[str, int, list[int]]] = []  # (pass, layer, layers whose full weights exist)
_seen: list[tuple[int, int, StorageWeakRef]] = []  # (layer, numel of the layer, its storage)


def _note(phase: str, layer: int, weight: Tensor) -> None:
    if not any(i == layer and r.cdata == weight.untyped_storage()._cdata for i, _, r in _seen):
        _seen.append((layer, 0, StorageWeakRef(weight.untyped_storage())))
    _probes.append((phase, layer, _alive()))


def _settled() -> list[int]:
    """`_alive()` once it is empty, or after half a second.

    A backend's own thread may hold a collective's tensors a moment longer than the call.
    """
    deadline = time.monotonic() + 0.5
    while _alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    return _alive()


def _alive() -> list[int]:
    """Layers that have a full weight in memory, whoever holds it: Python, autograd, a buffer."""
    alive = set()
    for layer, _, ref in _seen:
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        if storage is not None and storage.nbytes():
            alive.add(layer)
        del storage
    return sorted(alive)


class _Scale(torch.autograd.Function):
    """Multiplies by the mean of the weight; saves the weight and looks at memory both ways."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        _note("forward", layer, weight)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x * weight.mean()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _note("backward", ctx.layer, weight)
        return (
            grad * weight.mean(),
            torch.full_like(weight, (grad * x).sum() / weight.numel()),
            None,
        )


class _Layer(nn.Module):
    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer
        n_in, n_out = LAYERS[layer]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer)
            self.linear = nn.Linear(n_in, n_out)
        self.gain = nn.Parameter(1 + 0.1 * random(n_out, seed=layer + 5))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        x = torch.tanh(self.linear(x) * self.gain)
        return _Scale.apply(x, self.linear.weight, self.layer) + shift + x


def _numel(layer: int) -> int:
    return LAYERS[layer][0] * LAYERS[layer][1] + 2 * LAYERS[layer][1]


def _sharded_batch(size: int, step: int) -> tuple[Tensor, Tensor]:
    return random(5 * size, LAYERS[0][0], seed=step), random(5 * size, LAYERS[-1][1], seed=step + 9)


def _run_layers(layers, x, y):
    out = x
    for layer in layers:
        out = layer(out, shift=0.25)
    return out, (out - y).square().mean()


def _sharded_alone(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The oracle: outputs, input gradients and gradient norms; the first step has two backwards."""
    layers = [_Layer(i) for i in range(len(LAYERS))]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2)
    found = []
    for step in range(3):
        for half in range(2 if step == 0 else 1):
            x, y = _sharded_batch(size, 2 * step + half)
            x.requires_grad_()
            out, loss = _run_layers(layers, x, y)
            loss.backward()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        found.append((out.detach(), x.grad, norm))
        optimizer.step()
        optimizer.zero_grad()
    _seen.clear(), _probes.clear()
    return found


def _sharded(answer, group=None, rank=None, size=4):
    rank = dist.get_rank() if rank is None else rank
    options = {} if group is None else {"group": group}
    before = held_bytes() if group is None else 0
    layers = [answer(_Layer(i).to(device()), **options) for i in range(len(LAYERS))]
    grown = held_bytes() - before if group is None else 0
    kept = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    params = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2)
    steps = []
    for step in range(3):
        _seen.clear(), _probes.clear()
        with calls.record() as log:
            for half in range(2 if step == 0 else 1):
                batch = _sharded_batch(size, 2 * step + half)
                x, y = (t.chunk(size)[rank].to(device()) for t in batch)
                x.requires_grad_(step < 2)  # the last step begins without gradient, as tokens do
                out, loss = _run_layers(layers, x, y)
                between = _settled()
                loss.backward()
        after = _settled()
        squares = sum(float(p.grad.square().sum()) for p in params if p.grad is not None)
        x_grad = None if x.grad is None else x.grad.cpu()
        steps.append((out.detach().cpu(), x_grad, squares, log, list(_probes), between, after))
        del out, loss
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        _seen.clear(), _probes.clear()
        inferred = _run_layers(layers, *(t.to(device()) for t in _sharded_batch(1, 7)))[0].cpu()
        after = _settled()
    return grown, kept, steps, inferred, after


def _sharded_in_groups(answer):
    return [(n, _sharded(answer, g, r, size=n)) for n, g, r in last_ranks()]


def _judge_training(results: list, size: int) -> None:
    oracle = _sharded_alone(size)
    where = f"on {size} rank{'s' * (size > 1)}"
    for step, (out, x_grad, norm) in enumerate(oracle):
        for rank, (_, _, steps, _, _) in enumerate(results):
            mine, grad, *_ = steps[step]
            close(mine, out.chunk(size)[rank], f"the output in step {step} {where}")
            if grad is not None:  # a mean over 1/size of the rows: size times larger
                expected = size * x_grad.chunk(size)[rank]
                close(grad, expected, f"the gradient of the input in step {step} {where}")
        squares = sum(r[2][step][2] for r in results)
        close(torch.tensor(squares).sqrt(), norm, f"the norm of all shards' gradients {where}")


@check("FullySharded")
def fully_sharded(answer, report):
    """Values, training, shards, what is in memory when, calls and bytes, groups."""
    numels = [_numel(i) for i in range(len(LAYERS))]
    shards = [-(-n // 4) for n in numels]
    state = {}

    def sharded():
        if "values" not in state:
            state["values"] = report.ranks(_sharded, 4, answer)
        return state["values"]

    with report.property(
        "trains as the whole module does on the whole batch",
        hint="gather the shards in rank order and cut the padding off; the gradient of a shard is "
        "the mean over the ranks, not the sum; a second backward adds to it",
    ):
        _judge_training(sharded(), 4)
    with report.property(
        "a rank keeps ceil(numel / 4) of each module's parameters, and no full copy",
        hint="flatten the parameters, pad to a multiple of the ranks, register this rank's part as "
        "the only parameter, and drop the originals from the module",
    ):
        for grown, kept, *_ in sharded():
            for layer, (n, most) in enumerate(zip(kept, shards, strict=True)):
                expect(n <= most, f"layer {layer} keeps {n} parameters, expected at most {most}")
            most = 4 * sum(shards)
            expect(
                grown <= 1.1 * most,
                f"a rank holds {grown} bytes after construction, its shards have {most}",
            )
        for layer, numel in enumerate(numels):
            held = sum(kept[layer] for _, kept, *_ in sharded())
            expect(held >= numel, f"all ranks together keep {held} of layer {layer}'s {numel}")
    with report.property(
        "full parameters exist only while their module computes",
        hint="after forward nothing may hold the gathered tensor: not an attribute, and not "
        "autograd, which saves weights for backward (pack them away with saved_tensors_hooks, or "
        "free the storage and fill it again before backward); let go again after the module's "
        "backward, not at the end",
    ):
        for *_, steps, _, inferred in sharded():
            for *_, log, probes, between, after in steps:
                del log
                for phase, layer, alive in probes:
                    expect(
                        len(alive) <= 2,
                        f"while layer {layer} ran its {phase}, layers {alive} had full weights",
                    )
                expect(not between, f"after forward, layers {between} still had full weights")
                expect(not after, f"after backward, layers {after} still had full weights")
            expect(not inferred, f"after inference, layers {inferred} still had full weights")
    with report.property(
        "2 all-gathers and 1 reduce-scatter per step and module",
        hint="forward gathers, backward gathers again and reduce-scatters the flat gradient; "
        "nothing else travels",
    ):
        for *_, steps, _, _ in sharded():
            for step, (_, _, _, log, *_) in enumerate(steps):
                runs = 2 if step == 0 else 1
                full = 4 * 4 * sum(shards)  # 4 bytes, 4 parts
                for op, times in (("all_gather", 2), ("reduce_scatter", 1)):
                    count, moved = total(log, op)
                    expected = runs * times * len(LAYERS)
                    expect(count == expected, f"{count} {op} calls, expected {expected}")
                    expect(
                        moved == runs * times * full,
                        f"{op} moved {moved} bytes, expected {runs * times * full}",
                    )
                other = sorted({c.op for c in log} - {"all_gather", "reduce_scatter"})
                expect(not other, f"{', '.join(other)} was called too")
    with report.property(
        "computes without gradients too",
        hint="under torch.no_grad() forward gathers once and lets go, there is no backward",
    ):
        layers = [_Layer(i) for i in range(len(LAYERS))]
        params = [p for layer in layers for p in layer.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.2)
        for step in range(3):
            for half in range(2 if step == 0 else 1):
                _run_layers(layers, *_sharded_batch(4, 2 * step + half))[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = _run_layers(layers, *_sharded_batch(1, 7))[0]
        _seen.clear(), _probes.clear()
        for *_, inferred, _ in sharded():
            close(inferred, expected, "the output without gradients")
    with report.property(
        "groups of 1 to 4 ranks work on their own",
        hint="rank and world size are those of the group: dist.get_rank(group)",
    ):
        found = report.ranks(_sharded_in_groups, 4, answer)
        for size in SIZES:
            _judge_training([r for rank in found for n, r in rank if n == size], size)


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
    before = _cpu({str(i): p for i, p in enumerate(params)})
    options = {} if group is None else {"group": group}
    with calls.record() as log:
        norm = answer(iter(params), max_norm, **options)
    grads = [None if p.grad is None else p.grad.cpu() for p in params]
    return float(norm), grads, before, _cpu({str(i): p for i, p in enumerate(params)}), log


def _clipped_in_groups(answer):
    return [(n, _clipped(answer, "all", 0.7, g, r, n)) for n, g, r in last_ranks()]


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
