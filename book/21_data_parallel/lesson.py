# %% [markdown]
# # 21 · Data parallel and ZeRO
#
# After this chapter you can
# - average gradients over ranks, in buckets, while backward is still running,
# - say what each rank holds and sends at ZeRO stage 0, 1, 2 and 3, in bytes per parameter, and
#   measure it,
# - write a sharded AdamW and a fully sharded module, and compare them with PyTorch's,
# - recognise a mean of means, and say why a larger batch stops helping.
#
# Time: 50 minutes to read, 3 hours for the lab. Needs chapters 11 to 13.
#
# P is the number of ranks, here and in the chapters that follow.

# %%
import shardbook as sb

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from shardbook import calls, plot
from shardbook.memory import held_bytes
from shardbook.studies import checkpointing
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss

WORLD = 4
PARAMS = sum(p.numel() for p in tiny_lm().parameters())
print(f"the small model has {PARAMS:,} parameters")

# %% [markdown]
# ## What breaks without it?
#
# Two things grow, and one device has neither the time nor the room for them. Measured on the small
# model:
#
# - **The batch.** Activations kept for backward, and FLOPs, grow with the number of sequences.
# - **The state.** A parameter needs its gradient and two moments of Adam beside it, whatever the
#   batch.


# %% tags=["nbval-ignore-output"]
def saved_for_backward(batch):
    """Bytes that autograd keeps between forward and backward, parameters not counted."""
    model = tiny_lm().to(sb.device())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, batch=batch))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = token_loss(model(tokens), targets)
    return sum(kept.values()), loss


for batch in (2, 8, 32):
    print(f"{batch:3} sequences: {saved_for_backward(batch)[0] / 2**20:5.1f} MiB of activations")


# %%
def state_bytes():
    before = held_bytes()
    model = tiny_lm().to(sb.device())
    optimizer = torch.optim.AdamW(model.parameters())
    token_loss(
        model(counting_batch(0)[0].to(sb.device())), counting_batch(0)[1].to(sb.device())
    ).backward()
    optimizer.step()
    return held_bytes() - before


print(f"whatever the batch: {state_bytes() / PARAMS:.1f} bytes per parameter of state in fp32")

# %% [markdown]
# 4 bytes of parameter, 4 of gradient, 8 of moments. A model of 7 billion parameters needs 112 GB of
# that, before the first activation; an Ascend 910B has 64 GB, an A100 has 40 or 80. So two cures:
# **data parallel** cuts the batch, **ZeRO** cuts the state.

# %% [markdown]
# ## Which tensor is cut?
#
# Each small square is a rank's memory: full colour where the rank holds all of a tensor, a quarter
# where it holds its part. Below each picture stands what the stage sends.


# %%
def who_holds_what():
    fig, axes = plot.figure(9, 3.1, columns=4)
    rows = ["batch", "parameters", "gradients", "optimizer state"]
    cut_from = {"batch": 0, "parameters": 3, "gradients": 2, "optimizer state": 1}
    titles = ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)"]
    pays = [
        "all-reduce of gradients",
        "reduce-scatter gradients,\nall-gather parameters",
        "reduce-scatter gradients,\nall-gather parameters",
        "all-gather parameters twice,\nreduce-scatter gradients",
    ]
    for stage, ax in enumerate(axes):
        for row, name in enumerate(rows):
            for rank in range(4):
                x, y = 1.15 * rank, -1.15 * row
                ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor="#eeeeee"))
                colour = plot.COLOURS[row]
                if stage >= cut_from[name]:
                    ax.add_patch(
                        plt.Rectangle((x, y + 0.75 - 0.25 * rank), 1, 0.25, facecolor=colour)
                    )
                else:
                    ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour))
            if stage == 0:
                ax.text(-0.25, y + 0.5, name, ha="right", va="center")
        for rank in range(4):
            ax.text(1.15 * rank + 0.5, 1.2, str(rank), ha="center", fontsize=9, color="#555555")
        ax.set(xlim=(-0.1, 4.55), ylim=(-5.1, 1.6), title=titles[stage], aspect="equal")
        ax.text(2.2, -3.75, pays[stage], ha="center", va="top", fontsize=9)
        ax.axis("off")
    return fig


who_holds_what()
plt.show()

# %% [markdown]
# ## Without averaging, ranks become different models
#
# Four ranks start with equal parameters and each takes two of the eight sequences of a batch. After
# five steps, how far apart are they, and how far from one process that saw all eight?


