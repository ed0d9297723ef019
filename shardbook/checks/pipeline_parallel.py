"""Chapter 23: pipeline parallel. A clock of our own plays the schedules that are judged."""

import copy
import gc
import random as rng
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .. import calls
from ..devices import device
from ..memory import held_bytes
from .compare import close, expect, random, refuses, same, total, widest
from .groups import last_ranks
from .report import check
from .wrong import hints

SHAPES = [(4, 8), (3, 5), (5, 2), (2, 1), (1, 3)]  # (stages, micro-batches)


# ---- an independent clock: longest paths by repeated relaxation


def _play(schedule, forward=1.0, backward=2.0, send=0.0):
    """(makespan, {(rank, kind, microbatch, chunk): (start, end)}); Wrong where it can't run."""
    p = len(schedule)
    chunks = 1 + max(op[2] for stage in schedule for op in stage)
    ops = [(s, *op) for s, stage in enumerate(schedule) for op in stage]
    needs = {}
    for s, stage in enumerate(schedule):
        for at, (kind, i, c) in enumerate(stage):
            before = [((s, *stage[at - 1]), 0.0)] if at else []
            block = c * p + s + (-1 if kind == "F" else 1)
            if kind == "B":
                before.append(((s, "F", i, c), 0.0))
            if 0 <= block < p * chunks:
                other = block % p
                before.append(((other, kind, i, block // p), send if other != s else 0.0))
            needs[s, kind, i, c] = before
    end: dict = {}
    for _ in range(len(ops) + 1):
        changed = False
        for op in ops:
            if op in end or any(n not in end for n, _ in needs[op]):
                continue
            start = max((end[n] + latency for n, latency in needs[op]), default=0.0)
            end[op] = start + (forward if op[1] == "F" else backward)
            changed = True
        if not changed:
            break
    stuck = [op for op in ops if op not in end]
    expect(not stuck, f"the schedule deadlocks: nothing can run before stage {stuck[:1]}")
    cost = {"F": forward, "B": backward}
    return max(end.values()), {op: (t - cost[op[1]], t) for op, t in end.items()}


def _peaks(schedule) -> list[int]:
    out = []
    for stage in schedule:
        live = [0]
        for kind, *_ in stage:
            live.append(live[-1] + (1 if kind == "F" else -1))
        out.append(max(live))
    return out


def _well_formed(schedule, p: int, m: int, v: int) -> None:
    expect(isinstance(schedule, list), f"it is {type(schedule).__name__}, expected a list")
    expect(len(schedule) == p, f"it has {len(schedule)} stages, expected {p}")
    wanted = sorted((kind, i, c) for kind in "FB" for i in range(m) for c in range(v))
    for s, stage in enumerate(schedule):
        got = sorted(tuple(op) for op in stage)
        expect(
            got == wanted,
            f"stage {s} of {p} with {m} micro-batches does {len(got)} operations, expected each "
            f"of the {len(wanted)} (kind, microbatch, chunk) once",
        )


def _judge(schedule, p: int, m: int, v: int, peaks: list[int]) -> None:
    makespan, _ = _play(schedule)
    # one chunk's forward takes 1 and its backward 2
    same(makespan, 3.0 * (v * m + p - 1), f"the time of {p} stages and {m} micro-batches")
    same(_peaks(schedule), peaks, f"live micro-batches per stage ({p} stages, {m} micro-batches)")


RUNS = "each stage does every micro-batch once, and the pipeline runs without deadlock"
BUBBLE = "the time is that of the closed form"


@check("gpipe")
def gpipe(answer, report):
    """All forwards, then all backwards."""
    with report.property(RUNS, hint='a stage is a list of ("F" or "B", microbatch, 0)'):
        for p, m in SHAPES:
            schedule = answer(p, m)
            _well_formed(schedule, p, m, 1)
            _play(schedule)
    with report.property(
        "all forwards come before all backwards, so every micro-batch is live at once",
        hint="GPipe's flush: no backward before the last forward, on every stage",
    ):
        for p, m in SHAPES:
            for s, stage in enumerate(answer(p, m)):
                kinds = "".join(op[0] for op in stage)
                expect(kinds == "F" * m + "B" * m, f"stage {s} runs {kinds} for {m} micro-batches")
    with report.property(
        BUBBLE,
        hint="backwards must leave in an order in which the stage before can use them at once",
    ):
        for p, m in SHAPES:
            _judge(answer(p, m), p, m, 1, [m] * p)


@check("one_f_one_b")
def one_f_one_b(answer, report):
    """Backward as early as possible."""
    with report.property(RUNS, hint="count warm-up, steady pairs and the backwards left"):
        for p, m in [*SHAPES, (4, 3)]:
            schedule = answer(p, m)
            _well_formed(schedule, p, m, 1)
            _play(schedule)
    with report.property(
        "stage s holds at most p - s live micro-batches",
        hint="stage s warms up with p - s - 1 forwards (fewer if there are fewer micro-batches), "
        "then runs one forward and one backward in turn",
    ):
        for p, m in [*SHAPES, (4, 3)]:
            peaks = _peaks(answer(p, m))
            same(peaks, [min(p - s, m) for s in range(p)], f"live micro-batches ({p} stages, {m})")
    with report.property(BUBBLE, hint="in the steady state the forward comes before the backward"):
        for p, m in [*SHAPES, (4, 3)]:
            _judge(answer(p, m), p, m, 1, [min(p - s, m) for s in range(p)])


@check("interleaved")
def interleaved(answer, report):
    """Virtual stages."""
    shapes = [(4, 8, 2), (2, 4, 3), (3, 6, 2), (2, 2, 4), (4, 4, 1)]
    with report.property(
        RUNS,
        hint="micro-batches pass the chunks in groups of p: p of them through chunk 0, the same "
        "through chunk 1, …; backwards take the chunks the other way",
    ):
        for p, m, v in shapes:
            schedule = answer(p, m, v)
            _well_formed(schedule, p, m, v)
            _play(schedule)
    with report.property(
        "live chunks per stage are 2(p-s-1) + (v-1)p + 1",
        hint="that many forwards, less one, run before the first backward",
    ):
        for p, m, v in shapes:
            wanted = [min(2 * (p - s - 1) + (v - 1) * p + 1, m * v) for s in range(p)]
            if v > 1:  # with one chunk other warm-ups are as good
                same(_peaks(answer(p, m, v)), wanted, f"live chunks ({p} stages, {m}, {v} chunks)")
    with report.property(BUBBLE, hint="warm up, then a forward and a backward in turn"):
        for p, m, v in shapes:
            makespan, _ = _play(answer(p, m, v))
            same(makespan, 3.0 * (v * m + p - 1), f"the time of {p} stages, {m}, {v} chunks")
    with report.property(
        "ValueError where the micro-batches do not divide by the stages",
        hint="groups of p micro-batches need m to be a multiple of p",
    ):
        refuses(answer, 4, 6, 2, what="6 micro-batches on 4 stages")
        refuses(answer, 3, 4, 2, what="4 micro-batches on 3 stages")


def _random_schedule(p: int, m: int, v: int, seed: int):
    """A schedule that runs: a random order among what is ready."""
    chooser = rng.Random(seed)
    schedule = [[] for _ in range(p)]
    done: set = set()
    todo = [(s, k, i, c) for s in range(p) for k in "FB" for i in range(m) for c in range(v)]
    while todo:
        ready = []
        for s, k, i, c in todo:
            block = c * p + s
            before = block - 1 if k == "F" else block + 1
            have = not 0 <= before < p * v or (k, i, before) in done
            if have and (k == "F" or ("F", i, block) in done):
                ready.append((s, k, i, c))
        s, k, i, c = chooser.choice(ready)
        todo.remove((s, k, i, c))
        done.add((k, i, c * p + s))
        schedule[s].append((k, i, c))
    return schedule


@check("simulate")
def simulate(answer, report):
    """A schedule against a clock."""
    cases = [
        (_random_schedule(p, m, v, seed), times)
        for seed, (p, m, v) in enumerate([(1, 2, 1), (3, 4, 1), (4, 3, 2), (2, 5, 3), (1, 3, 2)])
        for times in ((1.0, 2.0, 0.0), (1.5, 2.25, 0.75), (3.0, 1.0, 4.0))
    ]
    with report.property(
        "makespan and timeline are those of the dependencies",
        hint="an operation starts when its stage is free AND its input has arrived: the forward of "
        "the block before, for a backward that of the block after and its own forward; `send` "
        "counts between different ranks only",
    ):
        for schedule, (forward, backward, send) in cases:
            makespan, times = _play(schedule, forward, backward, send)
            result = answer(schedule, forward, backward, send)
            what = f"{len(schedule)} stages, F {forward}, B {backward}, send {send}"
            got = result["makespan"]
            expect(abs(got - makespan) < 1e-9, f"makespan is {got} for {what}, expected {makespan}")
            line = {tuple(op[:4]): tuple(op[4:]) for op in result["timeline"]}
            expect(len(result["timeline"]) == len(times), f"timeline misses operations for {what}")
            for op, (start, end) in times.items():
                expect(op in line, f"timeline has no (rank, kind, microbatch, chunk) = {op}")
                near = abs(line[op][0] - start) < 1e-9 and abs(line[op][1] - end) < 1e-9
                expect(near, f"{op} runs {line[op]} for {what}, expected {(start, end)}")
    with report.property(
        "leaves the schedule as it was",
        hint="count how far each stage has come; do not take operations out of its list",
    ):
        schedule = _random_schedule(3, 4, 1, 7)
        before = copy.deepcopy(schedule)
        answer(schedule)
        expect(schedule == before, "simulate changed the schedule that it was given", "kept")
    with report.property(
        "bubble is the idle share of all ranks' time, and peak_live counts started forwards",
        hint="1 - busy / (ranks * makespan); a micro-batch lives from its forward to its backward",
    ):
        for schedule, (forward, backward, send) in cases:
            makespan, _ = _play(schedule, forward, backward, send)
            result = answer(schedule, forward, backward, send)
            work = sum(forward if op[0] == "F" else backward for stage in schedule for op in stage)
            bubble = 1 - work / (len(schedule) * makespan)
            got = result["bubble"]
            expect(abs(got - bubble) < 1e-9, f"bubble is {got:.4f}, expected {bubble:.4f}")
            same(list(result["peak_live"]), _peaks(schedule), "peak_live")
    with report.property(
        "defaults: a forward takes 1, a backward 2, sending nothing",
        hint="see the signature in the exercise",
    ):
        schedule = _random_schedule(3, 4, 1, 7)
        same(answer(schedule)["makespan"], _play(schedule)[0], "makespan by default")
    with report.property(
        "ValueError for a schedule that deadlocks, or that misses or repeats work",
        hint="stop when no stage can go on; compare what each stage does with what it must do",
    ):
        late = [[("B", 0, 0), ("F", 0, 0)]]
        refuses(answer, late, what="a backward before its forward")
        cross = [
            [("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)],
            [("F", 1, 0), ("B", 1, 0), ("F", 0, 0), ("B", 0, 0)],
        ]
        refuses(answer, cross, what="stages that wait for each other")
        missing = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)], [("F", 0, 0), ("B", 0, 0)]]
        refuses(answer, missing, what="a stage that misses a micro-batch")
        twice = [[("F", 0, 0), ("F", 0, 0), ("B", 0, 0), ("B", 0, 0)]]
        refuses(answer, twice, what="a micro-batch done twice")
        forgotten = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0)] for _ in range(3)]
        refuses(answer, forgotten, what="a backward that every stage misses")


