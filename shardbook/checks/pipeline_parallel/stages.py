"""Chapter 23, micro-batches through real stages on ranks."""

import functools
import gc
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from ...devices import device
from ...memory import held_bytes
from ..compare import close, expect, random, total, widest
from ..report import check
from ..seen import Here, Seen
from ..wrong import hints
from .schedules import random_schedule


class _Token:
    """Lives as long as anything that a micro-batch's graph has saved for its backward."""


class _Stage(nn.Module):
    """One stage; counts its forwards, and what earlier ones left alive when one starts."""

    def __init__(self, index: int, stages: int):
        super().__init__()
        widths = [5 + 2 * i for i in range(stages)] + [3]
        self.linear = nn.Linear(widths[index], widths[index + 1])
        with torch.no_grad():
            self.linear.weight.copy_(random(*self.linear.weight.shape, seed=10 + index) / 2)
            self.linear.bias.copy_(random(*self.linear.bias.shape, seed=20 + index))
        self.graphs: list[weakref.ref] = []
        self.outputs: list[weakref.ref] = []
        self.peak = self.peak_outputs = self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        self.peak = max(self.peak, 1 + _alive(self.graphs))
        self.peak_outputs = max(self.peak_outputs, 1 + _alive(self.outputs))
        token = _Token()
        # backward lets go of what was saved, so a loss that is kept with its graph holds nothing
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, token), lambda kept: kept[0]):
            y = torch.tanh(self.linear(x)).transpose(0, 1).contiguous().transpose(0, 1)
        self.graphs.append(weakref.ref(token))
        self.outputs.append(weakref.ref(y))
        return y  # strided, as a model's output may be

    def left(self) -> int:
        """Micro-batches that something still holds."""
        if _alive(self.graphs) or _alive(self.outputs):
            gc.collect()  # a frame in a cycle of references dies a little later than it returns
        return max(_alive(self.graphs), _alive(self.outputs))


def _alive(things: list[weakref.ref]) -> int:
    return sum(thing() is not None for thing in things)


def _data(m: int):
    """Micro-batches of different sizes, and their targets."""
    xs = [random(2 + i % 3, 4, 5, seed=100 + i) for i in range(m)]
    ys = [random(2 + i % 3, 4, 3, seed=200 + i) for i in range(m)]
    return xs, ys


def _loss(y, target):
    return F.mse_loss(y, target)


def _flush(p, m):
    return [[("F", i, 0) for i in range(m)] + [("B", i, 0) for i in range(m)] for _ in range(p)]


def _steady(p, m):
    stages = []
    for s in range(p):
        warm, ops = min(p - s - 1, m), []
        ops += [("F", i, 0) for i in range(warm)]
        for i in range(m - warm):
            ops += [("F", warm + i, 0), ("B", i, 0)]
        stages.append(ops + [("B", i, 0) for i in range(m - warm, m)])
    return stages


# On a rank


TOKENS = "tokens"


def _schedule(kind: str, size: int):
    if kind == "random":
        return random_schedule(size, 5, 1, seed=size)
    return _flush(size, 3) if kind == "flush" else _steady(size, 5)


def _many(kind: str) -> int:
    return 3 if kind == "flush" else 5


def _step(answer, here: Here, kind: str) -> Seen:
    m, last = _many(kind), here.place == here.size - 1
    stage = _Stage(here.place, here.size).to(device())
    for p in stage.parameters():
        p.grad = torch.ones_like(p)  # an earlier step's gradient must not be wiped
    xs, ys = ([t.to(device()) for t in data] for data in _data(m))
    given = xs if here.place == 0 else []
    before = [x.clone() for x in given]
    mine = (list(given) or None, ys if last else None)
    schedule = _schedule(kind, here.size)
    seen = here.see(lambda: answer(stage, schedule, *mine, _loss, **here.options))
    for i, (x, old) in enumerate(zip(given, before, strict=True)):
        expect(
            mine[0][i] is x and torch.equal(x, old) and not x.requires_grad,
            f"micro-batch {i} was changed: it is the caller's, and tokens can't require a gradient",
            "kept",
        )
    seen.grads = {n: p.grad.cpu() - 1 for n, p in stage.named_parameters()}
    seen.more = {"forwards": stage.forwards, "peak": stage.peak, "outputs": stage.peak_outputs}
    seen.more["left"] = stage.left()
    return seen


