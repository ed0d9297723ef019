# %% [markdown]
# # 23 · Pipeline parallel: the lab
#
# You write three schedules, the clock that judges them, a pipeline that runs them on real stages,
# and the sum that keeps tied embeddings tied. At the end the small model of this book trains in your
# pipeline. Two to three hours.
#
# A schedule is a list for each stage of what it computes, in order: `("F", 3, 0)` is the forward of
# micro-batch 3 in chunk 0, `("B", 3, 0)` its backward. p is the number of stages, m that of
# micro-batches, v that of chunks on each rank; chunk c of stage s is block `c p + s` of the model.

# %%
import shardbook as sb

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook import calls, plot
from shardbook.checks import pipeline_parallel as check
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.parallel.clock import virtual_clock
from shardbook.studies.pipeline_lm import timed, idle_share, in_order, split_lm, virtual_trace
from shardbook.pictures.pipeline import draw_schedules
from shardbook.parallel.schedules import (
    Op,  # ("F" or "B", microbatch, chunk)
    Schedule,  # list[list[Op]]
    by_block,  # the same with the number c p + s of the block in place of the chunk
    _positive,  # _positive(num_stages=0): ValueError that names what is not at least 1
)

# %% [markdown]
# ## Exercise 1: GPipe and 1F1B
#
# GPipe: on each stage all forwards, then all backwards, micro-batches in order.
#
# 1F1B: stage s warms up with some forwards, then does one forward and one backward in turn, then the
# backwards that are left. At most p-s micro-batches may be alive on stage s: forward done, backward
# not.
#
# `_alternate(forwards, backwards, warm)` is yours to write too: `warm` forwards, then a forward and
# a backward in turn, then the backwards left. Exercise 2 uses it again.
#
# <details><summary>Hint 1</summary>
#
# The last stage can go backward at once: no warm-up. The one before it must have sent one
# micro-batch more before the first gradient comes back. And so on.
# </details>
# <details><summary>Hint 2</summary>
#
# In the steady state the forward comes *before* the backward: the warm-up is p-s-1, not p-s.
# </details>
# <details><summary>Hint 3</summary>
#
# With fewer micro-batches than stages, the warm-up is all of them.
# </details>

# %% exercise="shardbook.parallel.schedules.gpipe shardbook.parallel.schedules._alternate shardbook.parallel.schedules.one_f_one_b"

# %%
check.gpipe(gpipe)

# %%
check.one_f_one_b(one_f_one_b)

# %% [markdown]
# ## Exercise 2: interleaved
#
# Micro-batches pass the chunks in groups of p: p of them through chunk 0, the same p through chunk
# 1, …, then the next p. Backwards the same with the chunks in reverse. m must be a multiple of p,
# else ValueError.
#
# <details><summary>Hint 1</summary>
#
# Number a stage's m v forwards k = 0, 1, …. `k // (p * v)` is the group, and what is left of k says
# the chunk and the place in the group.
# </details>
# <details><summary>Hint 2</summary>
#
# How many forwards before the first backward? On the last stage: the first group through all chunks
# but the last, (v-1)p, and one of the last chunk, which the alternation adds. Each stage before it
# needs *two* more, one slot down and one back up.
# </details>
# <details><summary>Hint 3</summary>
#
# `warm = 2 * (p - stage - 1) + (v - 1) * p`, at most m v; then as in 1F1B.
# </details>

# %% exercise="shardbook.parallel.schedules.interleaved"

# %%
check.interleaved(interleaved)

# %% [markdown]
# ## Exercise 3: the closed form, and a clock
#
# `bubble_fraction`: the idle share of all ranks' time. `simulate`: an operation starts once its
# stage is free and its input has arrived. A forward needs the forward of the block before; a
# backward needs the backward of the block after, and its own forward. `send` is a latency between
# *different* ranks. It raises ValueError for a schedule that can't go on, or in which a stage does
# not do everything exactly once.
#
# First predict: 6 stages, 12 micro-batches. What share is idle? And with 3 chunks on each rank?

# %% predict="plain chunked"
plain = 5 / (12 + 5)
chunked = 5 / (3 * 12 + 5)


# %% [markdown]
# `_complete(schedule)` gives the number of chunks, or that ValueError; `_peak(stage)` counts the
# most micro-batches alive in a stage's list. Both are given. `play` and `_ready` are how the solution
# divides the work, in blocks: its clock plays also the lesson's orders, in which a backward is in
# two parts "I" and "W". Throw both away if you divide it otherwise, only `simulate` is checked, with
# "F" and "B".
#
# <details><summary>Hint 1</summary>
#
# Keep for each stage the index of its next operation and the time it is free, and in one dict the
# end of every operation that is done, by (kind, microbatch, block).
# </details>
# <details><summary>Hint 2</summary>
#
# Go round the stages and let each do all that it can. If a whole round changes nothing and something
# is left: deadlock.
# </details>
# <details><summary>Hint 3</summary>
#
# `start = max(free, arrived)`. The bubble is `1 - busy / (p * makespan)`.
# </details>

