"""Chapter 21, models and runs that the check of BucketedDataParallel judges."""

import contextlib
import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import calls
from ...devices import device
from ..compare import expect, random
from ..groups import last_ranks
from .gradients import gradient_calls, on_cpu

WIDTHS = (6, 17, 9, 14, 11, 8, 5)


class Deep(nn.Module):
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


def deep_alone(size: int, micro: int = 1, steps: int = 2) -> list[dict[str, Tensor]]:
    """The oracle: one process, the whole batch, plain SGD; gradients of every step."""
    model = Deep(0)
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


def trained_on(
    answer: type,
    bucket_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    size: int = 4,
    micro: int = 1,
) -> list:
    """Two steps; of each the gradients, the calls, the stamps, and how many calls no_sync made."""
    rank = dist.get_rank() if rank is None else rank
    model = Deep(rank).to(device())  # the first rank's parameters must win
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
        with calls.record() as quiet, wrapped.no_sync() if micro > 1 else contextlib.nullcontext():
            for xs, ys in parts[:-1]:
                (_deep_loss(wrapped, xs, ys) / micro).backward()
        with calls.record() as log:
            (_deep_loss(wrapped, *parts[-1]) / micro).backward()
            wrapped.finish()
        grads = on_cpu({n: p.grad for n, p in model.named_parameters()})
        steps.append((grads, log, dict(model.stamps), len(gradient_calls(quiet, len(grads)))))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return steps


def constructed(answer):
    """The state after construction, from other parameters on each rank."""
    model = Deep(dist.get_rank()).to(device())  # other parameters on each rank
    expect(isinstance(answer(model), nn.Module), "the answer is no nn.Module")
    return on_cpu(model.state_dict())


def trained_in_groups(answer):
    """(size, steps) for groups of 1 to 4 ranks."""
    return [(n, trained_on(answer, 900, g, r, size=n)) for n, g, r in last_ranks()]


def held_up_by(answer, folder: str) -> bool:
    """Rank 1 lingers in its backward until rank 0 is through with its own. Did rank 0 wait?"""
    rank = dist.get_rank()
    wrapped = answer(Deep(0).to(device()), bucket_bytes=1)
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


class Branches(nn.Module):
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


def branched(answer) -> dict:
    """Gradients where ranks take other branches."""
    rank = dist.get_rank()
    model = Branches().to(device())
    wrapped = answer(model, bucket_bytes=1)
    x = random(4, 5, seed=30 + rank).to(device())
    wrapped(x, rank).square().sum().backward()
    wrapped.finish()
    return on_cpu({n: p.grad for n, p in model.named_parameters()})


def interrupted(answer) -> tuple[dict, int]:
    """A backward after an error under no_sync(): its gradients, and the calls it makes itself."""
    rank = dist.get_rank()
    model = Deep(0).to(device())
    wrapped = answer(model, bucket_bytes=900)
    with contextlib.suppress(ArithmeticError), wrapped.no_sync():
        raise ArithmeticError("the loss is not finite")
    x, y = (t.chunk(4)[rank].to(device()) for t in _deep_batch(4, 0))
    with calls.record() as log:
        _deep_loss(wrapped, x, y).backward()
    wrapped.finish()
    grads = on_cpu({n: p.grad for n, p in model.named_parameters()})
    return grads, len(gradient_calls(log, len(grads)))


def partly_frozen(seed: int) -> nn.Sequential:
    """A trained layer behind a frozen one."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=10 * seed + i))
    model[0].requires_grad_(False)
    return model


def frozen_run(answer) -> tuple[dict, dict, list[bool]]:
    """Gradients and parameters after a step, and which parameters are trained."""
    rank = dist.get_rank()
    model = partly_frozen(rank).to(device())
    wrapped = answer(model)
    wrapped(random(4, 5, seed=30 + rank).to(device())).square().mean().backward()
    wrapped.finish()
    named = dict(model.named_parameters())
    grads = on_cpu({n: p.grad for n, p in named.items()})
    return grads, on_cpu(named), [p.requires_grad for p in named.values()]