def _steps(answer, here: Here, kind: str) -> Seen | None:
    if kind == TOKENS:
        return _of_tokens(answer, here) if here.size in (1, 3) else None
    seen = _step(answer, here, kind)
    if kind == "steady" and here.group is None:  # what a second step of all ranks leaves behind
        before = held_bytes()
        _step(answer, here, kind)
        seen.held = held_bytes() - before
    return seen


PRECISE = {
    torch.bfloat16: 3e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}  # bf16 has 8 bits of mantissa


def _token_stages(size: int, dtype: torch.dtype) -> list[nn.Module]:
    """An embedding and linear layers: [n] token ids in, [n, 6] of dtype from stage to stage."""
    stages = [nn.Embedding(11, 6), *(nn.Linear(6, 6) for _ in range(size - 1))]
    with torch.no_grad():
        for i, p in enumerate(p for stage in stages for p in stage.parameters()):
            p.copy_(random(*p.shape, seed=30 + i))
    for stage in stages[1:]:
        stage.bias.requires_grad_(False)  # frozen, as in fine-tuning
    return [stage.to(dtype) for stage in stages]


def _token_data(m: int):
    tokens = [torch.arange(4 + i) * 7 % 11 for i in range(m)]
    return tokens, [random(len(t), 6, seed=40 + i) for i, t in enumerate(tokens)]


def _token_loss(y, target):
    wide = torch.promote_types(y.dtype, target.dtype)
    return F.mse_loss(y.to(wide), target.to(wide))


def _of_tokens(answer, here: Here) -> Seen:
    """Gradients of every stage's parameters, by dtype."""
    found = []
    for dtype in (torch.bfloat16, widest()):
        stage = _token_stages(here.size, dtype)[here.place].to(device())
        tokens, targets = ([t.to(device()) for t in data] for data in _token_data(3))
        last = here.place == here.size - 1
        mine = tokens if here.place == 0 else None, targets if last else None
        answer(stage, _steady(here.size, 3), *mine, _token_loss, **here.options)
        grads = [None if p.grad is None else p.grad.cpu() for p in stage.parameters()]
        found.append((dtype, grads))
    return Seen(found)


# In the check


def _judge_tokens(s: Seen) -> None:
    for dtype, grads in s.value:
        stages = _token_stages(s.size, dtype)
        model = nn.Sequential(*stages)
        losses = [_token_loss(model(t), y) for t, y in zip(*_token_data(3), strict=True)]
        (sum(losses) / 3).backward()
        for got, p in zip(grads, stages[s.place].parameters(), strict=True):
            where = f"of stage {s.where} in {str(dtype).removeprefix('torch.')}"
            if p.requires_grad:
                expect(got is not None, f"a gradient {where} is None", "none")
                close(got, p.grad, f"a gradient {where}", PRECISE[dtype])
            else:
                expect(got is None, f"a frozen parameter {where} has a gradient")


@functools.cache
def _expected(size: int, m: int):
    """Gradients by stage and the loss of the unsplit model, in one process."""
    stages = [_Stage(i, size) for i in range(size)]
    xs, ys = _data(m)
    loss = sum(_loss(nn.Sequential(*stages)(x), y) for x, y in zip(xs, ys, strict=True)) / m
    loss.backward()
    return [[p.grad for p in stage.parameters()] for stage in stages], loss.detach()


def _judge(s: Seen) -> None:
    m, where = _many(s.case), f"stage {s.where}"
    wanted, loss = _expected(s.size, m)
    forwards = s.more["forwards"]
    expect(forwards == m, f"{where} ran {forwards} forwards for {m} micro-batches")
    for got, want in zip(s.grads.values(), wanted[s.place], strict=True):
        close(got, want, f"a gradient of {where}")
    if s.place == s.size - 1:
        expect(s.value is not None, f"{where} returned None, expected the loss")
        close(torch.as_tensor(s.value).reshape(()), loss, f"the loss on {where}")
    else:
        said = f"{where} returned {s.value}, expected None: only the last has it"
        expect(s.value is None, said)


