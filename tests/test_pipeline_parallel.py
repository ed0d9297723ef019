"""Pipelines beyond the checks: PyTorch's own orders and schedules, bubbles kept by a clock."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.parallel.clock import virtual_clock
from shardbook.parallel.interleaved import run_blocks, run_interleaved
from shardbook.parallel.pipeline import run_pipeline, sync_tied_embeddings_
from shardbook.parallel.schedules import (
    bubble_fraction,
    by_block,
    gpipe,
    interleaved,
    one_f_one_b,
    play,
    simulate,
)
from shardbook.pictures.pipeline import draw_schedules, draw_stages
from shardbook.studies.pipeline_lm import (
    Recomputed,
    Saved,
    Stage,
    idle_share,
    in_order,
    marked,
    split_lm,
    timed,
    virtual_trace,
)
from shardbook.studies.zero_bubble import SPLIT, torch_order
from shardbook.tracing import merge

OURS = {"GPipe": gpipe, "1F1B": one_f_one_b, "Interleaved1F1B": lambda p, m: interleaved(p, m, 2)}


# ---- schedules against PyTorch's own


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("p, m", [(4, 8), (2, 4), (3, 6)])
def test_time_and_memory_are_those_of_pytorchs_order(name, p, m):
    ours, theirs = play(by_block(OURS[name](p, m)), SPLIT), play(torch_order(name, p, m), SPLIT)
    assert ours["makespan"] == theirs["makespan"]
    assert ours["peak_live"] == theirs["peak_live"]
    assert simulate(OURS[name](p, m))["makespan"] == ours["makespan"]


def test_order_is_pytorchs():
    assert by_block(one_f_one_b(4, 8)) == torch_order("1F1B", 4, 8)
    assert by_block(interleaved(4, 8, 2)) == torch_order("Interleaved1F1B", 4, 8)


@pytest.mark.parametrize(
    "name, makespan, bubble, live",
    [
        ("GPipe", 33, 0.2727, [8, 8, 8, 8]),
        ("1F1B", 33, 0.2727, [4, 3, 2, 1]),
        ("Interleaved1F1B", 57, 0.1579, [11, 9, 7, 5]),
        ("InterleavedZeroBubble", 51, 0.0588, [8, 8, 8, 8]),
        ("ZBVZeroBubble", 51, 0.0588, [8, 8, 8, 8]),
        ("DualPipeV", 51, 0.0588, [9, 9, 9, 9]),
    ],
)
def test_pytorchs_orders_on_our_clock(name, makespan, bubble, live):
    played = play(torch_order(name, 4, 8), SPLIT)
    assert played["makespan"] == makespan
    assert played["bubble"] == pytest.approx(bubble, abs=1e-4)
    assert played["peak_live"] == live
    work = {  # every micro-batch's forward, and both parts of its backward, once a block
        (part, i, block)
        for _, kind, i, block, _, _ in played["timeline"]
        for part in {"F": "F", "B": "IW"}.get(kind, kind)
    }
    blocks = 4 if name in ("GPipe", "1F1B") else 8
    assert work == {(k, i, b) for k in "FIW" for i in range(8) for b in range(blocks)}


@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(1, 6),
    rounds=st.integers(1, 4),
    v=st.integers(1, 4),
    forward=st.sampled_from([1.0, 2.5]),
    backward=st.sampled_from([1.0, 2.0, 3.5]),
)
def test_closed_forms(p, rounds, v, forward, backward):
    m = p * rounds
    for schedule, chunks in ((gpipe(p, m), 1), (one_f_one_b(p, m), 1), (interleaved(p, m, v), v)):
        result = simulate(schedule, forward, backward)
        assert result["makespan"] == (chunks * m + p - 1) * (forward + backward)
        assert result["bubble"] == pytest.approx(bubble_fraction(p, m, chunks))
        late = simulate(schedule, forward, backward, send=0.5)["makespan"]
        assert late >= result["makespan"]


def test_play_refuses_a_deadlock():
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 at \('W', 0, 0\)"):
        play([[("F", 0, 0), ("W", 0, 0), ("I", 0, 0)]], SPLIT)


# ---- real ranks


def chunks_of(num_chunks, num_layers=4):
    rank, p = dist.get_rank(), dist.get_world_size()
    blocks = split_lm(tiny_lm(num_layers=num_layers), p * num_chunks)
    return torch.nn.ModuleList(blocks[c * p + rank] for c in range(num_chunks)).to(sb.device())


ORDERS = {name: by_block(make(4, 8)) for name, make in OURS.items()} | {
    name: torch_order(name, 4, 8)
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
CLOSED = {"GPipe": 3 / 11, "1F1B": 3 / 11, "Interleaved1F1B": 3 / 19}  # else 3 of 51 slots


def on_the_clock(message):
    """By order: this rank's kernels, and the gradients of its blocks."""
    rank, found = dist.get_rank(), {}
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=8, seq=8))
    for name, order in ORDERS.items():
        parts = split_lm(tiny_lm(num_layers=8), 1 + max(b for ops in order for *_, b in ops))
        mine = {block: parts[block].to(sb.device()) for *_, block in order[rank]}
        with virtual_clock(rank, SPLIT, message) as clock:
            run_blocks(mine, order, tokens, targets, token_loss)
        grads = {b: [q.grad.cpu() for q in part.parameters()] for b, part in mine.items()}
        found[name] = clock.kernels, grads
    return found