# %%
from shardbook.parallel.schedules import _complete, _peak

# %% exercise="shardbook.parallel.schedules.bubble_fraction shardbook.parallel.schedules._ready shardbook.parallel.schedules.play shardbook.parallel.schedules.simulate"

# %%
check.bubble_fraction(bubble_fraction)

# %%
check.simulate(simulate)

# %%
sb.predict("bubble", plain, simulate(one_f_one_b(6, 12))["bubble"])
sb.predict("bubble with chunks", chunked, simulate(interleaved(6, 12, 3))["bubble"])
draw_schedules(
    {
        "my GPipe (simulated)": simulate(gpipe(4, 8))["timeline"],
        "my 1F1B (simulated)": simulate(one_f_one_b(4, 8))["timeline"],
        "my interleaved (simulated)": simulate(interleaved(4, 8, 2), 0.5, 1.0)["timeline"],
    }
)
plt.show()

# %% [markdown]
# ## Exercise 4: a pipeline on real stages
#
# Now run a schedule. Each rank has one stage, an `nn.Module`; the first reads the micro-batches, the
# last the targets. Activations go to the next rank, gradients to the one before. It must work for
# *every* schedule that can run, also one that takes micro-batches in another order.
#
# - The loss is the mean over micro-batches, and only the last rank returns it. Divide each
#   micro-batch's loss by their number *before* its backward: so the gradients are the mean's.
# - Gradients are added to `.grad`.
# - No waiting for a send before the next operation; wait for all at the end.
# - Let go of a micro-batch's input and output when its backward is done, or 1F1B saves nothing.
#
# These move tensors for you. `send_activation(y, peer, group, sent)` starts sending shape and value
# and appends to `sent` what has to be waited for; `recv_activation(peer, group)` gives a leaf that
# will collect its gradient. `send_gradient(x, peer, group, sent)` and `recv_gradient(y, peer, group)`
# move `x.grad` and the gradient of y: the other side knows the shape. `Inbox` takes messages in the order in
# which the *neighbour* sends and hands them out in the order in which you need them.

# %%
from shardbook.parallel.pipeline import (
    Inbox,  # Inbox(schedule, peer, kind, receive): .take(i) is the message of micro-batch i
    recv_activation,
    recv_gradient,  # contiguous, even if y is a transposed view
    send_activation,
    send_gradient,
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forward: get x, `y = stage(x)`, keep both by micro-batch, send `y.detach()`. Backward:
# `y.backward(gradient from the next rank)`, then `send_gradient`. On the last stage y is the loss.
# </details>
# <details><summary>Hint 2</summary>
#
# Two boxes: activations ("F") from rank - 1, gradients ("B") from rank + 1. What a gradient's shape
# is, you know: that of your own output.
# </details>
# <details><summary>Hint 3</summary>
#
# `x` and `y` of the last operation are alive as long as these *names* are. `del x, y`.
# </details>

# %% exercise="shardbook.parallel.pipeline.run_pipeline" blank="run_pipeline"

# %%
check.run_pipeline(run_pipeline)

# %% [markdown]
# ### A trace to read
#
# Your pipeline with your schedule on four real ranks, on the **virtual clock**: a forward takes 1, a
# backward 2. Your code does not know: `timed` tells the clock what the stage computes, and the four
# functions above put the sender's time into each message. (With functions of your own the answer is as
# right, but no rank waits on the chart.) In the trace, find the warm-up of rank 0, the first
# gradient it waits for, and the end of the pipeline. Which rank is idle longest at the start, which at
# the end?

# %% predict="predicted"
predicted = 3 / (8 + 3)  # the bubble of 4 stages and 8 micro-batches


# %%
def timed_step(schedule):
    rank, p = dist.get_rank(), dist.get_world_size()
    stage = timed(split_lm(tiny_lm(num_layers=4), p)[rank].to(sb.device()))
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=8, seq=16))
    with virtual_clock(rank, {"F": 1.0, "B": 2.0}) as clock:
        run_pipeline(stage, schedule, tokens, targets, token_loss)
    return clock.kernels


# %% tags=["nbval-ignore-output"]
timeline = in_order(sb.run(timed_step, one_f_one_b(4, 8), world_size=4).values)
sb.predict("bubble (virtual)", predicted, idle_share(timeline))
virtual_trace(timeline, "your 1F1B on four real ranks")

# %% [markdown]
# ### How many bytes?
#
# Predict what rank 0 of two sends for 8 micro-batches of one sequence of 64 tokens (D = 64, fp32),
# headers not counted. And rank 1?

# %% predict="first second"
first = 8 * 64 * 64 * 4  # activations to the right
second = 8 * 64 * 64 * 4  # gradients to the left: as many


