"""Chapter 21, averaging gradients. Rank functions gather facts, the checks judge them."""

import contextlib
import itertools
import os
import tempfile
import time

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

SIZES = (1, 2, 3, 4)  # group sizes


def on_cpu(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copies, None where there is none."""
    return {k: None if t is None else t.detach().cpu().clone() for k, t in tensors.items()}


def near(actual, expected: Tensor, what: str, factors: dict[float, str], tolerance=1e-5) -> None:
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
    precise = torch.float64 if device().type in ("cpu", "cuda") else torch.float32
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
            sent = _gradients(log, len(every))
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
        found.append(on_cpu({n: p.grad for n, p in model.named_parameters()}))
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
        grads = on_cpu({n: p.grad for n, p in model.named_parameters()})
        steps.append((grads, log, dict(model.stamps), len(_gradients(quiet, len(grads)))))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return steps


def _constructed(answer):
    model = _Deep(dist.get_rank()).to(device())  # other parameters on each rank
    expect(isinstance(answer(model), nn.Module), "the answer is no nn.Module")
    return on_cpu(model.state_dict())


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
    return on_cpu({n: p.grad for n, p in model.named_parameters()})


def _interrupted(answer) -> tuple[dict, int]:
    """A backward after an error under no_sync(): its gradients, and the calls it makes itself."""
    rank = dist.get_rank()
    model = _Deep(0).to(device())
    wrapped = answer(model, bucket_bytes=900)
    with contextlib.suppress(ArithmeticError), wrapped.no_sync():
        raise ArithmeticError("the loss is not finite")
    x, y = (t.chunk(4)[rank].to(device()) for t in _deep_batch(4, 0))
    with calls.record() as log:
        _deep_loss(wrapped, x, y).backward()
    wrapped.finish()
    grads = on_cpu({n: p.grad for n, p in model.named_parameters()})
    return grads, len(_gradients(log, len(grads)))


def _partly_frozen(seed: int) -> nn.Sequential:
    """A trained layer behind a frozen one."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=10 * seed + i))
    model[0].requires_grad_(False)
    return model


def _frozen(answer) -> tuple[dict, dict, list[bool]]:
    """Gradients and parameters after a step, and which parameters are trained."""
    rank = dist.get_rank()
    model = _partly_frozen(rank).to(device())
    wrapped = answer(model)
    wrapped(random(4, 5, seed=30 + rank).to(device())).square().mean().backward()
    wrapped.finish()
    named = dict(model.named_parameters())
    grads = on_cpu({n: p.grad for n, p in named.items()})
    return grads, on_cpu(named), [p.requires_grad for p in named.values()]


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
                    near(grads[name], oracle[step][name], what, scales(4))
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
        "holds the sum of the micro-batches; an error inside leaves it too: try … finally",
    ):
        oracle = _deep_alone(4, micro=3)
        factors = scales(4) | {
            1
            / 3: "divided by the 3 micro-batches again: the loss of each was, before its backward",
            3: "3 times too much: each of the 3 micro-batches was added up more than once",
        }
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
                    near(grads[name], oracle[step][name], what, factors)
        oracle = _deep_alone(4, steps=1)[0]
        for grads, sent in report.ranks(_interrupted, 4, answer):
            expect(sent > 0, "once an error was raised under no_sync(), backward sends nothing")
            for name in names:
                close(grads[name], oracle[name], f"after an error, the gradient of {name}")
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
        "frozen parameters start as the first rank's and stay frozen",
        hint="broadcast all parameters, but put only those with requires_grad into buckets: a "
        "frozen one gets no gradient, so a bucket that waits for it never fills",
    ):
        alone = _partly_frozen(0)
        losses = [alone(random(4, 5, seed=30 + r)).square().mean() for r in range(2)]
        (sum(losses) / 2).backward()
        for grads, after, trained_ones in report.ranks(_frozen, 2, answer):
            same(trained_ones, [False, False, True, True], "requires_grad of the parameters")
            for name, p in alone.named_parameters():
                close(after[name], p.detach(), f"the parameter {name}", 0.0)
                if p.requires_grad:
                    close(grads[name], p.grad, f"the gradient of {name}")
                else:
                    expect(grads[name] is None, f"the frozen {name} has got a gradient")
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
                        near(grads[name], oracles[size][step][name], what, scales(size))