@pytest.mark.parametrize("message", [0.0, 0.25])
def test_measured_bubble_is_the_closed_form(message):
    """On any machine, however busy: real messages carry the time, and real gradients."""
    model = tiny_lm(num_layers=8)
    tokens, targets = counting_batch(0, batch=8, seq=8)
    token_loss(model(tokens), targets).backward()
    ranks = sb.run(on_the_clock, message, world_size=4).values
    for name, order in ORDERS.items():
        timeline = in_order(rank[name][0] for rank in ranks)
        assert timeline == play(order, SPLIT, message)["timeline"], name
        if not message:
            assert idle_share(timeline) == pytest.approx(CLOSED.get(name, 3 / 51), abs=1e-9)
        parts = split_lm(model, 1 + max(b for ops in order for *_, b in ops))
        held = [item for rank in ranks for item in rank[name][1].items()]
        assert sorted(block for block, _ in held) == list(range(len(parts)))
        for block, grads in held:
            for got, q in zip(grads, parts[block].parameters(), strict=True):
                assert torch.allclose(got, q.grad, atol=1e-5), (name, block)


def timed_pipeline(wrap):
    rank, p = dist.get_rank(), dist.get_world_size()
    stage = split_lm(tiny_lm(num_layers=4), p)[rank].to(sb.device())
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=4, seq=8))
    with virtual_clock(rank, {"F": 1.5, "B": 2.5}, 0.125) as clock:
        run_pipeline(wrap(stage), one_f_one_b(p, 4), tokens, targets, token_loss)
    assert [q.grad for q in stage.parameters()] != [None] * len(list(stage.parameters()))
    return clock.kernels


def test_run_pipeline_carries_the_time_without_knowing_it():
    timeline = in_order(sb.run(timed_pipeline, timed, world_size=3).values)
    assert timeline == simulate(one_f_one_b(3, 4), 1.5, 2.5, send=0.125)["timeline"]
    trace = virtual_trace(timeline, "1F1B")
    assert "virtual time" in repr(trace)
    assert "rank 2 (virtual)" in str(trace.chrome())
    names = [e["name"] for e in trace.chrome()["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert names == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


def test_a_trace_of_real_time_names_forwards_and_backwards():
    trace = merge(sb.run(traced_pipeline, world_size=2).values)
    names = [e["name"] for e in trace.chrome()["traceEvents"] if e.get("cat") == "mark"]
    assert sorted(names) == sorted([f"{kind}{i}" for kind in "FB" for i in range(2)] * 2)


def traced_pipeline():
    stage = chunks_of(1, num_layers=2)[0]
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=2, seq=8))
    with sb.trace() as t:
        run_pipeline(marked(stage), gpipe(2, 2), tokens, targets, token_loss)
    return t


