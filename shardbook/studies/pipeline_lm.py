"""The small model cut into stages, on a virtual clock, and what autograd keeps of it."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .._seams import after_backward
from ..basics.tiny import TinyLM
from ..parallel import clock
from ..tracing.merge import Trace
from ..tracing.record import mark


class Stage(nn.Module):
    """Some consecutive blocks of a TinyLM, with the embedding or the head where it has them."""

    def __init__(self, blocks, embed: nn.Module | None, norm: nn.Module | None, head):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.embed, self.norm, self.head = embed, norm, head

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)  # tokens [B, S] -> [B, S, D]
        positions = torch.arange(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, positions)  # [B, S, D]
        return x if self.head is None else self.head(self.norm(x))  # [B, S, V]


def split_lm(model: TinyLM, num_stages: int) -> list[Stage]:
    """The model as `num_stages` stages whose composition is the model; modules are shared with it.

    Blocks are cut evenly, the embedding goes with the first, norm and head with the last. With two
    stages more than blocks, the embedding and the head have a stage each. Else ValueError.
    """
    blocks = list(model.blocks)
    if num_stages == len(blocks) + 2:
        parts = [[], *([block] for block in blocks), []]
    elif 1 <= num_stages <= len(blocks):
        cuts = [len(blocks) * s // num_stages for s in range(num_stages + 1)]
        parts = [blocks[a:b] for a, b in itertools.pairwise(cuts)]
    else:
        raise ValueError(
            f"{len(blocks)} blocks do not make {num_stages} stages: "
            f"expected 1 to {len(blocks)}, or {len(blocks) + 2}"
        )
    stages = []
    for s, part in enumerate(parts):
        ends = (model.norm, model.head) if s == num_stages - 1 else (None, None)
        stages.append(Stage(part, model.embed if s == 0 else None, *ends))
    return stages


class _Told(nn.Module):
    """A stage that runs its i-th forward within `during(i)` and begins backward with `begin(i)`."""

    def __init__(
        self,
        stage: nn.Module,
        during: Callable[[int], contextlib.AbstractContextManager],
        begin: Callable[[int], None],
    ):
        super().__init__()
        self.stage, self.during, self.begin, self.count = stage, during, begin, 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.count = self.count, self.count + 1
        with self.during(i):
            return _Begins.apply(self.stage(x), i, self.begin)


class _Begins(torch.autograd.Function):
    """The identity; its backward is the first of a stage's."""

    @staticmethod
    def forward(ctx, x, i, begin):
        ctx.begin = lambda: begin(i)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.begin()
        return grad, None, None


def timed(stage: nn.Module) -> nn.Module:
    """The stage, telling the virtual clock what it computes, one micro-batch after the other."""

    def forward(i: int) -> contextlib.AbstractContextManager:
        clock.kernel("F", i)
        return contextlib.nullcontext()

    return _Told(stage, forward, lambda i: clock.kernel("B", i))


def marked(stage: nn.Module) -> nn.Module:
    """The stage, its forwards F0, F1, … and backwards B0, B1, … marked in a trace of real time."""

    def backward(i: int) -> None:  # from the first of the stage's backwards to the last
        opened = mark(f"B{i}")
        opened.__enter__()
        after_backward(lambda: opened.__exit__(None, None, None))

    return _Told(stage, lambda i: mark(f"F{i}"), backward)


class Recomputed(nn.Module):
    """A stage that keeps its input only, and runs its forward again in backward."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return _Recompute.apply(self.stage, x, *self.stage.parameters())


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stage, x, *parameters):
        ctx.stage = stage
        ctx.save_for_backward(x)
        return stage(x)  # no graph is built here

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            y = ctx.stage(x)
        torch.autograd.backward(y, grad)  # adds to the parameters' .grad itself
        return None, x.grad, *[None for _ in ctx.needs_input_grad[2:]]


class Saved:
    """Counts the bytes that autograd keeps for backward, and their peak; parameters don't count."""

    def __init__(self, model: nn.Module):
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.users: Counter = Counter()
        self.bytes = self.peak = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: _Kept(self, t), lambda kept: kept.tensor
        )

    def change(self, t: Tensor, by: int) -> None:
        """One more or one less node of the graph holds t; views of one storage count once."""
        storage = t.untyped_storage()
        if storage.data_ptr() in self.own:
            return
        before = self.users[storage.data_ptr()]
        self.users[storage.data_ptr()] += by
        if 0 in (before, before + by):
            self.bytes += by * storage.nbytes()
        self.peak = max(self.peak, self.bytes)


class _Kept:
    """A tensor that autograd saved, until it lets it go."""

    def __init__(self, saved: Saved, tensor: Tensor):
        self.saved, self.tensor = saved, tensor
        saved.change(tensor, 1)

    def __del__(self):
        self.saved.change(self.tensor, -1)


def in_order(kernels: Iterable[list[tuple]]) -> list[tuple]:
    """The kernels that each rank's clock noted as one timeline, as `simulate` gives it."""
    return sorted((k for mine in kernels for k in mine), key=lambda op: (op[4], op[0]))


def virtual_trace(timeline: list[tuple], title: str) -> Trace:
    """A timeline of the virtual clock as a trace: one row per rank, F0, F1, … and B0, B1, …"""
    parts = {rank: sorted({op[3] for op in timeline if op[0] == rank}) for rank, *_ in timeline}
    named = []
    for rank, kind, i, part, start, end in timeline:
        chunk = f" chunk {parts[rank].index(part)}" if len(parts[rank]) > 1 else ""
        named.append((rank, f"{kind}{i}{chunk}", start, end))
    return Trace.simulated(named, title, label="virtual")


def idle_share(timeline: list[tuple]) -> float:
    """The bubble: the idle share of all ranks' time, first kernel's start to last one's end."""
    ranks = len({op[0] for op in timeline})
    span = max(op[5] for op in timeline) - min(op[4] for op in timeline)
    return 1 - sum(end - start for *_, start, end in timeline) / (ranks * span)
