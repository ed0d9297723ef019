# %% [markdown]
# # 12 · Tracing a model
#
# After this chapter you can
# - go from a paper's figure to the modules of a model, their shapes, parameters and time,
# - read a trace: what lies in what, what waits, what is missing,
# - choose between our trace, VizTracer and torch.profiler, and say what each of them can't see.
#
# Time: 40 minutes to read, 60 to 90 minutes for the lab. One process.

# %%
import shardbook as sb

import statistics
import tempfile
import time

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch
from torch import nn

from shardbook import plot
from shardbook.tracing.extras import quiet

device = sb.device()
D, H, F, B, S = 512, 8, 2048, 2, 32  # the base model of arXiv 1706.03762, table 3; a small batch

# %% [markdown]
# ## The figure
#
# Figure 1 of *Attention Is All You Need* draws an encoder layer as four boxes. torch has the same
# layer as `nn.TransformerEncoderLayer`. Which of its modules is which box?


# %%
def arrow(ax, points):
    ax.plot(*zip(*points[:-1], strict=True), color="black", linewidth=1.2)
    ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "color": "black"})


def draw_layer(notes=None):
    """The paper's encoder layer, bottom to top, with a note beside each box."""
    fig, (ax,) = plot.figure(8, 4.6)
    boxes = ["Multi-Head\nAttention", "Add & Norm", "Feed\nForward", "Add & Norm"]
    heights = [1.0, 2.4, 3.8, 5.2]
    for i, (text, y) in enumerate(zip(boxes, heights, strict=True)):
        colour = plot.COLOURS[[1, 6, 4, 6][i]]
        size = {"boxstyle": "round,pad=0.04", "facecolor": colour, "edgecolor": "black"}
        ax.add_patch(FancyBboxPatch((1, y), 2.2, 0.8, alpha=0.55, **size))
        ax.text(2.1, y + 0.4, text, ha="center", va="center")
        ax.text(4.1, y + 0.4, (notes or [""] * 4)[i], va="center", family="monospace", fontsize=10)
    arrow(ax, [(2.1, 0.1), (2.1, 0.95)])
    for y in heights[:3]:
        arrow(ax, [(2.1, y + 0.85), (2.1, y + 1.35)])
    arrow(ax, [(2.1, 6.05), (2.1, 6.6)])
    for low, high in ((0.5, 2.8), (3.5, 5.6)):  # what goes past the box is added back
        arrow(ax, [(2.1, low), (0.5, low), (0.5, high), (0.95, high)])
    ax.set(xlim=(0, 10.5), ylim=(0, 6.8))
    ax.axis("off")
    return fig


draw_layer(["?", "?", "?", "?"])
plt.show()

# %%
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(D, H, F, dropout=0.0, batch_first=True).to(device)
x = torch.randn(B, S, D).to(device)

with sb.trace(layer, flops=True) as counted:
    layer(x)

for row in counted.table():
    print(f"{row['name'] or '(the layer)':20} {row['type']:32} -> {row['outputs']}")

# %% [markdown]
# `sb.trace(layer)` wrapped the call of every module for one run, and nothing of the layer has
# changed. Now the boxes have names. "Add" is nowhere: a `+` is no module. "Feed Forward" is two
# modules and a ReLU between that is none either. Three dropouts are not in the figure at all.

# %%
draw_layer(
    [
        f"self_attn            [{B}, {S}, {D}]",
        f"x + …, then norm1    [{B}, {S}, {D}]",
        f"linear1, linear2     [{B}, {S}, {F}] between",
        f"x + …, then norm2    [{B}, {S}, {D}]",
    ]
)
plt.show()

# %% [markdown]
# ## The trace
#
# The same layer, forward and backward. Click a slice to read its shapes and parameters; after that
# the wheel zooms in the picture, until Esc.

# %% tags=["nbval-ignore-output"]
layer(x).sum().backward()  # once before: the first run sets things up
with sb.trace(layer) as t:
    with sb.mark("forward"):
        loss = layer(x).sum()
    loss.backward()
t

# %% [markdown]
# Read it:
#
# - **A slice in a slice is a call in a call.** What a module's slice shows beside its children's is
#   its own work: in `TransformerEncoderLayer` that is the two additions and the ReLU.
# - **Backward runs the layer from its end to its start**, and takes about twice as long: each
#   matrix product of the forward has two in backward, one for the input's gradient and one for the
#   weight's.
# - The curve is the memory of this process.
#
# The table has the same numbers module by module. `t.table().rows` is a list of dicts. Its column
# of FLOPs lacks what attention itself computes: scores and projections are no modules that are
# called here. `sb.trace(layer, flops=True)`, as in `counted` above, counts every operator.

# %% tags=["nbval-ignore-output"]
t.table()