def recomputed(again):
    stage = chunks_of(1)[0]
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=4, seq=16))
    saved = Saved(stage)
    with saved.hooks:
        run = Recomputed(stage) if again else stage
        loss = run_pipeline(run, gpipe(2, 4), tokens, targets, token_loss)
    grads = [q.grad.cpu() for q in stage.parameters()]
    return None if loss is None else loss.item(), grads, saved.peak


def test_recomputation_keeps_inputs_and_gives_the_same_gradients():
    kept, again = (sb.run(recomputed, way, world_size=2).values for way in (False, True))
    for (loss, grads, peak), (same, others, less) in zip(kept, again, strict=True):
        assert loss == same
        assert less < 0.5 * peak
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, others, strict=True))


BATCH = {"batch": 8, "seq": 16}  # in four micro-batches


def step(strategy, num_chunks=1):
    """(loss, gradients by parameter, bytes of floats sent) of this rank."""
    rank, p = dist.get_rank(), dist.get_world_size()
    chunks = chunks_of(num_chunks)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, **BATCH))
    if strategy in OURS:
        make = OURS[strategy] if num_chunks == 1 else lambda p, m: interleaved(p, m, num_chunks)
        args = make(p, 4), tokens.split(2), targets.split(2), token_loss
        with calls.record() as log:
            if num_chunks == 1:
                loss = run_pipeline(chunks[0], *args)
            else:
                loss = run_interleaved(chunks, *args)
    else:
        from torch.distributed import pipelining

        stages = [
            pipelining.PipelineStage(chunk, c * p + rank, p * num_chunks, sb.device())
            for c, chunk in enumerate(chunks)
        ]
        make = getattr(pipelining, strategy)
        schedule = make(stages if num_chunks > 1 else stages[0], 4, loss_fn=token_loss)
        for _ in range(2):  # the first step exchanges shapes
            chunks.zero_grad()
            losses = []
            with calls.record() as log:
                inputs = (tokens,) if rank == 0 else ()
                last = {"target": targets, "losses": losses} if rank == p - 1 else {}
                schedule.step(*inputs, **last)
        loss = torch.stack(losses).mean() if losses else None
    sent = sum(c.nbytes for c in log if c.op == "send" and c.dtype.is_floating_point)
    grads = [q.grad.cpu() for q in chunks.parameters()]
    return None if loss is None else loss.item(), grads, sent


def all_steps(cases):
    return [step(*case) for case in cases]


@pytest.mark.parametrize(
    "p, cases",
    [
        (4, [("GPipe",), ("1F1B",), ("ScheduleGPipe",), ("Schedule1F1B",)]),
        (2, [("Interleaved1F1B", 2), ("ScheduleInterleaved1F1B", 2)]),
        (1, [("Interleaved1F1B", 2), ("1F1B",)]),
    ],
)
def test_steps_equal_one_process_and_pytorchs(p, cases):
    model = tiny_lm(num_layers=4)
    tokens, targets = counting_batch(0, **BATCH)
    loss = token_loss(model(tokens), targets)
    loss.backward()
    for rank, found in enumerate(sb.run(all_steps, cases, world_size=p).values):
        for case, (got, grads, sent) in zip(cases, found, strict=True):
            v = case[1] if len(case) > 1 else 1
            own = [c * p + rank for c in range(v)]  # blocks
            blocks = split_lm(model, p * v)
            wanted = [q.grad for block in own for q in blocks[block].parameters()]
            for g, w in zip(grads, wanted, strict=True):
                assert torch.allclose(g, w, atol=1e-5), case  # sums in another order
            assert (got is None) == (rank != p - 1)
            if got is not None:
                assert got == pytest.approx(loss.item(), abs=1e-5)
            # An activation to every block after, a gradient to every block before: m b s h each.
            boundaries = sum((b < p * v - 1) + (b > 0) for b in own) if p > 1 else 0
            assert sent == boundaries * 4 * 2 * 16 * 64 * 4, case


