# %% [markdown]
# # Start here
#
# shardbook takes you from the strides of a tensor to training and serving a model over many
# devices, on Ascend NPUs, CUDA GPUs or a laptop's CPU. You run real ranks in a cell, see what they
# did in a trace under it, write each piece yourself, and a check tells whether it holds.
#
# This page takes ten minutes: a first run on four ranks, the map, how labs work, your progress, and
# the device you are on.

# %% [markdown]
# ## A training step on four ranks
#
# Run the two cells below: click into the first and press Shift+Enter twice. `sb.run` starts four
# processes, each a *rank* with `torch.distributed` ready. Each of them trains the same tiny
# language model on its own quarter of a batch, and they average their gradients.

# %%
import shardbook as sb

import torch
import torch.distributed as dist

from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss


def step():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_lm().to(sb.device())  # the same weights on every rank
    tokens, targets = counting_batch(step=0)  # [4, 64] each, the same on every rank
    mine = slice(rank, rank + 1)  # this rank's sequence of the batch
    with sb.mark("forward and backward"):
        logits = model(tokens[mine].to(sb.device()))  # [1, 64, vocab]
        loss = token_loss(logits, targets[mine].to(sb.device()))
        loss.backward()
    with sb.mark("average the gradients"):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, averaged over {world} ranks")
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


result = sb.run(step, world_size=4, trace=True)

# %% [markdown]
# Is that the step that one process would take with the whole batch? It is if every gradient is the
# same, on every rank. So compute them here, without ranks, and compare all of them:

# %%
model = tiny_lm().to(sb.device())
tokens, targets = (x.to(sb.device()) for x in counting_batch(step=0))
token_loss(model(tokens), targets).backward()  # the mean over all 4 sequences

worst = max(
    (gradients[name] - p.grad.cpu()).abs().max().item()
    for gradients in result.values
    for name, p in model.named_parameters()
)
print(len(result.values), "ranks,", len(result.values[0]), "gradients each")
print("all within 1e-6 of the one process:", worst < 1e-6)

# %% [markdown]
# They take the same step. And this is what they did, a lane for each rank. Click a slice to read what
# it is; from then on the wheel zooms in the picture, until you press Esc or the mouse leaves it
# (Ctrl + wheel zooms at once; else the wheel scrolls the notebook). Drag over lanes to sum up a
# stretch of them, press `?` for all keys.

# %% tags=["nbval-ignore-output"]
result.trace

# %% [markdown]
# Each rank's modules nest as the model does, forward and then backward; the slices named
# `all_reduce` are the ranks talking. How is the time of a rank divided between the two?

