# %% [markdown]
# # 23 · Pipeline parallel
#
# After this chapter you can
# - cut a model by layers over ranks and train it, point to point, with the gradients of the whole,
# - read and write a schedule: GPipe, 1F1B, interleaved, zero bubble,
# - predict the bubble, the live activations and the bytes of each, and measure all three,
# - recognise a pipeline that waits for itself, and tied embeddings that drift apart.
#
# Time: 60 minutes to read, two to three hours for the lab. Needs chapters 12, 13, 21 and 22.
#
# Letters: p stages, counted by s from 0, one on each rank; a batch in m micro-batches; v chunks of the
# model on a rank. The model has L layers; a micro-batch is B sequences of S tokens, width D, and the
# vocabulary has V words.

# %%
import shardbook as sb

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from shardbook import calls, plot
from shardbook.memory import storage_bytes
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
    marked,
    Recomputed,
    Saved,
    idle_share,
    in_order,
    split_lm,
    virtual_trace,
)
from shardbook.studies.zero_bubble import SPLIT, torch_order
from shardbook.tracing import merge

WORLD = 4

# %% [markdown]
# ## What breaks without it?
#
# Tensor parallelism (chapter 22) cuts every layer and pays with all-reduces of the activations in
# *every* layer, on the critical path. That is fine inside a server, on the links of chapter 13. Is
# there a cut that sends less, for the slower links between servers?
#
# Cut *between* layers. A rank has some consecutive ones, a **stage**, and passes its output on:

# %%
draw_stages([["embed", "0", "1"], ["2", "3"], ["4", "5"], ["6", "7", "head"]])
plt.show()


# %% [markdown]
# Here is what one step of an eight-layer version of the small model holds and sends on four ranks
# (B=8, S=64, D=64, fp32): weights with gradients and Adam's moments, and the bytes one rank puts on
# the wire. An all-reduce of n bytes over P ranks sends `2 (P-1)/P n` with a ring.


# %%
def held_and_sent(kind):
    """(bytes of state, bytes sent) of this rank for one step."""
    from shardbook.studies.tensor_lm import parallel_token_loss, tensor_parallel_

    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm(num_layers=8).to(sb.device())
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch=8))
    with calls.record() as log:
        if kind == "pipeline":
            model = split_lm(model, world)[rank]
            schedule = one_f_one_b(world, 8)
            run_pipeline(model, schedule, tokens.split(1), targets.split(1), token_loss)
        else:
            model = tensor_parallel_(model)
            parallel_token_loss(model(tokens), targets).backward()
    reduced = sum(c.nbytes for c in log if c.op == "all_reduce")
    sent = sum(c.nbytes for c in log if c.op == "send" and c.dtype.is_floating_point)
    return 4 * storage_bytes(model.parameters()), sent + 2 * (world - 1) * reduced // world


whole = 4 * storage_bytes(tiny_lm(num_layers=8).parameters())
print(f"one process          state {whole:>9,} bytes")
for kind in ("tensor", "pipeline"):
    found = sb.run(held_and_sent, kind, world_size=WORLD).values
    state, sent = (max(f[i] for f in found) for i in (0, 1))
    print(f"{kind:8} parallel    state {state:>9,} bytes    sent {sent:>9,} bytes   (largest rank)")

# %% [markdown]
# The same memory for a fraction of the bytes, and no collective at all: only neighbours talk. The
# price is time. Let the stages work one after the other on one batch, as a model too large for one
# device is often run first.
#
# From here on we want the *time* of four devices, and this machine may have two cores. So time is
# counted, on a **virtual clock**. Ranks, messages and gradients are real; a kernel has the length that
# we say, here 1 for a forward and 2 for a backward. Each message carries the time at which its sender
# had it, in its header. A kernel starts at the later of its rank's own time and the arrival of its
# newest message. No machine is too slow or too busy for such a clock, and whatever it shows says
# "virtual".


# %%
def on_the_clock(schedule, forward=1.0, backward=2.0, message=0.0):
    """One step of the eight-layer model: this rank's kernels, (rank, kind, i, block, start, end)."""
    rank, p = dist.get_rank(), dist.get_world_size()
    m, v = 1 + max(i for _, i, _ in schedule[0]), 1 + max(c for _, _, c in schedule[0])
    blocks = split_lm(tiny_lm(num_layers=8), p * v)
    chunks = [blocks[c * p + rank].to(sb.device()) for c in range(v)]
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=m, seq=8))
    with virtual_clock(rank, {"F": forward, "B": backward}, message) as clock:
        run_interleaved(chunks, schedule, tokens, targets, token_loss)
    return clock.kernels