def frozen_start(interleaved):
    rank, p = dist.get_rank(), dist.get_world_size()
    part = split_lm(tiny_lm(), p)[rank].to(sb.device()).requires_grad_(rank > 0)
    tokens, targets = (t.to(sb.device()).split(2) for t in counting_batch(0, **BATCH))
    if interleaved:
        run_interleaved([part], one_f_one_b(p, 4), tokens, targets, token_loss)
    else:
        run_pipeline(part, one_f_one_b(p, 4), tokens, targets, token_loss)
    return [None if q.grad is None else q.grad.cpu() for q in part.parameters()]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_first_stage_may_be_frozen(interleaved):
    model = tiny_lm()
    tokens, targets = counting_batch(0, **BATCH)
    token_loss(model(tokens), targets).backward()
    first, second = sb.run(frozen_start, interleaved, world_size=2).values
    assert all(g is None for g in first)
    for got, q in zip(second, split_lm(model, 2)[1].parameters(), strict=True):
        assert torch.allclose(got, q.grad, atol=1e-5)  # sums in another order


def refused():
    stage, messages = chunks_of(1, num_layers=2)[0], []
    for call in (
        lambda: run_pipeline(stage, gpipe(3, 2), None, None, token_loss),
        lambda: run_interleaved([stage], gpipe(3, 2), None, None, token_loss),
        lambda: run_interleaved([stage, stage], gpipe(2, 2), None, None, token_loss),
    ):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_schedule_that_does_not_fit_is_refused():
    wrong = "the schedule has 3 stages, expected one a rank (2)"
    chunks = "the schedule does not use the 2 chunks of rank 0"
    assert sb.run(refused, world_size=2).values[0] == [wrong, wrong, chunks]


def tied_training(summed):
    """Losses and both copies' weights after five steps with one weight at both ends."""
    rank, p = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    model.embed.weight = model.head.weight
    part, losses = split_lm(model, p)[rank], []
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)
    first = model.embed.weight if rank == 0 else None
    last = model.head.weight if rank == p - 1 else None
    for i in range(5):
        tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(i, batch=4))
        optimizer.zero_grad()
        loss = run_pipeline(part, one_f_one_b(p, 4), tokens, targets, token_loss)
        if summed:
            sync_tied_embeddings_(first, last)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    held = first if first is not None else last
    return losses, None if held is None else held.detach().cpu()


def test_tied_embeddings_stay_tied():
    alone, weight = sb.run(tied_training, True, world_size=1).values[0]
    ranks = sb.run(tied_training, True, world_size=4).values
    assert ranks[3][0] == pytest.approx(alone, abs=1e-4)  # five steps of SGD
    assert torch.equal(ranks[0][1], ranks[3][1])
    assert torch.allclose(ranks[0][1], weight, atol=1e-5)
    apart = sb.run(tied_training, False, world_size=4).values
    assert (apart[0][1] - apart[3][1]).abs().max() > 1e-3, "without the sum they drift apart"


def strided_tied_gradient():
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.zeros(3, 2, device=sb.device()))
    weight.grad = torch.arange(6.0, device=sb.device()).view(2, 3).t() * (1 + rank)
    sync_tied_embeddings_(*((weight, None) if rank == 0 else (None, weight)))
    return weight.grad.cpu()


def test_tied_gradients_may_be_strided():
    for grad in sb.run(strided_tied_gradient, world_size=2).values:
        assert torch.equal(grad, 3 * torch.arange(6.0).view(2, 3).t())


# ---- stages and pictures


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_stages_compose_to_the_model(stages):
    model = tiny_lm(num_layers=4)
    tokens = counting_batch(0, seq=9)[0]
    parts = split_lm(model, stages)
    assert torch.equal(torch.nn.Sequential(*parts)(tokens), model(tokens))
    held = [p for part in parts for p in part.parameters()]
    assert len(held) == len(list(model.parameters())), "each parameter in one stage"
    assert all(isinstance(part, Stage) for part in parts)