@check("bubble_fraction")
def bubble_fraction(answer, report):
    """The closed form."""
    with report.property(
        "(p-1) / (v m + p - 1), of the whole time",
        hint="the idle slots over ALL slots, not over the busy ones",
    ):
        for p, m in [(4, 8), (2, 3), (7, 5), (1, 4)]:
            for v in (1, 2, 5):
                got, expected = answer(p, m, v), (p - 1) / (v * m + p - 1)
                what = f"the bubble of {p} stages, {m} micro-batches, {v} chunks"
                expect(abs(got - expected) < 1e-12, f"{what} is {got}, expected {expected:.4f}")
    with report.property("one chunk is the default", hint="see the signature in the exercise"):
        expect(abs(answer(4, 8) - 3 / 11) < 1e-12, f"bubble_fraction(4, 8) is {answer(4, 8)}")


# ---- real stages


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


def _run(answer, schedule, m: int, group, size: int, rank: int):
    stage = _Stage(rank, size).to(device())
    for p in stage.parameters():
        p.grad = torch.ones_like(p)  # an earlier step's gradient must not be wiped
    xs, ys = _data(m)
    xs = [x.to(device()) for x in xs] if rank == 0 else None
    ys = [y.to(device()) for y in ys] if rank == size - 1 else None
    given = [] if xs is None else list(xs)
    before = [x.clone() for x in given]
    with calls.record() as log:
        loss = answer(stage, schedule, xs, ys, _loss, group)
    for i, (x, old) in enumerate(zip(given, before, strict=True)):
        expect(
            xs[i] is x and torch.equal(x, old) and not x.requires_grad,
            f"micro-batch {i} was changed: it is the caller's, and tokens can't require a gradient",
        )
    grads = [p.grad.detach().cpu() - 1 for p in stage.parameters()]
    value = None if loss is None else torch.as_tensor(loss).detach().cpu()
    peaks = stage.peak, stage.peak_outputs
    return grads, value, log, stage.forwards, peaks, stage.left()