def measured(schedule, *times):
    """The kernels of all ranks, by start."""
    return in_order(sb.run(on_the_clock, schedule, *times, world_size=len(schedule)).values)


timeline = measured(gpipe(WORLD, 1))
print(f"idle: {100 * idle_share(timeline):.0f} % of all ranks' time (virtual)")
draw_schedules({"one batch through four real ranks (virtual)": timeline})
plt.show()

# %% [markdown]
# One rank works, three wait: with p stages in one row, 1 - 1/p of the devices' time is idle, three
# quarters here. The idle time is called the **bubble**.
#
# ## GPipe: micro-batches
#
# Cut the batch into m **micro-batches** and send them one after the other. While stage 1 has the
# first, stage 0 begins the second. [GPipe](https://arxiv.org/abs/1811.06965) runs all forwards, then
# all backwards, and the optimizer steps when all are done: gradients are those of the whole batch.
# (The paper also *rematerialises*: a stage keeps its inputs only and computes the rest again in
# backward. We come to that beside 1F1B.)
#
# A schedule is data: for each stage the list of ("F" or "B", micro-batch, chunk). The simulator
# plays it against a clock: an operation starts once its rank is free and its input has arrived.

# %%
print("stage 0 of gpipe(2, 3):", gpipe(2, 3)[0])
draw_schedules(
    {
        f"micro-batches: {m}, bubble {simulate(gpipe(4, m))['bubble']:.0%} (simulated)": simulate(
            gpipe(4, m), forward=8 / m, backward=16 / m
        )["timeline"]
        for m in (1, 2, 8)
    }
)
plt.show()

# %% [markdown]
# The picture gives the closed form. The last stage is idle while p-1 forwards reach it, and again
# while p-1 backwards leave: (p-1) slots of forward and backward. It works m of them. So the bubble
# is **(p-1)/(m+p-1)** of the time, whatever the ratio of forward to backward.
#
# Mind the denominator when you compare figures. This book divides idle time by *all* the time. Others
# divide it by the time of the work alone, without the bubble: **(p-1)/m** in Megatron-LM's papers and
# on the page of the zero-bubble schedules. For p=4 and m=8 that is 0.375 where we say 0.273.
#
# Predict it for 4 stages and 8 micro-batches; then four real ranks run the schedule.

# %% predict="predicted"
predicted = (4 - 1) / (8 + 4 - 1)

# %%
timeline = measured(gpipe(WORLD, 8))
bubble = idle_share(timeline)
sb.predict("bubble of four real ranks (virtual)", predicted, bubble)
print(
    f"idle time over all the time {bubble:.3f}, over the time of the work {bubble / (1 - bubble):.3f}"
)

# %% [markdown]
# The clock on real ranks and the closed form agree to the last digit, and will on any machine: that
# is a statement about the schedule. The closed form knows no messages: where they take time, the
# clock agrees with the simulator only, as we shall see.
#
# A large m makes the bubble small. Three things limit it: the batch has an end; small micro-batches
# make small, inefficient matrix products; and memory.
#
# ## 1F1B: the same bubble, less memory
#
# Under GPipe a stage keeps the activations of all m micro-batches until the first backward arrives.
# **One forward, one backward** starts backwards as soon as it can. The order is
# [PipeDream](https://arxiv.org/abs/1806.03377)'s, which never stops to empty the pipe and computes
# with weights of several ages. With one optimizer step after all micro-batches, as here and in most
# frameworks, it is [PipeDream-Flush](https://arxiv.org/abs/2006.09503) or
# [DAPPLE](https://arxiv.org/abs/2007.01045).
#
# Stage s runs p-s-1 forwards to fill the pipe, then one of each in turn. It can never have more than **p-s** micro-batches alive, however many there are.

# %%
draw_schedules(
    {
        "GPipe (simulated)": simulate(gpipe(4, 8))["timeline"],
        "1F1B (simulated)": simulate(one_f_one_b(4, 8))["timeline"],
    }
)
plt.show()