def test_stages_that_do_not_fit():
    for stages in (0, 5, 7):
        with pytest.raises(ValueError, match=f"4 blocks do not make {stages} stages"):
            split_lm(tiny_lm(num_layers=4), stages)


def test_pictures_draw_every_operation():
    timeline = simulate(interleaved(2, 4, 2))["timeline"]
    fig = draw_schedules(
        {"a": timeline, "b": play(torch_order("ZBVZeroBubble", 2, 4), SPLIT)["timeline"]}
    )
    assert len(fig.axes[0].collections) == len(timeline)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["a", "b"]
    labels = [t.get_text() for t in draw_stages([["embed"], ["head"]]).axes[0].texts]
    assert {"embed", "head", "rank 0", "rank 1", "[B, S, D]"} <= set(labels)


# ---- what a stage may give


class Wide(torch.nn.Module):
    """7 dimensions out of 2, and back."""

    def __init__(self, opens: bool):
        super().__init__()
        self.opens, self.linear = opens, torch.nn.Linear(8, 8)

    def forward(self, x):
        if self.opens:
            return self.linear(x).reshape(-1, 1, 2, 1, 2, 1, 2)
        return self.linear(x.flatten(1))


class Ids(torch.nn.Module):
    """Whole numbers, such as tokens' ids or quantised values."""

    def forward(self, x):
        return (x * 10).to(torch.int8)


class Embed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, ids):
        return ids.float() * self.weight


def activations_of(dtypes: str, looped: bool):
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if dtypes == "wide":
        stages = [Wide(True), Wide(False)] * 2 if looped else [Wide(True), Wide(False)]
    else:
        stages = [torch.nn.Linear(8, 8), Ids(), Embed(), torch.nn.Linear(8, 8)]
        stages = stages if looped else [torch.nn.Sequential(*stages[:2]), stages[2:][0]]
    stages = [s.to(sb.device()) for s in stages]
    xs = [torch.randn(3, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    xs = [x.to(sb.device()) for x in xs]

    def loss_fn(y, target):
        return (y - target).square().mean()

    whole = torch.nn.Sequential(*stages)
    expected = sum(loss_fn(whole(x), x) for x in xs) / len(xs)
    expected.backward()
    grads = [None if q.grad is None else q.grad.clone() for q in whole.parameters()]
    whole.zero_grad()
    with calls.record() as log:
        if looped:
            mine = stages[rank::p]
            loss = run_interleaved(mine, interleaved(p, 4, 2), xs, xs, loss_fn)
        else:
            mine = [stages[rank]]
            loss = run_pipeline(mine[0], one_f_one_b(p, 4), xs, xs, loss_fn)
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach())
    held = {id(q) for stage in mine for q in stage.parameters()}
    for q, grad in zip(whole.parameters(), grads, strict=True):
        if id(q) in held and grad is not None:
            torch.testing.assert_close(q.grad, grad)
        elif id(q) in held:
            assert q.grad is None or not q.grad.any()
    return max([c.nbytes for c in log if c.dtype == torch.int64], default=0)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtypes", ["wide", "whole numbers"])
def test_an_activation_of_seven_dimensions_or_of_whole_numbers(dtypes, looped):
    assert max(sb.run(activations_of, dtypes, looped, world_size=2).values) <= 128


class Deep(torch.nn.Module):
    def forward(self, x):
        return x.reshape(*[1] * 13, -1)


def fourteen_dimensions():
    xs = [torch.ones(2, device=sb.device(), requires_grad=True)]
    run_pipeline(Deep(), gpipe(2, 1), xs, xs, lambda y, t: y.sum())


def test_an_activation_that_cannot_be_announced_is_named():
    with pytest.raises(sb.RankError, match="14 dimensions: a pipeline can announce up to 13"):
        sb.run(fourteen_dimensions, world_size=2)