# %%
def sent_bytes():
    rank, p = dist.get_rank(), dist.get_world_size()
    stage = split_lm(tiny_lm().to(sb.device()), p)[rank]
    tokens, targets = (t.to(sb.device()).split(1) for t in counting_batch(0, batch=8))
    with calls.record() as log:
        run_pipeline(stage, one_f_one_b(p, 8), tokens, targets, token_loss)
    return sum(c.nbytes for c in log if c.op == "send" and c.dtype.is_floating_point)


sb.predict("bytes by rank", [first, second], sb.run(sent_bytes, world_size=2).values)

# %% [markdown]
# ### A deadlock to provoke
#
# Here is a pipeline of three stages that runs GPipe with `dist.send`, which waits for the receiver.
# It works. Change `gpipe` to `one_f_one_b` and it hangs. Before you look at the message: which two
# ranks wait for each other first, and with which micro-batches? Then mend it *without* `isend`: let
# one side receive first.


# %%
def waits_for_each_send(make):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.zeros(5, 8).to(sb.device())
    for kind, _, _ in make(last + 1, 4)[rank]:
        source, to = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        if 0 <= source <= last:
            dist.recv(x, source)
        if 0 <= to <= last:
            dist.send(x, to)
    return "done"


for make in (gpipe, one_f_one_b):
    try:
        print(make.__name__, sb.run(waits_for_each_send, make, world_size=3, timeout=30).values)
    except sb.NotWritten:
        raise
    except sb.RankError as error:
        print(
            make.__name__, "hung:", error.hung, "  in a send:", "is in a send itself" in str(error)
        )

# %% [markdown]
# ## Exercise 5: tied embeddings
#
# The first stage embeds with a weight, the last one multiplies by a copy of it. Sum the two
# gradients after backward, so that both copies take the same step. Only the ranks that hold a copy
# may move gradients. A copy without a gradient counts as zero. If one rank holds one Parameter as
# both, autograd has summed already.
#
# `_owners(first_weight, last_weight, group)` tells which rank of the group holds the first and which
# the last copy, None where nobody does; all ranks of the group must call it.
#
# <details><summary>Hint 1</summary>
#
# Both send and both receive: `dist.batch_isend_irecv` of two `dist.P2POp`s, with `group_peer=`,
# never two blocking sends.
# </details>
# <details><summary>Hint 2</summary>
#
# Send your gradient as it was; add only when both transfers are done.
# </details>
# <details><summary>Hint 3</summary>
#
# Who holds nothing must still take part in `_owners`, and nothing else.
# </details>

# %%
from shardbook.parallel.pipeline import _owners

# %% exercise="shardbook.parallel.pipeline.sync_tied_embeddings_"

# %%
check.sync_tied_embeddings_(sync_tied_embeddings_)

# %% [markdown]
# ## Your pipeline trains the model
#
# The small model with tied embeddings on four ranks (embedding, layer, layer, head), beside one
# process. The curves must coincide. Then take the call of `sync_tied_embeddings_` out and look again:
# how long does it take to notice in the loss?


# %%
def train(parallel, steps=30):
    rank, p = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())
    model.embed.weight = model.head.weight
    part = split_lm(model, p)[rank] if parallel else model
    first = model.embed.weight if rank == 0 else None
    last = model.head.weight if rank == p - 1 else None
    optimizer, curve = torch.optim.AdamW(part.parameters(), lr=3e-3), []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step, batch=8))
        optimizer.zero_grad()
        if parallel:
            micro = tokens.split(2), targets.split(2)
            loss = run_pipeline(part, one_f_one_b(p, 4), *micro, token_loss)
            sync_tied_embeddings_(first, last)
        else:
            loss = token_loss(model(tokens), targets)
            loss.backward()
        optimizer.step()
        curve.append(None if loss is None else loss.item())
    return curve


one = sb.run(train, False, world_size=1).values[0]
mine = sb.run(train, True, world_size=4).values[3]
print("curves within 1e-3:", max(abs(a - b) for a, b in zip(one, mine, strict=True)) < 1e-3)
plot.curves({"one process": one, "your pipeline, 4 ranks": mine}, "step", "loss")
plt.show()

# %% [markdown]
# ## On a real cluster
#
# - Put the cut between servers: a boundary carries `B S D` elements per micro-batch, whatever the
#   number of layers behind it.
# - Put these functions into a `.py` file that ends in `sb.run(…)` (chapter 02 has an example) and start
#   it with `torchrun` on two hosts; `sb.run` uses the ranks that torchrun made. On an NPU the messages are HCCL's, on a CUDA device NCCL's, and your code names neither.
# - There, point-to-point runs on a stream: `send` returns early and a deadlock shows later, as a
#   timeout. Read the order of messages of *both* sides, as in the message above.
# - Never overwrite a tensor that an `isend` still reads. Here `sent` keeps it alive; reusing one
#   buffer for all micro-batches would be a fault that a CPU shows rarely and a device often.
# - Measure each stage's time before you choose the cut: the slowest one sets the pace for all.