# %%
def five_steps(average):
    """Parameters of this rank after five steps on its part of the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        tokens, targets = counting_batch(step, batch=8)
        mine = slice(8 // world * rank, 8 // world * (rank + 1))
        optimizer.zero_grad()
        token_loss(model(tokens[mine].to(sb.device())), targets[mine].to(sb.device())).backward()
        if average:
            for p in model.parameters():  # naive: one all-reduce per parameter
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


alone = sb.run(five_steps, True, world_size=1).values[0]
for average in (False, True):
    ranks = sb.run(five_steps, average, world_size=WORLD).values
    apart = max((r - ranks[0]).abs().max().item() for r in ranks)
    off = max((r - alone).abs().max().item() for r in ranks)
    print(f"averaged: {average!s:5}  ranks differ by {apart:.3f}", end="")
    print(f", equal to one process within 1e-5: {off < 1e-5}")

# %% [markdown]
# The mean over ranks of means over equal parts is the mean over the batch, so averaged gradients
# are the gradients of the whole batch: data parallel changes no number of the training, only
# rounding. Keep the word *equal* in mind.
#
# ## What does it cost?
#
# An all-reduce of every gradient. Predict the bytes first: what a rank hands to all-reduce each
# step, and what it must put on the wire with the ring of chapter 13.

# %% predict="handed sent"
handed = 4 * PARAMS  # every fp32 gradient once
sent = 2 * (WORLD - 1) / WORLD * handed  # ring: reduce-scatter, then all-gather

# %%
from shardbook.basics.collectives import ring_all_reduce
from shardbook.parallel.data import BucketedDataParallel, average_gradients_


def bytes_of_a_step(strategy, bucket_bytes=25_000_000):
    """The collectives of the second step on this rank, and how many began before backward ended."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    wrapped = BucketedDataParallel(model, bucket_bytes) if strategy == "bucketed" else model
    for step in range(2):
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, 8))
        model.zero_grad()
        ended = []
        with calls.record() as log:
            loss = token_loss(wrapped(tokens), targets)
            # The embedding is the first layer, so its gradient is the last thing backward computes.
            model.embed.weight.register_hook(lambda g, at=ended, log=log: at.append(len(log)))
            loss.backward()
            if strategy == "naive":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            elif strategy == "one flat tensor":
                average_gradients_(model)
            else:
                wrapped.finish()
    gradients = [c for c in log if c.dtype.is_floating_point]
    return len(gradients), sum(c.nbytes for c in gradients), ended[0]


def bytes_on_the_ring():
    """Bytes of the messages of chapter 13's ring, for gradients as one flat tensor."""
    with calls.record() as log:
        ring_all_reduce(torch.zeros(PARAMS, device=sb.device()))
    return sum(c.nbytes for c in log if c.op == "send")


measured = sb.run(bytes_of_a_step, "naive", world_size=WORLD).values[0]
sb.predict("bytes a rank hands to all-reduce", handed, measured[1])
sb.predict("bytes a rank sends, ring", sent, sb.run(bytes_on_the_ring, world_size=WORLD).values[0])

# %% [markdown]
# ## Fewer messages, and earlier
#
# Each message costs a latency, however small it is. And nothing forces us to wait for the whole
# backward pass: the gradients of the last layer are complete when backward has hardly begun. So
# collect gradients into **buckets**, from the last layer to the first, and start a bucket's
# all-reduce, asynchronously, as soon as it is full. Overlap is visible in the order of events, which
# no loaded machine can blur: how many all-reduces have begun when backward reaches the first layer?

# %%
cases = [
    ("naive", None),
    ("one flat tensor", None),
    ("bucketed", 25_000_000),
    ("bucketed", 100_000),
    ("bucketed", 20_000),
]


def all_cases():
    return [bytes_of_a_step(strategy, size or 1) for strategy, size in cases]


print("                        messages      bytes   begun before backward ended")
found = sb.run(all_cases, world_size=WORLD).values[0]
for (strategy, size), (count, nbytes, early) in zip(cases, found, strict=True):
    label = f"{strategy} {size:,}" if size else strategy
    print(f"{label:22} {count:9} {nbytes:10,} {early:10}")

# %% [markdown]
# The bytes stay the same. With one bucket of 25 MB this small model has nothing to overlap: its only
# bucket is full when backward is over. With buckets of 100 kB, all but the last leave on the way.
# (PyTorch's buckets are 25 MiB, except the first: it is 1 MiB, so that overlap starts early.)
#
# Here is the trace of two ranks and two steps. It begins with 28 broadcasts: the constructor gives
# every rank the parameters of rank 0. In each step, find the all-reduces that lie under the backward
# slice, and the last bucket, which nothing hides. The table below the trace counts 14 all-reduces and
# not 12: besides its six buckets, `finish()` reduces one integer per parameter, by which the ranks
# agree on the parameters that nobody used. It is small in bytes, but it comes last and waits for the
# slowest rank, so its slice can be the longest of all.


# %% tags=["nbval-ignore-output"]
def traced_step():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = BucketedDataParallel(tiny_lm().to(sb.device()), bucket_bytes=100_000)
    tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(0, 8))
    for _ in range(2):
        with sb.mark("forward and backward"):
            token_loss(model(tokens), targets).backward()
        with sb.mark("finish"):
            model.finish()


result = sb.run(traced_step, world_size=2, trace=True)
result.trace

# %% tags=["nbval-ignore-output"]
print(result.trace.comm())

# %% [markdown]
# Two traps of the overlap:
#
# - **Order.** Collectives are matched by their order. A rank that runs another branch of the model
#   fills its buckets in another order; start them in a fixed order all the same, or ranks add up
#   different layers.
# - **Unused parameters.** A bucket that waits for a gradient that never comes is never sent, and the
#   other ranks wait for ever. `finish()` sends zeros for what is missing.
#
# ### Accumulating micro-batches
#
# A batch that does not fit is computed in micro-batches whose gradients add up. Averaging each of
# them is right and wasteful: `no_sync()` keeps them on the rank until the last.
#
# Ours reads its flag when a gradient arrives, so `no_sync()` around the backward alone is enough
# below. PyTorch's DDP decides in the *forward* whether the next backward will reduce: under DDP, put
# the forward into the block as well, `with model.no_sync(): loss_fn(model(x), y).backward()`. With
# the forward outside, every micro-batch is all-reduced all the same. The mistake has a mirror image:
# a walk-through of GPT-2 set DDP's flag after the last forward, so that the step that should have
# reduced did not, and the loss was visibly worse
# ([build-nanogpt#30](https://github.com/karpathy/build-nanogpt/pull/30)).