# %% [markdown]
# ## Where are the parameters, where is the work?
#
# Two questions with two answers. Parameters can be read off the figure: attention has four matrices
# $D \times D$ (q, k, v and output), the feed-forward two of $D \times F$, plus biases and norms:

# %%
attention = 4 * D * D + 4 * D
feed_forward = 2 * D * F + F + D
norms = 2 * 2 * D
rows = {row["name"]: row for row in counted.table()}
print(f"attention    {attention:>9,} = {rows['self_attn']['parameters']:,}")
measured = rows["linear1"]["parameters"] + rows["linear2"]["parameters"]
print(f"feed-forward {feed_forward:>9,} = {measured:,}")
print(f"the layer    {attention + feed_forward + norms:>9,} = {rows['']['parameters']:,}")

# %% [markdown]
# Work is counted in FLOPs (a multiply-add is two). A weight matrix meets every token once, so a
# linear layer costs 2 x its parameters x the tokens. Attention has a second part that has no
# parameters: scores and weighted sum, $4 B S^2 D$.

# %%
tokens = B * S
print("linear1   ", f"{2 * D * F * tokens:>11,} = {rows['linear1']['flops']:,}")
products = 2 * 4 * D * D * tokens
print("self_attn ", f"{products + 4 * B * S * S * D:>11,} = {rows['self_attn']['flops']:,}")

for length in (32, 512, 4096, 32768):
    weights, scores = 2 * 4 * D * D * length, 4 * length * length * D
    print(f"S = {length:>6,}: scores are {100 * scores / (weights + scores):4.1f} % of attention")

# %% [markdown]
# At 32 tokens the scores are 3 % of attention, at 32,768 they are nearly everything: the same figure,
# another computation. That is why chapters 24 and 31 exist.
#
# Does time follow FLOPs? Of each module: its share of the parameters, of the FLOPs, and of the time
# of the fastest of five runs.

# %% tags=["nbval-ignore-output"]
runs = []
for _ in range(5):
    with sb.trace(layer) as t, torch.no_grad():
        layer(x)
    runs.append({row["name"]: row["ms"] for row in t.table()})
names = ["self_attn", "norm1", "linear1", "linear2", "norm2"]
best = {name: min(run[name] for run in runs) for name in names}
shares = {
    "parameters": {n: rows[n]["parameters"] for n in names},
    "FLOPs": {n: rows[n]["flops"] or 0 for n in names},
    "time": best,
}
shares = {k: {n: 100 * v[n] / sum(v.values()) for n in names} for k, v in shares.items()}
plot.bars(shares, "% of the layer", "Where parameters, FLOPs and time are")
plt.show()

# %% [markdown]
# Here time follows FLOPs, roughly: `self_attn` takes more than its share (small products, and the
# copies between them), the two linear layers less, and the matrix products nearly all of it. Norms
# have almost no parameters and no matrix product, yet they cost time: they read and write the whole
# activation and compute next to nothing on it. On an accelerator, where memory is slower relative
# to arithmetic, their share grows. FLOPs are a promise, time is a measurement.
#
# ## The whole model of the paper
#
# Six encoder layers, six decoder layers (with a second attention and a third norm) and one
# embedding that is shared with the output. The paper gives 65 million (table 3), for a vocabulary of
# "about 37000 tokens". Counted from these parts it is 63.1 million, 3 % less; the paper does not say
# how it counted or the exact vocabulary, and 1.9 million are 3,700 rows of the embedding.

# %%
with torch.device("meta"):  # shapes without memory
    decoder = nn.TransformerDecoderLayer(D, H, F)
parts = {
    "6 encoder layers": 6 * rows[""]["parameters"],
    "6 decoder layers": 6 * sum(p.numel() for p in decoder.parameters()),
    "shared embedding": 37_000 * D,
}
for name, count in parts.items():
    print(f"{name}  {count / 1e6:5.1f} M")
print(f"together          {sum(parts.values()) / 1e6:5.1f} M")

# %% [markdown]
# ## Three tracers on one step
#
# | | sees | does not see | for |
# |---|---|---|---|
# | `sb.trace` | modules forward and backward, shapes, shards, collectives with bytes and peers, all ranks | lines of Python, operators, kernels | which part of the model, which rank, who waits for whom |
# | [VizTracer](https://github.com/gaogaotiantian/viztracer) | every Python function | what C++ does inside a call, modules, shapes | slow Python: data loading, tokenizing, bookkeeping |
# | `torch.profiler` | operators and the device's kernels, with their times on the device | modules (unless with stacks), ranks beside each other | which kernel, and whether the device has nothing to do |
#
# `python=True` and `kernels=True` put all three on one timeline. Open it and go down from a module:
# the functions it calls, the operators these call.


# %%
def step():
    layer(x).sum().backward()