# %% tags=["nbval-ignore-output"]
slices = [e for e in result.trace.chrome()["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
took = {
    name: sum(e["dur"] for e in slices if e["name"] == name) / 1000
    for name in ("forward and backward", "average the gradients")
}
calls = sum(e["name"].startswith("all_reduce") for e in slices)
for name, ms in took.items():
    print(f"{name:<22} {ms:6.1f} ms, {ms / sum(took.values()):.0%} of the two")
print(f"{calls} all-reduces for {len(result.values[0])} gradients")
if sb.device().type == "cpu":  # an accelerator spends its first step on loading kernels
    assert took["average the gradients"] > took["forward and backward"]

# %% [markdown]
# When this page was made, on a CPU, the larger part was not computing. It went into one small
# all-reduce after another, one for each parameter, and nearly all of *that* is the cost of starting
# a message, not of its bytes. Chapter 13 measures the two costs, chapter 21 sends all
# gradients in one message and hides it behind the backward pass. Finding such a thing and mending it
# is what this book is about.
#
# *Open in Perfetto* under the picture shows the same trace in a
# full-screen tool, from this machine, without a network. If you see a still picture only: in Jupyter
# run the cell, or use *Trust Notebook* from the command palette; a site like GitHub shows no more.

# %% [markdown]
# ## The map
#
# A chapter is a lesson you read and run, a lab in which you write the pieces, and a solution.
# A lab of chapter *n* needs only what chapters before it taught. The first digit is the part of the
# book (1 foundations, 2 training in parallel, 3 attention and serving, 4 models), the second counts
# inside it; gaps are left for chapters to come. 02 stands before the parts because it is about
# machines: read it when you have an NPU. Times are for reading, then for the lab.
#
# | chapter | you will write | time |
# |---|---|---|
# | [02 · running on Ascend](02_running_on_ascend.ipynb) | (to read) what an NPU needs, one card to two hosts | 10 min |
# | **foundations** | | |
# | [11 · tensors](11_tensors.ipynb) | strides, views, shards, patches, windows | 40 min + 60–90 min |
# | [12 · tracing a model](12_tracing.ipynb) | a module tracer, a Chrome trace, a parameter table | 40 min + 60–90 min |
# | [13 · communication](13_communication.ipynb) | ring and tree collectives from send and recv | 1 h + 2–3 h |
# | **training in parallel** | | |
# | [21 · data parallel](21_data_parallel.ipynb) | gradient buckets, ZeRO, sharded parameters | 50 min + 3 h |
# | [22 · tensor parallel](22_tensor_parallel.ipynb) | column and row layers, attention, vocabulary, sequence | 75 min + 2–3 h |
# | [23 · pipeline parallel](23_pipeline_parallel.ipynb) | GPipe, 1F1B, interleaved schedules, a runner | 1 h + 2–3 h |
# | [24 · context parallel](24_context_parallel.ipynb) | ring attention, zigzag, Ulysses | 75 min + 2–3 h |
# | [25 · expert parallel](25_expert_parallel.ipynb) | routing, capacity, dispatch and combine | 70 min + 2–3 h |
# | **attention and serving** | | |
# | [31 · flash attention](31_flash_attention.ipynb) | online softmax, tiles, the backward pass | 1 h + 3 h |
# | [32 · KV cache](32_kv_cache.ipynb) | the cache, cached attention, generation | 1 h + 2 h |
# | **models** | | |
# | [43 · diffusion](43_diffusion.ipynb) | a diffusion transformer, flow matching, sampling | 90 min + 90 min |
# | [44 · DiT port](44_dit_port.ipynb) | 3-D rotary embedding, tensor and sequence parallel DiT | 100 min + 2 h |
#
# New to tensors of many dimensions: start at 11. Fluent in PyTorch and here to shard a model: read
# 13, then 21 and 22. Porting CUDA code to NPUs: 02, 13, 22 and 24, then 44, which cuts a model in
# the ways of those two. A letter or a word that you know by another name:
# [symbols and words](../GLOSSARY.md), with the Chinese terms, NCCL's and HCCL's names and Megatron-LM's
# flags.

# %% [markdown]
# ## How a lab works
#
# A lab gives the signature and what the function must do; its body is yours. Run the cell under it
# to check what you wrote, as often as you like. Here is an exercise and a wrong answer to it:

# %%
from shardbook.checks import tensors as check


def merge_heads(x):
    """[B, H, S, D] -> contiguous [B, S, H*D]."""
    return x.reshape(x.shape[0], x.shape[2], -1)


check.merge_heads(merge_heads)

# %% [markdown]
# Every line is a property the answer must have, and the hint belongs to the first that fails. A
# check compares with something computed another way, counts the bytes that were sent where that
# matters, and tries sizes that don't divide.
#
# An exercise you have not written yet says so and nothing else, so a lab can be run from top to
# bottom at any time:


# %%
def split_heads(x, num_heads):
    """[B, S, H*D] -> [B, H, S, D]."""
    raise NotImplementedError("exercise 1: split_heads is not written yet")


check.split_heads(split_heads)

# %%
split_heads(None, 2)

# %% [markdown]
# Before you measure something, you predict it. A prediction that fails teaches more than a number
# that is read off:

# %%
predicted = 4 * 64 * 64  # a batch of 4, 64 tokens, an embedding of 64
sb.predict("values in the embedded batch", predicted, tiny_lm().embed(counting_batch(0)[0]).numel())

# %% [markdown]
# The same checks run in a terminal, on a Python file or a notebook of yours:
# `python -m shardbook check 11 labs/11_tensors.ipynb`.

# %% [markdown]
# ## My progress
#
# What you passed in the labs, and with `python -m shardbook check`. It is kept for you, not for this
# folder: another clone shows the same. Run the cell to see where you are.

# %% tags=["nbval-ignore-output"]
from shardbook.notebook import progress

print(progress.table())

# %% [markdown]
# ## My device
#
# Labs never name a device: they ask `sb.device()`, and `sb.backend()` for what its ranks talk
# through. This is yours, and why it is no other. With fewer accelerators than ranks, the ranks run
# on the CPU; everything works there, at sizes that fit.

# %% tags=["nbval-ignore-output"]
from shardbook.devices import describe

print(describe())

# %% [markdown]
# Next: [11 · tensors](11_tensors.ipynb).