def _judge_memory(s: Seen) -> None:
    most, where, more = min(s.size - s.place, _many(s.case)), f"stage {s.where}", s.more
    said = f"{where} held {more['peak']} micro-batches, expected {most}"
    expect(more["peak"] <= most, said, "memory")
    # a variable may still name the output whose backward was the last
    said = f"{where} held {more['outputs']} outputs, expected {most} and that of the last one"
    expect(more["outputs"] <= most + 1, said, "memory")
    expect(more["left"] == 0, f"{where} still holds {more['left']} at the end", "memory")
    expect(s.held <= 0, f"{where} still holds {s.held} bytes after the step", "memory")


def _judge_messages(s: Seen) -> None:
    m, first, last = _many(s.case), s.place == 0, s.place == s.size - 1
    values = sum(x[..., 0].numel() for x in _data(m)[0]) * 4  # bytes of a width of 1
    widths = [5 + 2 * i for i in range(s.size)] + [3]
    payload = values * (widths[s.place + 1] * (not last) + widths[s.place] * (not first))
    directions, where = (not last) + (not first), f"stage {s.where}"
    count, sent = total(s.forward, "send")
    said = f"{where} sent {sent} bytes, expected {payload} and small headers"
    # room for the header of each message
    expect(payload <= sent <= payload + 128 * m * directions, said, "traffic")
    moved = sum(c.nbytes for c in s.forward if c.op not in ("send", "recv"))
    expect(moved <= 256, f"{where} moved {moved} bytes by collectives", "traffic")
    # dimensions, sizes and the activation itself may travel in a message each
    expect(count <= 3 * m * directions, f"{where} sent {count} messages", "traffic")


@check("run_pipeline")
def run_pipeline(answer, report):
    """Micro-batches through real stages."""
    seen = report.on_groups(_steps, answer, cases=["flush", "steady", "random", TOKENS])
    seen.of("flush").holds(
        "loss and gradients equal the unsplit model's under GPipe's schedule, 1 to 4 stages",
        _judge,
        hint=hints(
            "the loss is the mean over micro-batches, so each one's gradient counts 1/m; run each "
            "forward once; add to .grad, don't replace it",
            raised="a stage's output may be strided, what is sent and received into must be "
            "contiguous; ranks of sends and receives are those of the group",
            hang="each send needs its receive, in the order in which the neighbour sends; pass "
            "group= and the group's ranks to both",
        ),
    )
    seen.of("steady").holds(
        "and under 1F1B",
        _judge,
        hint=hints(
            "follow the schedule's order, and keep input and output by micro-batch",
            hang="do not wait for a send before the next operation: the neighbour may be sending "
            "too",
        ),
    )
    seen.of("random").holds(
        "and under any other order that can run",
        _judge,
        hint=hints(
            "the schedule says which micro-batch comes next; do not assume 0, 1, 2, …",
            hang="a message comes in the order of the neighbour's schedule, which is not yours: "
            "keep what comes early until its turn",
        ),
    )
    seen.of(TOKENS).holds(
        "with token ids as input and two-dimensional bf16 or float64 activations between stages",
        _judge_tokens,
        hint="integers can't require a gradient: only what a stage has received needs one; shape "
        "and dtype of the receive buffer are those of what the stage before sends, in a header",
    )
    seen.of("steady").holds(
        "under 1F1B stage s holds p - s micro-batches' activations, and none at the end",
        _judge_memory,
        hint="drop a micro-batch's input and output when its backward is done, and what was sent "
        "when the step is",
    )
    seen.of("flush").holds(
        "each boundary carries m activations forward and m gradients back, point to point",
        _judge_messages,
        hint="a stage talks to its neighbours only; the shape may travel in one small message",
    )