# %% tags=["nbval-ignore-output"]
with sb.trace(layer, python=True, kernels=True) as everything:
    step()
everything

# %% [markdown]
# A profile that someone sent you is shown with `sb.show`: torch.profiler, torch_npu.profiler,
# VizTracer, gzipped or not.

# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder, quiet():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    profile.export_chrome_trace(f"{folder}/profile.json")
    shown = sb.show(f"{folder}/profile.json")
shown

# %% [markdown]
# ## What breaks in practice
#
# **Looking changes what you look at.** In eval mode without gradients torch runs this layer as one
# fused operator: the children are never called. But a module with a hook can't be fused, so a
# tracer made of hooks sees, and times, another computation than the one that runs without it.

# %%
fused = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
small = torch.randn(2, 3, 16)


def modules_called():
    with sb.trace(fused) as t, torch.no_grad():
        fused(small)
    return sum(row["calls"] for row in t.table())


print("modules called, no hooks:     ", modules_called())
handle = fused.linear1.register_forward_hook(lambda module, args, output: None)
print("modules called, with one hook:", modules_called())
handle.remove()

# %% [markdown]
# The table above has a smaller surprise of this kind: `self_attn.out_proj` was called 0 times.
# Its weight is used, but by a function that takes the weight, not through the module. The module
# tree is a map of the parameters, not of the computation.
#
# **A hook for backward can break the model.** `register_full_backward_hook` wraps the module's
# output, and what is wrapped can't be changed in place:

# %%
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).to(device)
handle = model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
try:
    model(torch.randn(2, 4).to(device))
except RuntimeError as error:
    print(str(error).split(". ")[0])
handle.remove()
with sb.trace(model) as t:
    model(torch.randn(2, 4).to(device)).sum().backward()
print("under sb.trace the same model runs:", t.table()[0]["calls"], "call")

# %% [markdown]
# `sb.trace` puts its backward marks on autograd's nodes when backward begins, where no tensor
# passes through them.
#
# **The first run lies.** It allocates, picks kernels, fills caches. And **tracing costs**: here are
# untraced, traced and profiled steps of the layer above (D = 512), in turns. Where steps scatter by
# more than a tracer costs, a median can come out below the untraced one: that is noise, no tracer is
# free. Measure with and without, several times, as with any instrument.


# %% tags=["nbval-ignore-output"]
def seconds(tracer):
    with quiet(), tracer():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start


def untraced():
    return torch.enable_grad()


def traced():
    return sb.trace(layer)


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


tracers = [untraced, traced, profiled]
times = {tracer.__name__: [] for tracer in tracers}
for _ in range(10):
    for tracer in tracers:
        times[tracer.__name__].append(seconds(tracer))
for name, values in times.items():
    print(
        f"{name:9} first {values[0] * 1e3:6.2f} ms, median {statistics.median(values) * 1e3:6.2f}"
    )

# %% [markdown]
# **On an accelerator the host's time is not the work's time.** A call puts kernels into a queue and
# returns. The slice of a module then shows how long it took to *ask*, and the wait appears wherever
# the program first needs a value: `loss.item()`, a copy, the end of the step. On such a device
# `sb.trace` notes the device's own time in each slice as well ("device ms"), from events in the
# stream, without waiting.
#
# ## On a real cluster
#
# **NPU.** `torch_npu.profiler.profile` takes torch.profiler's arguments; `kernels=True` uses it
# where there is one. Its `trace_view.json` opens with `sb.show`, in MindStudio Insight and in
# Perfetto. Kernel names are Ascend's (MatMulV2, TransData): look for TransData, the price of a
# format change (chapter 11), and for AI CPU kernels, which are operators without a fast kernel.
#
# **CUDA.** torch.profiler shows kernels by stream; Nsight Systems adds the driver and NCCL. Look for
# gaps between kernels: the host is too slow, the device waits.
#
# **Many hosts.** Trace few steps on few ranks: a trace of 200 MB has crashed the page that should
# show it ([viztracer#645](https://github.com/gaogaotiantian/viztracer/issues/645)), and 3.8 GB are
# beyond what Perfetto's engine can hold in a browser
# ([viztracer#308](https://github.com/gaogaotiantian/viztracer/issues/308)). The clocks of two hosts
# differ by more than a collective takes, so bars of two hosts don't line up by themselves
# ([viztracer#361](https://github.com/gaogaotiantian/viztracer/issues/361)). `sb.run(…, trace=True)`
# under torchrun measures the difference as NTP does, by messages there and back, and puts it right
# to within half a round trip; don't read more than that into bars of two hosts.
#
# Next: the [lab](../labs/12_tracing.ipynb), where you write the tracer. Then
# [chapter 13](13_communication.ipynb) puts several ranks on the timeline.