# %%
def accumulated(use_no_sync, micro=4):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = BucketedDataParallel(tiny_lm().to(sb.device()))
    tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(0, 32))
    with calls.record() as log:
        for i, (x, y) in enumerate(zip(tokens.chunk(micro), targets.chunk(micro), strict=True)):
            loss = token_loss(model(x), y) / micro  # the mean over micro-batches, not the sum
            if use_no_sync and i < micro - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
                model.finish()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
    return grads, sum(c.nbytes for c in log if c.dtype.is_floating_point)


whole = tiny_lm()
token_loss(whole(counting_batch(0, 32)[0]), counting_batch(0, 32)[1]).backward()
expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
for use_no_sync in (False, True):
    grads, nbytes = sb.run(accumulated, use_no_sync, world_size=WORLD).values[0]
    same = (grads - expected).abs().max().item() < 1e-5
    print(
        f"no_sync: {use_no_sync!s:5}  {nbytes / PARAMS:4.1f} bytes per parameter, gradient of the whole batch: {same}"
    )

# %% [markdown]
# Forget the division by the number of micro-batches and the gradient is four times too large, which
# Adam hides (but for its epsilon it does not see the scale) and clipping does not: the threshold is
# silently a quarter of what you wrote ([nanoGPT#168](https://github.com/karpathy/nanoGPT/issues/168)).
#
# ## A failure to provoke: the mean of means
#
# Sequences differ in length, and padding gives no loss. Let rank *r* have only every (*r*+1)-th
# token to learn from. Each rank computes the mean loss of *its* tokens and the gradients are
# averaged as before.


