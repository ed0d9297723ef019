# %% [markdown]
# # 21 · Lab: data parallel and ZeRO
#
# You write data parallel, first plain, then overlapped, and the two ends of ZeRO: a sharded
# optimizer and a fully sharded module. Each check runs your code on real ranks and compares values,
# bytes and memory with an independent computation.
#
# Time: about 3 hours. Exercises 1, 3 and 6 are short, 2 and 4 medium, 5 is long. They do not depend
# on each other.

# %%
import shardbook as sb

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook import calls, plot
from shardbook.checks import data_parallel as check
from shardbook.memory import held_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.tracing import expected_calls

WORLD = 4
PARAMS = sum(p.numel() for p in tiny_lm().parameters())


def my_part(step, batch=8):
    """This rank's tokens and targets of a step, on the device."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return [t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step, batch)]


# %% [markdown]
# ## Exercise 1: average the gradients
#
# After backward every rank has the gradients of its part of the batch. Make them the mean over the
# ranks. Two demands beyond the loop over parameters you saw in the lesson:
#
# - few messages: at most ⌈bytes / 25 MB⌉ per dtype, and one small one,
# - a parameter that some ranks did not use counts as zero there; one that *no* rank used keeps
#   `None`, so that the optimizer goes on skipping it.
#
# Given: `has_gradient(params, group)` (one small all-reduce that tells which parameters have a
# gradient on at least one rank), `gradient_or_zeros(p)` and `by_dtype(tensors)`.
#
# <details><summary>Hint 1</summary>
#
# `torch.cat` of the flattened gradients of one dtype gives one tensor; `flat.split(n)` cuts it into
# contiguous views of at most n elements, and an all-reduce of a view changes `flat`.
# </details>
# <details><summary>Hint 2</summary>
#
# Copy the means back with `g.copy_(piece.view_as(g))`: it keeps the strides of a gradient that is
# not contiguous. Divide once, by the size of *the group*.
# </details>
# <details><summary>Hint 3: None</summary>
#
# Ask `has_gradient` first, on every rank. For a parameter that it names, `gradient_or_zeros(p)` goes into
# the flat tensor and becomes `p.grad`; one that it does not name is left out on every rank alike, so the
# flat tensors have the same length.
# </details>

# %%
from shardbook.parallel.data import BUCKET_BYTES, by_dtype, gradient_or_zeros, has_gradient

# %% exercise="shardbook.parallel.data.average_gradients_"

# %%
check.average_gradients_(average_gradients_)

# %% [markdown]
# **Predict, then measure.** The model has 28 parameters, all fp32. How many collective calls does a
# step make with your function, and how many bytes of gradients does a rank hand to them?

# %% predict="messages gradient_bytes"
messages = 2  # one all-reduce for the only dtype, one for the flags
gradient_bytes = 4 * PARAMS


# %%
def one_step():
    model = tiny_lm().to(sb.device())
    tokens, targets = my_part(0)
    token_loss(model(tokens), targets).backward()
    with calls.record() as log:
        average_gradients_(model)
    return len(log), sum(c.nbytes for c in log if c.dtype.is_floating_point)


count, nbytes = sb.run(one_step, world_size=WORLD).values[0]
sb.predict("messages", messages, count)
sb.predict("bytes of gradients", gradient_bytes, nbytes)

# %% [markdown]
# ## Exercise 2: overlap it with backward
#
# `BucketedDataParallel` starts a bucket's all-reduce as soon as its last gradient is there, while
# backward computes the next ones. The buckets and the hooks are set up for you; write what happens
# when a gradient arrives, when a bucket leaves, at the end, and under `no_sync()`.
#
# `make_buckets` gives `Bucket`s with `params`, `missing` (parameters whose gradient has not come
# yet), `flat` and `work`; a hook calls `gradient_arrived(param)` when `param.grad` is complete.
#
# <details><summary>Hint 1: order</summary>
#
# Ranks that run other branches fill their buckets in other orders. `self.started` counts the buckets
# that have left: start bucket number `self.started` if it is full, and go on with the next; a later
# bucket waits for its turn even if it is full.
# </details>
# <details><summary>Hint 2: the end</summary>
#
# `finish()` starts what has not left, with zeros for missing gradients, then waits for each `work`,
# divides, and copies the means back. It must put `started`, `missing`, `flat` and `work` back for
# the next step.
# </details>
# <details><summary>Hint 3: accumulation</summary>
#
# Under `no_sync()` a gradient that arrives is left where it is: autograd adds to `p.grad`, and the
# next backward outside sends the sum. Restore the flag also if the block raises: try/finally.
# </details>

# %%
from shardbook.parallel.data import Bucket, make_buckets

# %% exercise="shardbook.parallel.data.BucketedDataParallel" blank="gradient_arrived start finish no_sync"

# %%
check.bucketed_data_parallel(BucketedDataParallel)


# %% [markdown]
# **A trace to read.** Two ranks, buckets of 100 kB. Which all-reduces lie under the backward slices?
# Which one is not hidden, and why can it not be? Run it again with `bucket_bytes=25_000_000`.
#
# <details><summary>Answer</summary>
#
# All buckets but the last leave while backward runs. The last holds the first layer's gradients, which
# backward computes last: when it is full, nothing is left to compute. With 25 MB there is only this one.
# The small all-reduce after it tells which parameters were used.
# </details>


# %% tags=["nbval-ignore-output"]
def traced_step(bucket_bytes=100_000):
    model = BucketedDataParallel(tiny_lm().to(sb.device()), bucket_bytes)
    tokens, targets = my_part(0)
    with sb.mark("forward and backward"):
        token_loss(model(tokens), targets).backward()
    with sb.mark("finish"):
        model.finish()


sb.run(traced_step, world_size=2, trace=True).trace


# %% [markdown]
# **A failure to provoke.** The data does not divide: rank 3 has two batches, the others three. What
# do the others do in step 3? Read the message: who waits, where, and who is missing?


# %% tags=["nbval-ignore-output"]
def uneven_data():
    model = BucketedDataParallel(tiny_lm().to(sb.device()))
    for step in range(2 if dist.get_rank() == 3 else 3):
        tokens, targets = my_part(step)
        token_loss(model(tokens), targets).backward()
        model.finish()


try:
    sb.run(uneven_data, world_size=WORLD, timeout=20)
except sb.NotWritten:
    raise
except sb.RankError as error:
    print(error)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Ranks 0 to 2 have begun step 3 and wait in an all-reduce for rank 3, which has returned and never calls it.
# The message names the call and the rank that is missing.
# </details>
#
# On a cluster this is a job that hangs at the end of the epoch until the time-out. Cures: the same
# number of steps on all ranks (drop or repeat the last batches), or a rank without data goes on
# calling `finish()`, which sends zeros; then the mean must be taken over the samples, not the ranks.
#
# ## Exercise 3: what does a rank hold?
#
# Bytes of bf16 parameters and gradients and of fp32 Adam (master copy, m, v) at ZeRO stages 0 to 3.
# Shards are rounded up to whole elements.
#
# <details><summary>Hint 1: bytes</summary>
#
# 2, 2 and 12 bytes per parameter: the master copy and both moments are in fp32, 4 bytes each.
# </details>
# <details><summary>Hint 2: stages</summary>
#
# Stage 1 cuts the optimizer's, stage 2 the gradients as well, stage 3 the parameters as well.
# </details>
# <details><summary>Hint 3: rounding</summary>
#
# A shard has ⌈params / P⌉ elements. Round the number of elements, then multiply by the bytes.
# </details>

# %% exercise="shardbook.parallel.zero.training_memory"

# %%
check.training_memory(training_memory)

# %% [markdown]
# **Predict.** A model of 70 billion parameters on 64 NPUs of 64 GB. Which is the smallest stage whose
# state fits, if a third of the memory is left for activations? Compute it by hand first.

# %% predict="smallest_stage"
smallest_stage = 3  # 4 + 12/64 and 2 + 14/64 bytes are 293 and 155 GB, 16/64 is 17.5 GB

# %%
fits = [s for s in range(4) if sum(training_memory(70_000_000_000, 64, s).values()) < 64e9 * 2 / 3]
sb.predict("smallest stage", smallest_stage, fits[0])

# %% [markdown]
# ## Exercise 4: AdamW with a quarter of the state
#
# ZeRO stage 1 in `step()`: reduce-scatter the gradients, update your part, all-gather the parameters.
# The parameters of a group, laid end to end, are cut into P equal parts; a part may begin and end in
# the middle of a parameter. Moments are kept per parameter (`self.state[p]`), for the slice that is
# yours, since a parameter that no rank used is skipped and has its own step count.
#
# Given, all flat: `flatten_padded(tensors, parts)`, `shard_flat(tensors, group)` (this rank's part, a
# copy), `reduce_scatter_mean(full, group)`, `all_gather_flat(mine, group)`.
#
# <details><summary>Hint 1: slices</summary>
#
# Walk over the parameters with the position at which each begins, counted from the start of your
# part: it begins at -rank·n. The slice of your part that belongs to a parameter is
# `max(begin, 0)` to `min(begin + numel, n)`, if that is not empty.
# </details>
# <details><summary>Hint 2: AdamW</summary>
#
# Count the step; p ← p (1 - lr·λ); m ← β₁ m + (1-β₁) g; v ← β₂ v + (1-β₂) g²;
# p ← p - lr · (m / (1-β₁ᵗ)) / (√(v / (1-β₂ᵗ)) + ε). `options` holds lr, betas, eps, weight_decay.
# </details>
# <details><summary>Hint 3: None</summary>
#
# Ask `has_gradient` which parameters have a gradient anywhere. Those without contribute zeros to the
# reduce-scatter but are not updated, and their weights do not decay.
# </details>

# %%
from shardbook.parallel.flat import all_gather_flat, flatten_padded, reduce_scatter_mean, shard_flat
from shardbook.parallel.zero import (
    after_backward,  # (f): calls f once the backward that is running is over
    tree_leaves,  # (output): what lies in it, however nested
)

# %% exercise="shardbook.parallel.zero.ZeroAdamW" blank="step_flat adamw_"

# %%
check.zero_adamw(ZeroAdamW)


# %% [markdown]
# **Predict.** Elements of optimizer state on a rank for the small model on 4 ranks, both moments.

# %% predict="state_elements"
state_elements = 2 * PARAMS / WORLD


# %%
def state_after_a_step():
    model = tiny_lm().to(sb.device())
    optimizer = ZeroAdamW(model.parameters(), lr=1e-3)
    tokens, targets = my_part(0)
    token_loss(model(tokens), targets).backward()
    optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values()]
    return sum(v.numel() for v in values if isinstance(v, Tensor) and v.dim())


sb.predict("state", state_elements, sb.run(state_after_a_step, world_size=WORLD).values[0])

# %% [markdown]
# ## Exercise 5: a module that is whole only while it computes
#
# `FullySharded` keeps one flat shard. In forward the full parameters are gathered, put where the
# module's code looks for them (`setattr(linear, "weight", view)`), used, and let go; in backward
# the same once more, and the gradient leaves as a reduce-scatter. Four pieces are yours:
#
# - `Unshard`: an autograd function from the shard to the full flat tensor and back,
# - `expose` and `release`: put views of the full tensor into the module, and take them out,
# - `before_backward`: called when the gradient reaches the module's output,
# - `pack` and `unpack`: autograd saves weights for backward, and would keep all of them alive. With
#   [saved-tensor hooks](https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc)
#   you decide what it keeps instead.
#
# <details><summary>Hint 1: Unshard</summary>
#
# Forward returns `owner.gather()`. Its backward is called when every gradient of the full tensor is
# there, which is also the moment to let the parameters go.
# </details>
# <details><summary>Hint 2: expose</summary>
#
# `self.places` is a list of (shape, [(owner, name), …]). `full.split(sizes)` keeps the graph: the
# gradient of `full` comes together from the gradients of its pieces. Do not forget the padding at
# the end. Remember `full` in `self.full`, so that `release` knows there is something to let go.
# </details>
# <details><summary>Hint 3: pack</summary>
#
# A saved weight is a view of `self.full` (the same storage, `untyped_storage().data_ptr()`). Return
# its shape, strides and offset instead; `unpack` makes the same view with `as_strided` of the
# parameters that `before_backward` gathered. Everything else is returned as it is.
# </details>
# <details><summary>Hint 4: before_backward</summary>
#
# Gather and expose, unless the parameters are there; as leaves that require a gradient and under
# `torch.enable_grad()`, since a checkpoint inside the module recomputes on them. If the shard's gradient is not asked for,
# `Unshard.backward` never runs: `after_backward(f)` calls f when backward is over.
# </details>

# %% exercise="shardbook.parallel.zero.Unshard shardbook.parallel.zero.own_parameters shardbook.parallel.zero.FullySharded" blank="Unshard expose release before_backward pack unpack"

# %%
check.fully_sharded(FullySharded)

# %% [markdown]
# **Compare two traces.** What one wrapped layer of 35 parameters (padded to 36) has to call in a
# step, written down, and what yours called: `diff` names the first call that differs.


# %%
def one_layer():
    layer = FullySharded(nn.Linear(6, 5).to(sb.device()))
    layer(torch.ones(3, 6, device=sb.device())).sum().backward()


step = [("all_gather", 36 * 4), ("all_gather", 36 * 4), ("reduce_scatter", 36 * 4)]
expected = expected_calls({rank: step for rank in range(WORLD)})
print(sb.run(one_layer, world_size=WORLD, trace=True).trace.diff(expected))

# %% [markdown]
# **Predict.** Wrap both blocks and the rest: three modules. Calls and bytes of a step?

# %% predict="gathers scatters"
gathers = (2 * 3, 2 * 4 * PARAMS)
scatters = (3, 4 * PARAMS)


# %%
def wrap(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullySharded(block)
    return FullySharded(model)


def sharded_step():
    model = wrap(tiny_lm().to(sb.device()))
    tokens, targets = my_part(0)
    with calls.record() as log:
        token_loss(model(tokens), targets).backward()
    return calls.summary(log)


found = sb.run(sharded_step, world_size=WORLD).values[0]
sb.predict("all-gathers", gathers, found["all_gather"])
sb.predict("reduce-scatters", scatters, found["reduce_scatter"])

# %% [markdown]
# ## Exercise 6: the norm of a gradient nobody has whole
#
# Clip by the norm of the full gradient, of which each rank holds a part. One all-reduce of one
# number; a rank without any gradient takes part.
#
# <details><summary>Hint 1: the sum</summary>
#
# Squares add up, norms do not: all-reduce the sum of squares, then take the root.
# </details>
# <details><summary>Hint 2: nobody stays away</summary>
#
# A rank without any gradient has the sum 0 and calls the all-reduce all the same, or the others wait.
# </details>
# <details><summary>Hint 3: the factor</summary>
#
# max_norm / (norm + 1e-6), at most 1, the same on every rank. Return the norm before clipping.
# </details>

# %%
from shardbook import device as default_device

# %% exercise="shardbook.parallel.zero.clip_grad_norm_sharded_"

# %%
check.clip_grad_norm_sharded_(clip_grad_norm_sharded_)

# %% [markdown]
# ## All of it together
#
# Train the small model with your four ways, and draw the losses on top of one process.


# %%
def losses(strategy, steps=25):
    world = dist.get_world_size()
    model = tiny_lm().to(sb.device())
    if strategy == "bucketed":
        model = BucketedDataParallel(model, bucket_bytes=100_000)
    if strategy == "fully sharded":
        model = wrap(model)
    make = ZeroAdamW if strategy == "sharded optimizer" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        tokens, targets = my_part(step)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        if strategy == "averaged":
            average_gradients_(model)
        if strategy == "bucketed":
            model.finish()
        if strategy == "fully sharded":
            clip_grad_norm_sharded_(model.parameters(), 100.0)  # far above: changes nothing
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        curve.append(mean.item())
    return curve


def all_losses(strategies):
    return {strategy: losses(strategy) for strategy in strategies}


ways = ["averaged", "bucketed", "sharded optimizer", "fully sharded"]
curves = sb.run(all_losses, ["one process"], world_size=1).values[0]
curves |= sb.run(all_losses, ways, world_size=WORLD).values[0]
plot.curves(curves, "step", "loss")
plt.show()
for name in ways:
    worst = max(abs(a - b) for a, b in zip(curves[name], curves["one process"], strict=True))
    print(f"{name:18} on the curve of one process: {worst < 1e-3}")

# %% [markdown]
# ## On a real cluster
#
# - Save a cell's function with its `sb.run` into `train.py` and start
#   `torchrun --nnodes 2 --nproc-per-node 8 train.py`: under torchrun `sb.run` runs in place, on HCCL,
#   NCCL or gloo, whatever `sb.backend()` says.
# - Choose `bucket_bytes` from a trace: the last bucket should be small (nothing hides it), the others
#   large enough that the link's bandwidth and not its latency counts.
# - With many hosts, shard inside a host and replicate between hosts: a reduce-scatter inside, an
#   all-reduce of the shards between. Both groups come from `dist.new_group`, and every function you
#   wrote takes `group`.
# - Compare with `torch.distributed.fsdp.fully_shard` before you trust your own: it prefetches the
#   next module's parameters while this one computes, which yours does not.