# %% [markdown]
# Predict the most micro-batches alive on ranks 0 to 3, p=4 and m=8. Then we let autograd tell: each
# tensor that it saves for backward is wrapped in something that notices when it is let go.

# %% predict="alive_gpipe alive_1f1b"
alive_gpipe = [8, 8, 8, 8]  # m on every stage
alive_1f1b = [4, 3, 2, 1]  # p - s


# %%
def peak_of_a_step(schedule, recompute=False):
    """The most bytes that autograd kept on this rank for backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    m = 1 + max(i for _, i, _ in schedule[rank])
    stage = split_lm(tiny_lm(num_layers=4), world)[rank].to(sb.device())
    data = [counting_batch(i, batch=1) for i in range(m)]
    tokens, targets = zip(*[(x.to(sb.device()), y.to(sb.device())) for x, y in data], strict=True)
    saved = Saved(stage)
    with saved.hooks:
        run_pipeline(
            Recomputed(stage) if recompute else stage, schedule, tokens, targets, token_loss
        )
    return saved.peak


def peaks():
    one = peak_of_a_step(gpipe(WORLD, 1))
    ways = [(make, again) for again in (False, True) for make in (gpipe, one_f_one_b)]
    return [round(peak_of_a_step(make(WORLD, 8), again) / one, 2) for make, again in ways]


alive = list(zip(*sb.run(peaks, world_size=WORLD).values, strict=True))  # way, rank
sb.predict("GPipe, micro-batches alive by rank", alive_gpipe, list(alive[0]))
sb.predict("1F1B, micro-batches alive by rank", alive_1f1b, list(alive[1]))

# %% [markdown]
# The first stage pays most, and it has the embedding as well: memory of a pipeline is uneven. If
# even p-s micro-batches are too many, **recompute**: keep a micro-batch's input only, and run the
# forward again when its backward comes. That is GPipe as published. A backward then takes 3
# instead of 2.

# %%
print("                     time (virtual)   kept on the fullest rank, in micro-batches")
for name, kept, make, backward in (
    ("GPipe", alive[0], gpipe, 2.0),
    ("GPipe, recomputed", alive[2], gpipe, 3.0),
    ("1F1B", alive[1], one_f_one_b, 2.0),
    ("1F1B, recomputed", alive[3], one_f_one_b, 3.0),
):
    end = measured(make(WORLD, 8), 1.0, backward)[-1][5]
    print(f"{name:20} {end:10.0f}        {f'{max(kept):.0f}' if max(kept) > 2 else 'below 2'}")
assert max(alive[2]) < max(alive[1]), "GPipe with recomputation keeps less than 1F1B without"

# %% [markdown]
# Recomputation beats 1F1B on memory, on the fullest rank, and takes a third more time. (One micro-batch is always
# there whole, while its backward runs; the last rank has the logits of the loss beside it, which are
# outside its stage and kept.) The two combine.
#
# ## Interleaved: several chunks on a rank
#
# The pipe fills in p-1 *slots*. Make slots shorter: give each rank v **chunks** of L/(pv) layers
# instead of one of L/p ([Megatron-LM](https://arxiv.org/abs/2104.04473)), chunk c of rank s being
# block cp+s. A micro-batch goes round the ranks v times. The bubble shrinks to
# **(p-1)/(vm+p-1)** of all the time, (p-1)/(vm) of the work. Paler boxes are the second chunk; a chunk
# takes half the time.

# %%
pale = simulate(interleaved(4, 8, 2), forward=0.5, backward=1.0)
draw_schedules(
    {
        "1F1B (simulated)": simulate(one_f_one_b(4, 8))["timeline"],
        "interleaved, 2 chunks per rank (simulated)": pale["timeline"],
    }
)
plt.show()
print("chunks alive by rank:", pale["peak_live"], "of half the size;  1F1B:", alive_1f1b)

# %% [markdown]
# Live chunks are 2(p-s-1)+(v-1)p+1, more memory than 1F1B. And each of the pv-1 boundaries is a
# message, where 1F1B has p-1: more than v times as many bytes. With a latency of a fifth of a forward for a message:

# %%
for v, schedule in ((1, one_f_one_b(4, 8)), (2, interleaved(4, 8, 2)), (4, interleaved(4, 8, 4))):
    free, slow = (
        simulate(schedule, forward=1 / v, backward=2 / v, send=send)["makespan"]
        for send in (0.0, 0.2)
    )
    print(f"chunks a rank: {v}, bubble {bubble_fraction(4, 8, v):.3f}, ", end="")
    print(f"time {free:.1f} with free messages, {slow:.1f} with slow ones (simulated)")

# %% [markdown]
# With slow messages four chunks are worse than two: the bubble shrinks with v, the messages on the
# critical path grow with it.
#
# Now all three on real ranks, with messages for free and with messages of 0.2 (a chunk's forward of
# the interleaved schedule takes 0.5). Measured equals simulated, since both follow the same two
# rules; the ranks follow them by real messages. 1F1B's bubble is GPipe's as long as messages are
# free. When they are not, it is larger: in its steady state ranks wait again and again for
# messages, which go both ways, where GPipe sends all activations one way and then all gradients the other.

# %%
print("bubble (virtual)   closed form   measured   with messages of 0.2")
ways = {"GPipe": (gpipe(WORLD, 8), 1), "1F1B": (one_f_one_b(WORLD, 8), 1)}
ways["interleaved"] = interleaved(WORLD, 8, 2), 2
timelines = {}
for name, (schedule, v) in ways.items():
    times = 1 / v, 2 / v
    free, slow = measured(schedule, *times), measured(schedule, *times, 0.2)
    closed = bubble_fraction(WORLD, 8, v)
    timelines[name] = slow
    print(f"{name:18} {closed:11.3f} {idle_share(free):10.3f} {idle_share(slow):12.3f}")
    assert abs(idle_share(free) - closed) < 1e-9, "on any machine"
    assert abs(idle_share(slow) - simulate(schedule, *times, send=0.2)["bubble"]) < 1e-9
assert idle_share(timelines["1F1B"]) > idle_share(timelines["GPipe"])

# %% [markdown]
# The trace of 1F1B *is* the Gantt chart of the schedule. Find where the last rank waits for its first
# micro-batch, the gaps in the steady state (each as long as two messages), and the end of the pipeline on rank 0.

# %% tags=["nbval-ignore-output"]
virtual_trace(timelines["1F1B"], "1F1B on four real ranks")

# %% [markdown]
# And once in **real time**: the same schedule, larger micro-batches, no clock. On as many cores as
# this machine has, four ranks take turns, a kernel is as long as its core lets it be, and a message
# needs its process to wake up. The order of operations is the schedule's; the lengths and the gaps
# are the machine's. Where your ranks have a device each, this is the trace to look at.


# %% tags=["nbval-ignore-output"]
def in_real_time(schedule):
    stage = split_lm(tiny_lm(num_layers=4), dist.get_world_size())[dist.get_rank()].to(sb.device())
    tokens, targets = (t.to(sb.device()).split(4) for t in counting_batch(0, batch=16))
    run_pipeline(stage, schedule, tokens, targets, token_loss)  # connects, warms up
    dist.barrier()
    with sb.trace() as t:
        run_pipeline(marked(stage), schedule, tokens, targets, token_loss)
    return t


merge(sb.run(in_real_time, one_f_one_b(WORLD, 4), world_size=WORLD).values, title="1F1B, real time")

# %% [markdown]
# ## How many bytes?
#
# Each boundary carries, for each of m micro-batches, an activation `[B, S, D]` one way and its
# gradient the other. Predict for the small model with p=4, m=8, B=1, S=64, D=64, fp32: what does a
# rank in the middle send? And what does rank 1 of *two* ranks with two chunks each send?

# %% predict="middle looped"
middle = 2 * 8 * 1 * 64 * 64 * 4  # m activations to the right, m gradients to the left
# Blocks 1 and 3 of 0..3: block 1 sends activations on, blocks 1 and 3 send gradients back.
looped = 3 * 8 * 1 * 64 * 64 * 4


# %%
def bytes_sent(num_chunks):
    rank, p = dist.get_rank(), dist.get_world_size()
    blocks = split_lm(tiny_lm(num_layers=4).to(sb.device()), p * num_chunks)
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=8))
    mine = [blocks[c * p + rank] for c in range(num_chunks)]
    schedule = interleaved(p, 8, num_chunks)
    with calls.record() as log:
        run_interleaved(mine, schedule, tokens, targets, token_loss)
    return sum(c.nbytes for c in log if c.op == "send" and c.dtype.is_floating_point)


sb.predict("bytes a middle rank of four sends", middle, sb.run(bytes_sent, 1).values[1])
sb.predict("bytes rank 1 of two sends", looped, sb.run(bytes_sent, 2, world_size=2).values[1])

# %% [markdown]
# The number of layers is not in it. That is why pipelines go between servers. (The runner sends a
# small header of the shape before each message, not counted here; frameworks fix the shape once.)
#
# ## Zero bubble: cut the backward pass
#
# A linear layer's backward has two parts: the gradient of its **input** (I), which the stage before
# waits for, and that of its **weight** (W), which nobody waits for until the optimizer's step.

# %%
torch.manual_seed(0)
linear, x = nn.Linear(6, 4), torch.randn(5, 6, requires_grad=True)
y = linear(x)
grad = torch.randn_like(y)
(input_grad,) = torch.autograd.grad(y, x, grad, retain_graph=True)  # I: pass it on at once
(weight_grad,) = torch.autograd.grad(y, linear.weight, grad)  # W: whenever there is time
linear.zero_grad()
linear(x).backward(grad)
print("I and W apart are backward:", torch.allclose(x.grad, input_grad), end=", ")
print(torch.allclose(linear.weight.grad, weight_grad))

# %% [markdown]
# Run I early and fill the bubble with W ([zero bubble](https://arxiv.org/abs/2401.10241); the authors
# call the two parts B and W, so their B is our I, and our B is the whole backward). PyTorch has such
# schedules. We take the order of operations from PyTorch itself and run it on real ranks: F, I and
# W take 1 each, so a full backward takes 2. All but 1F1B have two chunks on a rank. In the last two,
# the chunks lie in a **V**: rank 0 has the first and the last block, so the loss is where the data
# is, and a micro-batch turns round on the last rank without a message.


# %%
def zero_bubble(orders):
    """This rank's kernels under each order, and whether its gradients are the whole model's."""
    rank, found = dist.get_rank(), {}
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch=8, seq=8))
    whole = tiny_lm(num_layers=8).to(sb.device())
    token_loss(whole(tokens), targets).backward()
    expected = [p.grad for p in whole.parameters()]
    for name, order in orders.items():
        model, last = tiny_lm(num_layers=8).to(sb.device()), max(b for o in order for *_, b in o)
        parts = split_lm(model, last + 1)
        mine = {block: parts[block] for *_, block in order[rank]}
        wide = 2.0 if last == 3 else 1.0  # 1F1B has one stage where the others have two chunks
        with virtual_clock(rank, {kind: wide * t for kind, t in SPLIT.items()}) as clock:
            run_blocks(mine, order, tokens.split(1), targets.split(1), token_loss)
        grads = zip(model.parameters(), expected, strict=True)
        ok = all(p.grad is None or torch.allclose(p.grad, g, atol=1e-5) for p, g in grads)
        found[name] = clock.kernels, ok
    return found


orders = {"1F1B": by_block(one_f_one_b(4, 8)), "interleaved": by_block(interleaved(4, 8, 2))}
for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
    orders[name] = torch_order(name, 4, 8)
ranks = sb.run(zero_bubble, orders, world_size=WORLD).values
played = {name: in_order(rank[name][0] for rank in ranks) for name in orders}
print("on real ranks (virtual)  time  bubble  gradients  alive by rank (halves of a stage)")
for name, timeline in played.items():
    ok = all(rank[name][1] for rank in ranks)
    halves = [n * (2 if name == "1F1B" else 1) for n in play(orders[name], SPLIT)["peak_live"]]
    end = max(op[5] for op in timeline)
    print(f"{name:23}{end:6.0f}{idle_share(timeline):8.3f}  right: {ok}  {halves}")

# %%
draw_schedules({f"{name} (virtual)": t for name, t in list(played.items())[2:4]})
plt.show()

# %% [markdown]
# - A bubble of 0.059 is left: every rank is idle for 3 slots of 51. Under ZBV they lie before its first
#   micro-batch comes or after its last one, while others finish; under the other two a rank waits
#   in between as well. The slots at the ends vanish only if a stage may start the next
#   step while another still works on this one, so the optimizer must not synchronise the
#   stages: no norm of all gradients before the update. The authors step first and check afterwards,
#   rolling back the rare step that was wrong (*post-validation*,
#   [their repository](https://github.com/sail-sg/zero-bubble-pipeline-parallelism)).
# - The zero-bubble orders hold as much on every rank, no more (ZBV) or little more (DualPipeV) than
#   1F1B holds on rank 0. In the V this comes about by itself: the rank with the oldest activations
#   of the first chunk has the youngest of the second.
# - [DualPipe](https://arxiv.org/abs/2412.19437) pairs a forward with a backward so that the
#   all-to-all of one hides behind the arithmetic of the other. Our clock runs such a pair one after
#   the other, so it shows the order and not that gain.
# - F = I = W is an assumption. It fits a linear layer. The products inside attention have no weights:
#   all of their backward is I, nothing is W. The longer the sequence, the more of the time is
#   attention, and the bubble opens again. Change the costs:

# %%
print("bubble (simulated)     ", "  ".join(f"I={i:.1f} W={3 - i - 1:.1f}" for i in (1.0, 1.3, 1.6)))
for name in ("interleaved", "InterleavedZeroBubble", "ZBVZeroBubble"):
    costs = [{"F": 1.0, "I": i, "W": 2 - i, "B": 2.0} for i in (1.0, 1.3, 1.6)]
    print(f"{name:22} ", "        ".join(f"{play(orders[name], c)['bubble']:.3f}" for c in costs))

# %% [markdown]
# ## The loss curves coincide
#
# The small model of this book (two layers), four ranks: embedding, layer, layer, head. 30 steps of
# the counting task, a batch of 8 in 4 micro-batches.


# %%
def losses(strategy, tied=None, steps=30):
    """Loss by step on the last rank. tied: None, "summed" or "forgotten"."""
    rank, p = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    if tied:
        model.embed.weight = model.head.weight  # one Parameter, until it is cut
    v = 2 if strategy == "interleaved" else 1
    stages = split_lm(model, p * v) if strategy else [model]
    chunks = nn.ModuleList(stages[c * p + rank] for c in range(v))
    first = model.embed.weight if rank == 0 else None
    last = model.head.weight if rank == p - 1 else None
    make = {"GPipe": gpipe, "1F1B": one_f_one_b, "interleaved": lambda p, m: interleaved(p, m, 2)}
    optimizer, curve = torch.optim.AdamW(chunks.parameters(), lr=3e-3), []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step, batch=8))
        optimizer.zero_grad()
        if strategy:
            parts = tokens.split(2), targets.split(2)
            loss = run_interleaved(chunks, make[strategy](p, 4), *parts, token_loss)
        else:
            loss = token_loss(model(tokens), targets)
            loss.backward()
        if tied == "summed":
            sync_tied_embeddings_(first, last)
        optimizer.step()
        curve.append(None if loss is None else loss.item())
    weights = [None if w is None else w.detach().cpu() for w in (first, last)]
    return curve, weights


def several(strategies, tied=None):
    return {s: losses(s, tied) for s in strategies}


alone = sb.run(losses, None, world_size=1).values[0][0]
curves = {"one process": alone}
found = sb.run(several, ["GPipe", "1F1B"], world_size=4).values[3]
found |= sb.run(several, ["interleaved"], world_size=2).values[1]
curves |= {name: curve for name, (curve, _) in found.items()}
plot.curves(curves, "step", "loss", "four ways, one curve")
plt.show()
for name, curve in curves.items():
    worst = max(abs(a - b) for a, b in zip(curve, alone, strict=True))
    print(f"{name:12} loss {curve[0]:.2f} -> {curve[-1]:.2f}, on the curve of one: {worst < 1e-3}")

# %% [markdown]
# ## Tied embeddings
#
# Many models use the embedding's weight as the head's. One process has one Parameter, and autograd
# adds up both uses. In a pipeline the first and the last stage each have a *copy*. Each gets the
# gradient of its own use, and each optimizer goes its own way. No error appears; the model is simply
# not tied any more. Does the loss tell?

# %%
one = sb.run(losses, None, "forgotten", world_size=1).values[0]  # one Parameter: nothing to sum
tied_alone = one[0]
curves = {"one process, tied": tied_alone}
for tied in ("summed", "forgotten"):
    ranks = sb.run(losses, "1F1B", tied, world_size=4).values
    curves["gradients " + tied] = ranks[3][0]
    apart = (ranks[0][1][0] - ranks[3][1][1]).abs().max().item()
    worst = max(abs(a - b) for a, b in zip(ranks[3][0], tied_alone, strict=True))
    print(f"gradients {tied:9}  copies differ by {apart:.2f}, ", end="")
    print(f"loss at the end {ranks[3][0][-1]:.2f}, on the curve of one process: {worst < 1e-3}")
plot.curves(curves, "step", "loss")
plt.show()

# %% [markdown]
# It does not: a model with two matrices has more freedom and learns this task as fast. Whoever loads
# the checkpoint as a tied model gets one of the two copies, and loses what the other has learned.
#
# The gradients have to be *summed* over the two ranks, before clipping and before the step. The
# gradient itself travels between these two only; an all-reduce over the whole pipeline would make the
# ranks between carry it. (Ours finds the two by asking all ranks of the pipeline, a small
# `all_gather_object`, in every step. A framework builds the pair's group once.)
#
# With data parallelism there are two sums, and their order matters once gradients are sharded. Some
# frameworks reduce-scattered over the data-parallel ranks first; the embedding and the head lie at
# different places of their stage's flat buffer, so the shards that were then added did not belong
# together ([Megatron-LM#844](https://github.com/NVIDIA/Megatron-LM/issues/844)).
#
# ## A failure to provoke: everyone sends
#
# The runner above never waits for a send. Replace `isend` by `send`, which comes back when the other
# side has received, and run 1F1B with two stages. Its steady state is one forward and one backward
# in turn. Who sends to whom at that moment?


# %%
def blocking_1f1b():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x, grad = torch.randn(2, 5, 8).to(sb.device())
    for kind, _, _ in one_f_one_b(last + 1, 4)[rank]:
        if kind == "F":
            if rank > 0:
                dist.recv(x, rank - 1)
            if rank < last:
                dist.send(x, rank + 1)  # the next activation
        else:
            if rank < last:
                dist.recv(grad, rank + 1)
            if rank > 0:
                dist.send(grad, rank - 1)  # the first gradient


try:
    sb.run(blocking_1f1b, world_size=2, timeout=30, echo=False)
except sb.RankError as error:
    print(error)
    print("hung:", error.hung)

# %% [markdown]
# Rank 0 offers the activation of its second micro-batch and will only then receive a gradient. Rank
# 1 offers the gradient of the first and will only then receive an activation. The schedule is right,
# the simulator plays it; what hangs is the *order of messages*, which is not in the schedule. Three
# remedies: `isend` and go on (and keep the tensor alive until the send is done), hand a send and a
# receive over together with `batch_isend_irecv`, or let even ranks send first and odd ranks receive
# first.
#
# Public reports: a pipeline that waits in SEND on both sides
# ([pytorch#172668](https://github.com/pytorch/pytorch/issues/172668)); with two ranks the next and
# the previous rank are the same, and activations are taken for gradients
# ([Megatron-LM#1450](https://github.com/NVIDIA/Megatron-LM/issues/1450), and the reason why our
# interleaved runner takes a rank's messages in the order in which *it* sends); a fixed order in the
# exchange of *shapes*
# ([Megatron-LM#5100](https://github.com/NVIDIA/Megatron-LM/issues/5100)).
#
# Two more traps:
#
# - **Wiped gradients.** A step must add to `.grad`. A library that re-initialised its stages whenever
#   the sequence length changed cleared gradients in between; only the last part of an accumulated
#   batch trained, and the loss, which is summed apart, looked fine
#   ([Automodel#3530](https://github.com/NVIDIA-NeMo/Automodel/pull/3530); the norm of the gradients showed it).
# - **The gap in the list is not the bubble.** PyTorch pads its lists with `None` to draw them. Count
#   those and you get a wrong bubble: simulate.
#
# ## Beside PyTorch's own
#
# The same four stages under `torch.distributed.pipelining`. We compare loss and gradients, the
# floating-point bytes that rank 1 sends, and on rank 1 the most micro-batches whose activations were
# alive at once.


# %%
def beside(strategy):
    """(loss, gradients, bytes sent, peak bytes saved) of the second of two steps."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    part = split_lm(tiny_lm(num_layers=4), world)[rank].to(sb.device())
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch=8))
    if strategy.startswith("torch"):
        make = ScheduleGPipe if "GPipe" in strategy else Schedule1F1B
        stage = PipelineStage(part, rank, world, sb.device())
        schedule = make(stage, n_microbatches=8, loss_fn=token_loss)
    else:
        schedule = (gpipe if "GPipe" in strategy else one_f_one_b)(world, 8)
    for _ in range(2):  # PyTorch's first step exchanges shapes
        part.zero_grad()
        saved, losses = Saved(part), []
        with calls.record() as log, saved.hooks:
            if not strategy.startswith("torch"):
                parts = [t.clone() for t in tokens.split(1)], targets.split(1)
                loss = run_pipeline(part, schedule, *parts, token_loss)
            elif rank == 0:
                schedule.step(tokens)
            elif rank == world - 1:
                schedule.step(target=targets, losses=losses)
                loss = torch.stack(losses).mean()
            else:
                schedule.step()
    sent = sum(c.nbytes for c in log if c.op == "send" and c.dtype.is_floating_point)
    grads = torch.cat([p.grad.flatten() for p in part.parameters()]).cpu()
    return loss.item() if rank == world - 1 else None, grads, sent, saved.peak