# %%
def unequal(normalise):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    tokens, targets = counting_batch(0, 8)
    for row in range(8):
        keep = torch.arange(64) % (row // 2 + 1) == 0  # rows 0, 1 are rank 0's, 2, 3 rank 1's …
        targets[row, ~keep] = -100  # cross_entropy ignores these
    mine = slice(8 // world * rank, 8 // world * (rank + 1))
    tokens, targets = tokens[mine].to(sb.device()), targets[mine].to(sb.device())
    loss = token_loss(model(tokens), targets)  # the mean over my tokens
    if normalise:
        count = (targets != -100).sum()
        everyone = count.clone()
        dist.all_reduce(everyone)
        loss = (
            loss * count / everyone * world
        )  # so that the mean over ranks is the mean over tokens
    loss.backward()
    average_gradients_(model)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
    return grads, int((targets != -100).sum())


alone, _ = sb.run(unequal, False, world_size=1).values[0]
for normalise in (False, True):
    values = sb.run(unequal, normalise, world_size=WORLD).values
    error = (values[0][0] - alone).norm() / alone.norm()
    print(
        f"tokens per rank {[n for _, n in values]}, normalised by all tokens: {normalise!s:5}",
        end="",
    )
    print(f"  gradient off by {100 * error.item():.0f} %")

# %% [markdown]
# Nothing crashes, and every token of rank 3 weighs four times as much as one of
# rank 0. The same happens between micro-batches. The cure is to divide by the number of tokens of
# *all* ranks, which costs an all-reduce of one number. Trainers keep meeting this one
# ([prime-rl#2562](https://github.com/PrimeIntellect-ai/prime-rl/pull/2562): first its supervised trainer,
# then its reinforcement trainer, came to one all-reduced count).
#
# ## ZeRO: after the reduce-scatter, a rank needs its part only
#
# An all-reduce is a reduce-scatter followed by an all-gather. In between, a rank holds the sum of
# 1/P of the gradients. Update 1/P of the parameters there, and gather *those* instead of the
# gradients: the same bytes, and the optimizer state exists once instead of P times. That is stage 1.
# Let gradients go as soon as they are reduced (stage 2), and parameters as soon as they are used
# (stage 3).
#
# Mixed precision as in the ZeRO paper: 16-bit parameters and gradients (2 + 2 bytes), and in fp32 a
# master copy and two moments (12). It is one recipe of several. Megatron-LM's distributed optimizer
# keeps 16-bit parameters and *fp32* gradients on every rank and cuts the rest: 18 bytes per parameter
# become 6 + 12/P
# ([its documentation](https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html)).
# PyTorch's `fully_shard` keeps what you gave it, usually fp32 shards, computes in a `param_dtype` and
# reduces in a `reduce_dtype` of its own. Here are the stages of the paper, step by step;
# `held_bytes()` counts the tensors that are alive after backward.

# %%
from shardbook.parallel.flat import all_gather_flat, flatten_padded, reduce_scatter_mean, shard_flat
from shardbook.parallel.zero import FullySharded, training_memory


def fully_sharded(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullySharded(block)
    return FullySharded(model)  # what is left: embedding, norm, head


def mixed_precision(stage):
    """Bytes per parameter on this rank after backward, at a ZeRO stage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before = held_bytes()
    model = tiny_lm().to(sb.device(), torch.bfloat16)
    model = fully_sharded(model) if stage == 3 else model
    params = list(model.parameters())
    cut = stage in (1, 2)  # at stage 3 what is in params is a shard already

    master = [(shard_flat([p]) if cut else p.detach().clone()).float() for p in params]
    m, v = [torch.zeros_like(w) for w in master], [torch.zeros_like(w) for w in master]

    arrived = {}  # stage 2: my part of the mean gradient, all that is left of it

    def reduce_and_forget(p):
        arrived[p] = reduce_scatter_mean(flatten_padded([p.grad], world))
        p.grad = None

    for p in params if stage == 2 else []:
        p.register_post_accumulate_grad_hook(reduce_and_forget)

    for step in range(1, 3):
        tokens, targets = (
            t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, 12, seq=16)
        )
        token_loss(model(tokens), targets).backward()
        del tokens, targets
        held = held_bytes() - before if step == 2 else 0  # the moments exist from step 1 on
        if stage == 0:
            average_gradients_(model)
        for i, p in enumerate(params):
            g = arrived.pop(p) if stage == 2 else p.grad
            if stage == 1:
                g = reduce_scatter_mean(flatten_padded([g], world))
            g = g.float()
            m[i].lerp_(g, 0.1)
            v[i].lerp_(g * g, 0.001)
            scale = (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
            master[i] -= 1e-3 * scale * m[i] / (v[i].sqrt() + 1e-8)
            new = master[i].bfloat16()
            if cut:
                new = all_gather_flat(new)[: p.numel()].view_as(p)
            p.detach().copy_(new)
        model.zero_grad()
        del g, new
    return held / PARAMS


def all_stages():
    return [mixed_precision(stage) for stage in range(4)]


held = {world: sb.run(all_stages, world_size=world).values[0] for world in (1, 2, 3, 4)}

# %% predict="predicted"
predicted = [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]  # bytes per parameter on 4 ranks, stages 0 to 3

# %%
print("bytes per parameter      " + "".join(f"   stage {stage}" for stage in range(4)))
for world, row in held.items():
    print(f"{world} rank{'s' * (world > 1):1} measured       " + "".join(f"{x:10.2f}" for x in row))
print("4 ranks predicted      " + "".join(f"{x:10.2f}" for x in predicted))
agree = all(abs(a - b) / b < 0.01 for a, b in zip(held[4], predicted, strict=True))
print("measured and predicted agree within 1 %:", agree)


# %%
def memory_curves(held):
    fig, (ax,) = plot.figure(7, 3.6)
    worlds = [1, 2, 3, 4, 8, 16, 32, 64]
    names = ["data parallel: 16", "ZeRO-1: 4 + 12/P", "ZeRO-2: 2 + 14/P", "ZeRO-3: 16/P"]
    for stage, name in enumerate(names):
        total = [sum(training_memory(PARAMS, n, stage).values()) / PARAMS for n in worlds]
        ax.plot(worlds, total, color=plot.COLOURS[stage], label=name)
        ax.plot(list(held), [row[stage] for row in held.values()], "o", color=plot.COLOURS[stage])
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds, worlds)
    ax.set(xlabel="ranks P", ylabel="bytes per parameter", ylim=(0, 17.5))
    ax.set_title("lines: closed form, dots: measured here")
    ax.legend(loc="center right")
    return fig


memory_curves(held)
plt.show()

# %% [markdown]
# What is *not* in this picture: activations (the batch's, cut by data parallel already), the buffers
# of the collectives, and what exists for a moment only. Stage 3 must hold one module's full
# parameters while that module computes, so the largest module sets its peak.
#
# ## Full parameters only while they are used
#
# `FullySharded` keeps a flat shard. Forward gathers, computes and lets go. That last step has a
# trap: autograd saves the weights for backward, so dropping your own reference frees nothing. The
# reference implementation packs them away: it replaces a saved weight by *where it lies* and gathers
# once more when backward asks. Count the full parameters at each moment:


# %% tags=["nbval-ignore-output"]
def full_parameters_over_a_step():
    model = tiny_lm().to(sb.device())
    blocks = list(model.blocks)
    base = held_bytes() - sum(p.nbytes for p in model.parameters())
    model = fully_sharded(model)
    rows = []

    def note(when):
        grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        rows.append((when, round((held_bytes() - base - grads) / 4 / PARAMS, 2)))

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=i: note(f"forward of block {i}"))
        block.attn.register_full_backward_hook(lambda *_, i=i: note(f"backward of block {i}"))
    note("before the step")
    # Four tokens, so that what is counted is parameters and not activations.
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, 2, seq=2))
    loss = token_loss(model(tokens), targets)
    note("between forward and backward")
    loss.backward()
    note("after the step")
    return rows


print("tensors that Python holds, in fp32 parameters of the whole model:")
for when, share in sb.run(full_parameters_over_a_step, world_size=WORLD).values[0]:
    print(f"{when:30} {share:.2f}  {'█' * round(40 * share)}")

# %% [markdown]
# A quarter before and after the step: the shard. Between the passes 0.35, since autograd also holds
# a few activations. While a block computes, its own full parameters come on top, and the embedding
# and head that the outermost module gathered. Wrapping the whole model as *one* module would gather
# everything at once: correct, and the peak holds every parameter whole.
#
# How many bytes does it cost? Predict for one step: the model is cut into three modules (two
# blocks, and the rest).

# %% predict="gathers scatters"
gathers = (2 * 3, 2 * 4 * PARAMS)  # calls and bytes: forward and backward of each module
scatters = (3, 4 * PARAMS)  # the gradients, once

# %%
from shardbook.parallel.zero import ZeroAdamW


def traffic(strategy):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    if strategy == "data parallel":
        model = BucketedDataParallel(model)
    if strategy == "ZeRO-3":
        model = fully_sharded(model)
    make = ZeroAdamW if strategy == "ZeRO-1" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=3e-3)
    tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(0, 8))
    with calls.record() as log:
        token_loss(model(tokens), targets).backward()
        if strategy == "data parallel":
            model.finish()
        optimizer.step()
    return calls.summary([c for c in log if c.dtype.is_floating_point])


table = {
    s: sb.run(traffic, s, world_size=WORLD).values[0] for s in ("data parallel", "ZeRO-1", "ZeRO-3")
}
sb.predict("all-gathers", gathers, table["ZeRO-3"]["all_gather"])
sb.predict("reduce-scatters", scatters, table["ZeRO-3"]["reduce_scatter"])
print()
ring = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
for strategy, ops in table.items():
    wire = sum(ring[op] * (WORLD - 1) / WORLD * nbytes for op, (_, nbytes) in ops.items())
    listed = ", ".join(f"{n} {op} ({nbytes:,} B)" for op, (n, nbytes) in ops.items())
    print(f"{strategy:14} {wire / PARAMS:4.1f} bytes per parameter sent by a ring:  {listed}")

# %% [markdown]
# ZeRO-1 costs what data parallel costs. ZeRO-3 costs half as much again: 3 (P-1)/P instead of
# 2 (P-1)/P elements per parameter, because parameters are gathered twice.
#
# ## Clipping: whose norm?
#
# With shards, each rank sees a part of the gradient. The norm of the whole is the root of the sum of
# all squares: one all-reduce of one number. Clipping by the local norm scales every rank's shard by
# another factor, and the update points elsewhere.


# %%
from shardbook.parallel.zero import clip_grad_norm_sharded_


def norms():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fully_sharded(tiny_lm().to(sb.device()))
    tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(0, 8))
    token_loss(model(tokens), targets).backward()
    local = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    return local, clip_grad_norm_sharded_(model.parameters(), 0.1).item()


whole = tiny_lm()
token_loss(whole(counting_batch(0, 8)[0]), counting_batch(0, 8)[1]).backward()
values = sb.run(norms, world_size=WORLD).values
print("local norms  ", [round(local, 3) for local, _ in values])
print("sharded norm ", [round(norm, 3) for _, norm in values])
print("one process  ", round(nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item(), 3))

# %% [markdown]
# Reported in the wild: replicas counted twice
# ([NeMo RL#3788](https://github.com/NVIDIA-NeMo/RL/pull/3788)), the wrong group
# ([VeOmni#184](https://github.com/ByteDance-Seed/VeOmni/issues/184)). Not every local number is this bug:
# `item()` of a norm that is a `DTensor` gives this rank's part
# ([pytorch#144054](https://github.com/pytorch/pytorch/issues/144054)), so a log can be wrong where the
# clipping is right. `full_tensor()` gives the whole.
#
# ## The loss curves coincide
#
# The small model, 30 steps of the counting task, global batch 8.


# %%
def losses(strategy, steps=30):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    if strategy == "data parallel":
        model = BucketedDataParallel(model, bucket_bytes=100_000)
    if strategy == "ZeRO-3":
        model = fully_sharded(model)
    make = ZeroAdamW if strategy == "ZeRO-1" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, 8))
        loss = token_loss(model(tokens), targets)
        loss.backward()
        if strategy == "data parallel":
            model.finish()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)  # the mean over ranks, to look at
        curve.append(mean.item())
    return curve


def all_losses(strategies):
    return {s: losses(s) for s in strategies}


curve = sb.run(all_losses, ["one process"], world_size=1).values[0]
curve |= sb.run(all_losses, ["data parallel", "ZeRO-1", "ZeRO-3"], world_size=WORLD).values[0]
plot.curves(curve, "step", "loss", "four ways, one curve")
plt.show()
for name, values in curve.items():
    worst = max(abs(a - b) for a, b in zip(values, curve["one process"], strict=True))
    print(
        f"{name:14} loss {values[0]:.2f} -> {values[-1]:.2f}, on the curve of one process: {worst < 1e-3}"
    )

# %% [markdown]
# ## Beside PyTorch's own
#
# The same step with `DistributedDataParallel`, `ZeroRedundancyOptimizer` and `fully_shard`: the
# loss of the fifth step, the floating-point bytes that a ring sends for its collectives (DDP rearranges
# its buckets after the first step), and what is held after it.


# %%
def beside(strategy):
    import warnings

    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore", FutureWarning)  # ZeroRedundancyOptimizer's own
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    adamw = torch.optim.AdamW
    if strategy == "BucketedDataParallel":
        model = BucketedDataParallel(model)
    elif strategy in ("DistributedDataParallel", "ZeroRedundancyOptimizer"):
        model = DistributedDataParallel(model)
    elif strategy == "FullySharded":
        model = fully_sharded(model)
    elif strategy == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if strategy == "ZeroAdamW":
        optimizer = ZeroAdamW(model.parameters(), lr=3e-3)
    elif strategy == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adamw, lr=3e-3)
    else:
        optimizer = adamw(model.parameters(), lr=3e-3)
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, 8))
        with calls.record() as log:
            loss = token_loss(model(tokens), targets)
            loss.backward()
            if strategy == "BucketedDataParallel":
                model.finish()
            optimizer.step()
    ops = calls.summary([c for c in log if c.dtype.is_floating_point])
    ring = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
    sent = sum(ring[op] * (world - 1) / world * nbytes for op, (_, nbytes) in ops.items())
    last = loss.item()
    del tokens, targets, loss, log
    return last, sent / PARAMS, held_bytes() / PARAMS


pairs = [
    ("BucketedDataParallel", "DistributedDataParallel"),
    ("ZeroAdamW", "ZeroRedundancyOptimizer"),
    ("FullySharded", "fully_shard"),
]

# new ranks for each: DDP's buckets outlive its module, so the next one in their process inherits them
found = {n: sb.run(beside, n, world_size=WORLD).values[0] for pair in pairs for n in pair}
print("                             same loss   bytes sent   bytes held (per parameter)")
for pair in pairs:
    for name in pair:
        loss, sent, kept = found[name]
        print(f"{name:28} {abs(loss - found[pairs[0][0]][0]) < 1e-4!s:9} {sent:12.2f} {kept:12.2f}")

# %% [markdown]
# Read the differences. `ZeroAdamW` holds what stage 1 has to hold in fp32: 4 bytes of parameter, 4 of
# gradient and 8/P of moments, 10 on four ranks.
#
# - DDP keeps its buckets, 4 bytes per parameter, beside the gradients (`gradient_as_bucket_view=True`
#   makes one of the two).
# - `ZeroRedundancyOptimizer` leaves the averaging to DDP, an all-reduce, and then each rank
#   broadcasts the parameters it updated. A reduce-scatter and an all-gather send a third less. It
#   deals out whole parameters, so its parts are a little less even.
# - `fully_shard` sends a little less than ours: it keeps the outermost module's parameters from
#   forward to backward (`reshard_after_forward` is False for the root by default), since backward
#   begins there.
#
# ## What ZeRO leaves whole: activations
#
# Data parallel cut the batch and ZeRO the state. What a layer keeps for backward of *this* rank's tokens,
# no stage cuts: with B sequences of S tokens, width D and H heads, some multiple of `B S D` numbers.
# **Checkpointing** keeps less and computes it again: *full*, a block keeps only its input and runs
# forward a second time in backward ([Chen et al., arXiv 1604.06174](https://arxiv.org/abs/1604.06174));
# *selective*, it keeps what is dear to compute, here the results of matrix products, and repeats the
# norms, gelu and attention between them.
#
# **Predict** per block, in units of B S D numbers: what is kept of a block whose four products have 3 D,
# D, 4 D and D output features? And how many operations, relative to no checkpointing, in products with
# weights? (Backward costs two forwards. Recomputation stops at the last thing that backward needs, so the
# block's last product is not repeated, 8 of its 24 B S D².)

# %% predict="products_kept inputs_kept inputs_work"
products_kept = 1 + 3 + 1 + 4 + 1  # the block's input, and each product's result
inputs_kept = 1
inputs_work = 1 + (24 - 8) / 24 / 3

# %%
kept, work, gradients = {}, {}, {}
for kind in ("everything", "products", "block inputs"):
    one, two = (checkpointing.measured(kind, layers) for layers in (1, 2))
    kept[kind] = (two[0] - one[0]) / (
        4 * 2 * 128 * 64
    )  # one block more: fp32, B = 2, S = 128, D = 64
    work[kind], gradients[kind] = two[1] - one[1], two[2]
sb.predict("kept, products", products_kept, kept["products"])
sb.predict("kept, block inputs", inputs_kept, kept["block inputs"])
sb.predict("operations, block inputs", inputs_work, work["block inputs"] / work["everything"])
same = all(torch.equal(g, gradients["everything"]) for g in gradients.values())
print(f"everything: {kept['everything']:.1f} B S D; same gradients, bit for bit: {same}")
assert work["products"] == work["everything"], "no product with weights is repeated"

# %% [markdown]
# Keeping the products holds half as much and repeats no product with weights; keeping the inputs holds a
# twentieth and repeats two ninths of the operations. (Attention is repeated in both, and counted in
# neither.) The often quoted `34 B S D` bytes per block
# ([Korthikanti et al., arXiv 2205.05198](https://arxiv.org/abs/2205.05198)) are 16 of these units at two
# bytes and two masks of dropout at one; ours has no dropout, and keeps rotated beside unrotated queries and
# keys, and attention's output twice. That paper's selective recomputation repeats only what belongs to
# attention's scores, the term `5 H B S²` of its formula; fused attention never keeps them (chapter 31).
#
# ## Does it fit? Two sizes worked out
#
# 16 bytes of state per parameter, cut by ZeRO-3; activations of sequences of 4,096 tokens; three times
# the 16-bit parameters over the links per step; 6 operations per parameter and token, 8 when the whole
# forward is repeated. Cards of 80 GB and 989 TFLOP/s, of which we assume half; 450 GB/s of NVLink each way
# in a host of 8 (NVIDIA's data sheet), and adapters of 50 GB/s between hosts. NCCL adds up a host's
# adapters where NVLink is at least as fast as their sum
# ([a maintainer, nccl#412](https://github.com/NVIDIA/nccl/issues/412)): a ring leaves the host through each.
# So one line has an adapter per card, and one has a single adapter per host.
#
# Not counted: attention's scores, the logits, the gathered parameters, latencies.


# %%
def size(params, layers, width, cards, sequences, checkpoint, adapters=8, tokens=4096):
    """GB of state, GB of activations, seconds of messages and of arithmetic, per card and step."""
    unit = sequences * tokens * width  # B S D
    kept = 2 * unit * layers + 34 * unit if checkpoint else 34 * unit * layers
    link = 450e9 if cards <= 8 else adapters * 50e9
    messages = 3 * 2 * params * (cards - 1) / cards / link
    work = (8 if checkpoint else 6) * params * sequences * tokens / (0.5 * 989e12)
    return 16 * params / cards / 1e9, kept / 1e9, messages, work


seventy = 70e9, 80, 8192, 64
print("                                     state  activations  messages  arithmetic")
for name, *sizes in [
    ("7B on 8, 1 sequence", 7e9, 32, 4096, 8, 1, False),
    ("70B on 64, 1 sequence", *seventy, 1, False),
    ("70B on 64, 1, checkpointed", *seventy, 1, True),
    ("the same, one adapter per host", *seventy, 1, True, 1),
    ("4 sequences, one adapter per host", *seventy, 4, True, 1),
]:
    state, acts, messages, arithmetic = size(*sizes)
    row = f"{name:34} {state:4.0f} GB {acts:9.0f} GB {messages:7.2f} s {arithmetic:9.2f} s"
    print(row + ("" if state + acts < 80 else "   does not fit"))
assert sum(size(*seventy, 1, False)[:2]) > 80 > sum(size(*seventy, 4, True)[:2])
assert size(*seventy, 1, True)[2] < size(*seventy, 1, True)[3] < size(*seventy, 1, True, 1)[2]
assert size(*seventy, 4, True, 1)[2] < size(*seventy, 4, True, 1)[3]

# %% [markdown]
# So: **7B on 8 with ZeRO-3 and nothing else, because** it fits and its messages take a quarter of the
# arithmetic. **70B on 64 with full checkpointing, because** without it one sequence does not fit; through
# eight adapters per host its messages take a quarter of the arithmetic too. Through one adapter the card
# waits: messages are paid per step and not per token, so four sequences per card hide them. Hybrid sharding
# (below) is no way out here: the state of 70B on the 8 cards of one host is 140 GB per card. Tensor
# parallelism in the host is one (chapter 22).
#
# ## Out of device memory: the host
#
# The state that is touched once a step can live in host memory: move gradients down, update there,
# move parameters up ([ZeRO-Offload, arXiv 2101.06840](https://arxiv.org/abs/2101.06840)).


# %%
class OffloadedAdamW:
    """bf16 parameters on the device; master copy and moments, fp32, in host memory."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.host = [p.detach().cpu().float().clone().requires_grad_() for p in self.params]
        self.inner = torch.optim.AdamW(self.host, lr=lr)
        self.moved = 0

    @torch.no_grad()
    def step(self):
        for p, h in zip(self.params, self.host, strict=True):
            down = p.grad.cpu()  # bf16: half the bytes on the bus
            h.grad, p.grad = down.float(), None
            self.moved += down.nbytes
        self.inner.step()
        for p, h in zip(self.params, self.host, strict=True):
            up = h.bfloat16()
            p.copy_(up)
            self.moved += up.nbytes
            h.grad = None


def offloaded():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fully_sharded(tiny_lm().to(sb.device(), torch.bfloat16))
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-3)
    tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(0, 4))
    token_loss(model(tokens), targets).backward()
    on_device = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    optimizer.step()
    state = [t for s in optimizer.inner.state.values() for t in s.values() if t.dim()]
    on_host = sum(t.nbytes for t in [*optimizer.host, *state])
    return on_device / PARAMS, on_host / PARAMS, optimizer.moved / PARAMS


# %% predict="device_bytes host_bytes bus_bytes"
device_bytes = (2 + 2) / WORLD  # bf16 parameters and gradients, cut by ZeRO-3
host_bytes = 12 / WORLD
bus_bytes = (2 + 2) / WORLD  # gradients down, parameters up, every step

# %%
on_device, on_host, moved = sb.run(offloaded, world_size=WORLD).values[0]
sb.predict("bytes per parameter on the device", device_bytes, on_device)
sb.predict("bytes per parameter in host memory", host_bytes, on_host)
sb.predict("bytes per parameter over the bus, each step", bus_bytes, moved)

# %% [markdown]
# Where the device is an accelerator these tensors really lie apart; on a CPU both are the same
# memory and only the accounting shows. The price: the update runs at the host's memory bandwidth,
# and the bus is narrow (PCIe 4.0 x16: about 32 GB/s each way), so a 7B model on 4 ranks moves
# 3.5 GB down and 3.5 GB up, 0.2 s per step if nothing is hidden. It pays when the batch is large
# enough for the step to be long.
#
# ## Why a larger batch stops helping
#
# Data parallel scales by making the global batch larger. Does twice the batch need half the steps?
# Steps until the small model reaches a loss of 1.5 (sequences of 16 tokens):


# %% tags=["nbval-ignore-output"]
def steps_to_goal(batch, lr, goal=1.5):
    model = tiny_lm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    smooth = None
    for step in range(200):
        tokens, targets = counting_batch(1000 + step, batch=batch, seq=16)
        optimizer.zero_grad()
        loss = token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.8 * smooth + 0.2 * loss.item()
        if smooth < goal:
            return step + 1
    return 200


batches = [2, 4, 8, 16, 32, 64]
steps = {lr: [steps_to_goal(b, lr) for b in batches] for lr in (3e-3, 1e-2)}
best = [min(found) for found in zip(*steps.values(), strict=True)]
assert best[0] > 2 * best[2] and best[4] < 2 * best[5], "the curve flattens"
print("sequences a batch ", "".join(f"{b:7}" for b in batches))
print("steps             ", "".join(f"{n:7}" for n in best))
print("sequences in all  ", "".join(f"{b * n:7}" for b, n in zip(batches, best, strict=True)))

fig, (ax,) = plot.figure(7, 3.2)
ax.plot(batches, best, "o-", label="measured, the better of two learning rates")
ax.plot(batches, [best[0] * 2 / b for b in batches], "--", color="#999999", label="perfect scaling")
ax.set_xscale("log", base=2)
ax.set_yscale("log", base=2)
ax.set_xticks(batches, batches)
ax.set_yticks([2, 4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64])
ax.set(xlabel="sequences in a batch", ylabel="steps to loss 1.5")
ax.legend()
plt.show()

# %% [markdown]
# The curve flattens: from 2 to 8 sequences the steps fall by more than half, from 32 to 64 hardly,
# while the work of a step doubles. A gradient averaged over more samples is less noisy, and once the
# noise is small beside the gradient itself, averaging more buys nothing. McCandlish et al.
# ([arXiv 1812.06162](https://arxiv.org/abs/1812.06162)) call the turning point the critical batch
# size and estimate it by the **gradient noise scale** tr(Σ)/|G|², G the gradient over all
# data and Σ the covariance of one sample's. Data parallel measures it for free:
# the norms of the gradient before and after the average are two batch sizes.


# %% tags=["nbval-ignore-output"]
def noise_scale(begin, steps):
    """Sequences at which noise and gradient are equally large, averaged over some steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    b, signal, noise = 2, 0.0, 0.0
    for step in range(begin + steps):
        batch = counting_batch(step, batch=b * world, seq=16)
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in batch)
        optimizer.zero_grad()
        token_loss(model(tokens), targets).backward()
        small = sum(p.grad.square().sum() for p in model.parameters()) / world
        dist.all_reduce(small)  # mean over ranks of |G|² of b sequences
        average_gradients_(model)
        big = sum(p.grad.square().sum() for p in model.parameters())  # |G|² of world * b sequences
        if step >= begin:
            signal += (world * big - small).item() / (world - 1)
            noise += (small - big).item() / (1 / b - 1 / (world * b))
        optimizer.step()
    return noise / signal


scales = {b: sb.run(noise_scale, b, 20, world_size=WORLD).values[0] for b in (0, 30)}
for begin, scale in scales.items():
    print(f"steps {begin} to {begin + 20}: noise scale about {scale:.0f} sequences")
assert scales[0] < scales[30]

# %% [markdown]
# The noise scale grows as the loss falls, so a run may start with a small batch and raise it. On
# ImageNet, Goyal et al. ([arXiv 1706.02677](https://arxiv.org/abs/1706.02677)) kept the accuracy up
# to a batch of 8192 images. When the batch is at its limit, more devices need
# another axis: tensor, pipeline or context parallel (chapters 22 to 24).
#
# ## On a real cluster
#
# - **One host.** 8 NPUs over HCCS or 8 GPUs over NVLink: use ZeRO-3 or ZeRO-1 freely. Collectives
#   run on their own stream or engine, so the overlap you saw as event order becomes time.
# - **Many hosts.** A card's RDMA adapter (RoCE or InfiniBand) is several times slower than its links
#   inside. If the state fits one host, shard inside it and replicate between hosts (hybrid sharding):
#   all-gathers stay inside, only reduced shards cross.
# - **NPU, HCCL.** `backend="hccl"`; AVG is a sum and a division there (torch_npu's), as here. Each communicator
#   takes 2 × `HCCL_BUFFSIZE` of device memory, 200 MB each by default
#   ([CANN manual](https://www.hiascend.com/document/detail/en/canncommercial/850/commlib/hcclug/hcclug_000076.html)):
#   a handful of process groups costs gigabytes. Time-outs are HCCL_CONNECT_TIMEOUT and
#   HCCL_EXEC_TIMEOUT, not the process group's alone.
# - **CUDA, NCCL.** A synchronous collective blocks the stream, not the host: wrong overlap shows as
#   gaps in the trace, not in the order of Python events.
# - **Both.** A rank that stops early (uneven data, an exception) leaves the others in all-reduce
#   until the time-out. Make the number of steps equal on all ranks before training, not during it.
#
# ### Published figures beside ours
#
# | what | ours (this notebook) | published |
# |---|---|---|
# | memory of a rank, stage 1, 2, 3 | 7.0, 5.5, 4.0 of 16 bytes per parameter, on 4 ranks | 31.4, 16.6, 1.9 GB of 120 GB: 7.5 B parameters on 64 GPUs ([ZeRO, arXiv 1910.02054](https://arxiv.org/abs/1910.02054), figure 1) |
# | traffic of ZeRO-3 | 1.5 times data parallel | 1.5 times (the same, section 7) |
# | scaling of DDP | not measured: four ranks share one machine here | near-linear on 256 GPUs ([PyTorch Distributed, arXiv 2006.15704](https://arxiv.org/abs/2006.15704)) |
# | offload | 12/P bytes per parameter in host memory | 13 B parameters on one V100 with 32 GB ([arXiv 2101.06840](https://arxiv.org/abs/2101.06840)) |
# | batch | 18, 16, 14 steps with 16, 32, 64 sequences: four times the work per step for 4 steps less | accuracy kept up to 8192 images; ImageNet in one hour on 256 GPUs ([arXiv 1706.02677](https://arxiv.org/abs/1706.02677)) |
#
# Now write it: [the lab](../labs/21_data_parallel.ipynb). Then
# [chapter 22](22_tensor_parallel.ipynb) cuts the layers themselves.