def _pipelines(answer, kind: str):
    results = []
    for size, group, rank in last_ranks():
        m = 3 if kind == "flush" else 5
        if kind == "random":
            schedule = _random_schedule(size, m, 1, seed=size)
        else:
            schedule = (_flush if kind == "flush" else _steady)(size, m)
        results.append((size, m, rank, *_run(answer, schedule, m, group, size, rank)))
    return results


def _grown(answer) -> int:
    """Bytes that a second step leaves behind, when nothing of either is in use any more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    _run(answer, _steady(size, 5), 5, None, size, rank)
    before = held_bytes()
    _run(answer, _steady(size, 5), 5, None, size, rank)
    return held_bytes() - before


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
    return [stage.to(dtype) for stage in stages]


def _token_data(m: int):
    tokens = [torch.arange(4 + i) * 7 % 11 for i in range(m)]
    return tokens, [random(len(t), 6, seed=40 + i) for i, t in enumerate(tokens)]


def _token_loss(y, target):
    wide = torch.promote_types(y.dtype, target.dtype)
    return F.mse_loss(y.to(wide), target.to(wide))


def _of_tokens(answer):
    results = []
    for size, group, rank in last_ranks((1, 3)):
        for dtype in (torch.bfloat16, widest()):
            stage = _token_stages(size, dtype)[rank].to(device())
            tokens, targets = ([t.to(device()) for t in data] for data in _token_data(3))
            schedule = _steady(size, 3)
            mine = tokens if rank == 0 else None, targets if rank == size - 1 else None
            answer(stage, schedule, *mine, _token_loss, group)
            grads = [None if p.grad is None else p.grad.cpu() for p in stage.parameters()]
            results.append((size, rank, dtype, grads))
    return results


def _judge_tokens(values) -> None:
    for size, rank, dtype, grads in (result for results in values for result in results):
        stages = _token_stages(size, dtype)
        model = nn.Sequential(*stages)
        losses = [_token_loss(model(t), y) for t, y in zip(*_token_data(3), strict=True)]
        (sum(losses) / 3).backward()
        for got, p in zip(grads, stages[rank].parameters(), strict=True):
            where = f"stage {rank} of {size} in {str(dtype).removeprefix('torch.')}"
            expect(got is not None, f"a gradient of {where} is None", "none")
            close(got, p.grad, f"a gradient of {where}", PRECISE[dtype])


def _expected(size: int, m: int):
    """Gradients by stage and the loss of the unsplit model, in one process."""
    stages = [_Stage(i, size) for i in range(size)]
    xs, ys = _data(m)
    loss = sum(_loss(nn.Sequential(*stages)(x), y) for x, y in zip(xs, ys, strict=True)) / m
    loss.backward()
    return [[p.grad for p in stage.parameters()] for stage in stages], loss.detach()


def _judge_pipelines(values) -> None:
    for results in values:
        for size, m, rank, grads, loss, _, forwards, *_ in results:
            wanted, wanted_loss = _expected(size, m)
            where = f"stage {rank} of {size}"
            expect(forwards == m, f"{where} ran {forwards} forwards for {m} micro-batches")
            for got, want in zip(grads, wanted[rank], strict=True):
                close(got, want, f"a gradient of {where}")
            if rank == size - 1:
                expect(loss is not None, f"{where} returned None, expected the loss")
                close(loss.reshape(()), wanted_loss, f"the loss of {size} stages")
            else:
                expect(
                    loss is None, f"{where} returned {loss}, expected None: only the last has it"
                )


@check("run_pipeline")
def run_pipeline(answer, report):
    """Micro-batches through real stages."""
    values = steady = None
    with report.property(
        "loss and gradients equal the unsplit model's under GPipe's schedule, 1 to 4 stages",
        hint=hints(
            "the loss is the mean over micro-batches, so each one's gradient counts 1/m; run each "
            "forward once; add to .grad, don't replace it",
            raised="a stage's output may be strided, what is sent and received into must be "
            "contiguous; ranks of sends and receives are those of the group",
            hang="each send needs its receive, in the order in which the neighbour sends; pass "
            "group= and the group's ranks to both",
        ),
    ):
        values = report.ranks(_pipelines, 4, answer, "flush")
        _judge_pipelines(values)
    with report.property(
        "and under 1F1B",
        hint=hints(
            "follow the schedule's order, and keep input and output by micro-batch",
            hang="do not wait for a send before the next operation: the neighbour may be sending "
            "too",
        ),
    ):
        steady = report.ranks(_pipelines, 4, answer, "steady")
        _judge_pipelines(steady)
    with report.property(
        "and under any other order that can run",
        hint=hints(
            "the schedule says which micro-batch comes next; do not assume 0, 1, 2, …",
            hang="a message comes in the order of the neighbour's schedule, which is not yours: "
            "keep what comes early until its turn",
        ),
    ):
        _judge_pipelines(report.ranks(_pipelines, 4, answer, "random"))
    with report.property(
        "with token ids as input and two-dimensional bf16 or float64 activations between stages",
        hint="integers can't require a gradient: only what a stage has received needs one; shape "
        "and dtype of the receive buffer are those of what the stage before sends, in a header",
    ):
        _judge_tokens(report.ranks(_of_tokens, 4, answer))
    with report.property(
        "under 1F1B stage s holds p - s micro-batches' activations, and none at the end",
        hint="drop a micro-batch's input and output when its backward is done, and what was sent "
        "when the step is",
    ):
        for results in steady or report.ranks(_pipelines, 4, answer, "steady"):
            for size, m, rank, *_, (peak, outputs), left in results:
                most, where = min(size - rank, m), f"stage {rank} of {size}"
                expect(peak <= most, f"{where} held {peak} micro-batches, expected {most}")
                # a variable may still name the output whose backward was the last
                said = f"{where} held {outputs} outputs, expected {most} and that of the last one"
                expect(outputs <= most + 1, said)
                expect(left == 0, f"{where} still holds {left} at the end")
        for rank, grown in enumerate(report.ranks(_grown, 4, answer)):
            expect(grown <= 0, f"stage {rank} of 4 still holds {grown} bytes after the step")
    with report.property(
        "each boundary carries m activations forward and m gradients back, point to point",
        hint="a stage talks to its neighbours only; the shape may travel in one small message",
    ):
        for results in values or report.ranks(_pipelines, 4, answer, "flush"):
            for size, m, rank, _, _, log, *_ in results:
                forward = sum(x[..., 0].numel() for x in _data(m)[0]) * 4
                widths = [5 + 2 * i for i in range(size)] + [3]
                payload = forward * widths[rank + 1] if rank < size - 1 else 0
                payload += forward * widths[rank] if rank else 0
                count, sent = total(log, "send")
                directions = (rank < size - 1) + (rank > 0)
                small = 128 * m * directions  # room for the header of each message
                where = f"stage {rank} of {size}"
                expect(
                    payload <= sent <= payload + small,
                    f"{where} sent {sent} bytes, expected {payload} and small headers",
                )
                moved = sum(c.nbytes for c in log if c.op not in ("send", "recv"))
                expect(moved <= 256, f"{where} moved {moved} bytes by collectives")
                # Dimensions, sizes and the activation itself may travel in a message each.
                expect(count <= 3 * m * directions, f"{where} sent {count} messages")


# ---- tied embeddings


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