def all_beside(strategies):
    one = peak_of_a_step(gpipe(WORLD, 1))
    return [
        (loss, g, sent, round(peak / one, 1)) for loss, g, sent, peak in map(beside, strategies)
    ]


strategies = ["GPipe", "torch GPipe", "1F1B", "torch 1F1B"]
by_rank = sb.run(all_beside, strategies, world_size=WORLD).values
for i, name in enumerate(strategies):
    off = max((rank[i][1] - rank[0][1]).abs().max().item() for rank in by_rank)
    print(f"{name:12} rank 1 sent {by_rank[1][i][2]:,} bytes, alive {by_rank[1][i][3]}", end="")
    print(
        f", loss and gradients as ours: {off < 1e-5 and abs(by_rank[3][i][0] - by_rank[3][0][0]) < 1e-5}"
    )

# %% [markdown]
# ## On a real cluster
#
# - **Where the cut goes.** Tensor parallel inside a server (HCCS, NVLink), pipeline between servers
#   (RDMA over RoCE or InfiniBand), data parallel around both. A boundary message is `B S D` elements;
#   with tensor parallelism inside the stage, each of its ranks needs to send only its own part of it.
# - **NPU and HCCL.** Point-to-point goes through `dist.batch_isend_irecv` with HCCL as with NCCL, and
#   runs on a stream: a `send` returns before the data has left, so the deadlock above appears at the
#   next synchronisation, as a timeout (`HCCL_EXEC_TIMEOUT`) and not in the line that caused it.
#   Sends and receives of one pair of ranks share a communicator and run in the order they were
#   given. The `isend` of this chapter keeps its tensor; there it also must not be overwritten.
# - **CUDA and NCCL.** The first unbatched send between two ranks creates a communicator for the pair,
#   and creating these in different orders on different ranks can hang by itself
#   ([Megatron-LM#5240](https://github.com/NVIDIA/Megatron-LM/pull/5240)). Warm each pair up once, or
#   use the batched form.
# - **Balance.** The slowest stage sets the pace. The head's matrix of `D x V` can cost as much as
#   several layers, and the first stage has the most activations. Give the ends fewer layers.
# - **Batch.** The bubble wants m well above p; the global batch is m x B x the data-parallel size.
#
# Published figures, to set beside ours:
#
# | what | figure | source |
# |---|---|---|
# | interleaving | throughput over 10 % higher at comparable memory | Megatron-LM, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473) |
# | tensor x pipeline x data, a model of 1T parameters | 502 PFLOP/s on 3072 GPUs, 52 % of peak each | the same |
# | zero bubble | up to 23 % over 1F1B at similar memory, 31 % with more | [arXiv 2401.10241](https://arxiv.org/abs/2401.10241) |
#
# Ours above, on the virtual clock for p=4, m=8: 1F1B takes 66 where interleaving takes 57 (16 % more
# throughput) and the zero-bubble orders 51 (29 %), with messages for free and equal costs. On a
# cluster they are not.
#
# Now write it: [the lab](../labs/23_pipeline_parallel.ipynb). Then
# [chapter 24](24_context_parallel.ipynb) cuts the sequence.
