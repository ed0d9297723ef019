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

import contextlib
import statistics
import tempfile
import time
import warnings

import torch
from torch import nn

from shardbook import plot
from shardbook.studies.translator import FIGURE, Translator
from shardbook.tracing.extras import quiet

device = sb.device()

# %% [markdown]
# ## The figure
#
# Figure 1 of *Attention Is All You Need* draws the whole model: an encoder, a decoder, what goes in
# and what comes out. You have a model in front of you. Which of its modules is which box?
#
# Write the figure down, one line per box: its label, what kind of thing it is, its sizes if the paper
# says them. What lies inside a box is indented under it, and the lines follow the arrows. These
# are the twenty boxes of the paper's figure; ten lines are enough for most figures.

# %%
print(FIGURE)

# %% [markdown]
# The model is torch's own `nn.Transformer`, with an embedding and a linear layer around it
# (`shardbook/studies/translator.py`). `sb.match` runs it once, and places each box: by what modules
# hold, by shapes, by the order of calls, and a little by their names.
#
# One box is no module of this model: which?

# %% predict="predicted"
predicted = ["softmax"]  # a function: it holds nothing, and nothing is called

# %%
torch.manual_seed(0)
model = Translator(97, dim=64, heads=4, hidden=256, layers=6).to(device)
source, target = (torch.randint(97, (2, n)).to(device) for n in (7, 5))
torch.backends.mha.set_fastpath_enabled(False)  # else whole encoder layers run as one operator
found = sb.match(model, FIGURE, source, target)
torch.backends.mha.set_fastpath_enabled(True)

sb.predict("boxes without a module", predicted, found.unplaced)
for row in found.table():
    name, made = row["module"] or "-", row.get("outputs", "").removeprefix("float32")
    name = name.replace("transformer.", "").replace("decoder.layers.0.", "…")
    call = row.get("call", "")
    print(f"{row['label']:28} {name.replace('encoder.layers.0.', '…'):23} {made:11} call {call}")

# %% [markdown]
# `found` is a mapping from label to dotted name. As a picture it is the paper's figure with the
# boxes filled in: name and type of the module, shapes in and out, parameters of all that is inside
# it, its place among the calls, milliseconds of its first call. **Click a box**: the trace below
# goes to its slice, and a slice you click frames its box. ("Add" is no module: the arrows past the
# boxes are a `+`. "Feed Forward" is two modules and a ReLU that is none.)

# %% tags=["nbval-ignore-output"]
found.draw()

# %% [markdown]
# ## A model that nobody here wrote
#
# The same text on two translation models of the `transformers` library, made small: Marian and T5.
# `confidence` says how sure each box is, from 0 to 1. `unplaced` are labels that no module fits,
# `uncovered` large modules that no label covers. And a match needs no run: without inputs it goes by
# the parameters alone. Which of the two papers' models do you expect to fit worse?

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a progress bar that it does not find
    import transformers

sizes = {"vocab_size": 97, "d_model": 64, "decoder_start_token_id": 0, "pad_token_id": 0}
marian = {f"{side}_{what}": n for side in ("encoder", "decoder")
          for what, n in {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()}  # fmt: skip
configs = {
    "Marian": transformers.MarianConfig(**sizes, **marian, eos_token_id=1),
    "T5": transformers.T5Config(**sizes, num_layers=2, num_heads=4, d_kv=16, d_ff=256),
}
inputs = {"input_ids": source.cpu(), "decoder_input_ids": target.cpu()}
for name, config in configs.items():
    theirs = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with_run, alone = sb.match(theirs, FIGURE, **inputs), sb.match(theirs, FIGURE)
    same = sum(alone.get(label) == module for label, module in with_run.items())
    print(f"{name}: {len(with_run)} boxes placed, {same} of them alike without a run.")
    print("  ", with_run.note())
    for label in sorted(with_run, key=with_run.confidence.get)[:4]:
        print(f"   {with_run.confidence[label]:.1f}  {label:20} {with_run[label]}")

# %% [markdown]
# Nearly everything is found in both. Now read the doubts, the lowest confidences, which say where the
# code is cut otherwise than the figure:
#
# - Marian's decoder holds its own embedding, which the figure draws outside. So the figure's
#   "decoder" went to the list of layers inside it, and not for sure.
# - T5 normalises *before* attention and feed forward, where the figure adds and normalises after
#   them: the layer as a whole is doubtful, and "add & norm" behind attention is the norm that
#   belongs to feed forward. And T5 needs the run: with parameters alone most labels went elsewhere.
#
# A label that fits nothing (`softmax`) is said, not forced. Check what has a low confidence by
# hand; `found.draw()` on such a model shows it quickly.
#
# `sb.match` knows a few figures by name, so `sb.match(model, "gpt-2")` needs no text at all.

# %%
from shardbook.tracing.match import names

for name, paper in names().items():
    print(f"{name:12} {paper}")

# %% [markdown]
# ## The trace
#
# One encoder layer, of the size of the paper's base model, forward and backward. `sb.trace(layer)`
# wraps the call of every module for one run, and nothing of the layer changes. Click a slice to
# read its shapes and parameters; after that the wheel zooms in the picture, until Esc.

# %%
D, H, F, B, S = 512, 8, 2048, 2, 32  # the base model of arXiv 1706.03762, table 3; a small batch
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(D, H, F, dropout=0.0, batch_first=True).to(device)
x = torch.randn(B, S, D).to(device)

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
# - **Backward runs the layer from its end to its start**, and has about twice the work: each
#   matrix product of the forward has two in backward, one for the input's gradient and one for the
#   weight's.
# - The button "memory" adds the memory of this process, as a curve.
#
# The table has the same numbers module by module; `t.table().rows` is a list of dicts. FLOPs are
# counted operator by operator with `flops=True`. Without it the table multiplies the sizes of
# linear and convolution layers, and what attention computes without such a layer is missing.

# %% tags=["nbval-ignore-output"]
with sb.trace(layer, flops=True) as counted:
    layer(x)
counted.table()

# %%
with sb.trace(layer) as t:
    layer(x)
for name, trace in {"linear layers only": t, "every product": counted}.items():
    print(f"{name:18} {trace.table()[0]['flops']:>11,} FLOPs")

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
# Does time follow FLOPs? Of each module: its share of the FLOPs, and of the time of the fastest of
# five runs. First for the layer above, then for a thin one of 32 channels that works on as many
# numbers in 64 sequences. Guess the second picture before you look.


# %%
def shares_of(layer, x):
    """Percent of the layer's FLOPs and of its time, module by module."""
    with sb.trace(layer, flops=True) as counted:
        layer(x)
    names = ["self_attn", "norm1", "linear1", "linear2", "norm2"]
    rows = {row["name"]: row for row in counted.table()}
    runs = []
    for _ in range(5):
        with sb.trace(layer) as t, torch.no_grad():
            layer(x)
        runs.append({row["name"]: row["ms"] for row in t.table()})
    flops = {n: rows[n]["flops"] or 0 for n in names}
    best = {n: min(run[n] for run in runs) for n in names}
    parts = {"FLOPs": flops, "time": best}
    return {k: {n: 100 * v[n] / sum(v.values()) for n in names} for k, v in parts.items()}


# %% tags=["nbval-ignore-output"]
wide = shares_of(layer, x)
plot.bars(wide, "% of the layer", "512 channels, 64 tokens")
said = {n: f"{n} {wide['FLOPs'][n]:.0f} and {wide['time'][n]:.0f}" for n in wide["time"]}
plot.show(f"Bars, percent of FLOPs and of time: {', '.join(said.values())}.")

thin_layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True).to(device)
thin = shares_of(thin_layer, torch.randn(64, 64, 32).to(device))
plot.bars(thin, "% of the layer", "32 channels, 4096 tokens")
said = {n: f"{n} {thin['FLOPs'][n]:.0f} and {thin['time'][n]:.0f}" for n in thin["time"]}
plot.show(f"Bars, percent of FLOPs and of time: {', '.join(said.values())}.")
products = [name for name in thin["FLOPs"] if name.startswith("linear")]
assert wide["time"]["norm1"] + wide["time"]["norm2"] < 10 or device.type != "cpu"
assert sum(thin["FLOPs"][n] for n in products) > 49
assert sum(thin["time"][n] for n in products) < 35 or device.type != "cpu"
assert thin["time"]["norm1"] > thin["FLOPs"]["norm1"] == 0

# %% [markdown]
# In the wide layer the three modules that have the FLOPs have nearly all of the time, though not in
# the same shares, and these scatter. In the thin one the two linear layers have half of the FLOPs
# and far less of the time. Attention has the other half and takes nearly all of the time:
# its products are small, and between them a softmax of every score, and copies, compute next to
# nothing and read and write everything. Norms have almost no parameters and no matrix product, yet
# they cost time. On an accelerator, where memory is slower relative to arithmetic, the share of
# such work grows. FLOPs are a promise, time is a measurement.
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
# **The first run lies.** It allocates, picks kernels, fills caches. And **tracing costs**: a few
# tens of microseconds for each call of a module. Steps of two layers in turns, untraced, traced and
# profiled. Of the small one (16 channels, 6 tokens) both tracers lengthen the step visibly; in
# the layer above (512 channels, 64 tokens) their cost is smaller than what steps scatter by, so
# there a median can come out below the untraced one. That is noise: no tracer is free. Measure with
# and without, several times, as with any instrument.


# %%
def in_turns(tracers, layer, x, rounds):
    """Milliseconds of forward and backward: tracer -> a list, the tracers taking turns."""
    times = {name: [] for name in tracers}
    for _ in range(rounds):
        for name, tracer in tracers.items():
            with quiet(), tracer(layer):
                start = time.perf_counter()
                loss = layer(x).sum()
                loss.backward()
                float(loss.detach())  # wait for the value
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


# %% tags=["nbval-ignore-output"]
cpu = [torch.profiler.ProfilerActivity.CPU]
tracers = {
    "untraced": lambda layer: contextlib.nullcontext(),
    "traced": sb.trace,
    "profiled": lambda layer: torch.profiler.profile(activities=cpu),
}
small_layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True).to(device)
small_times = in_turns(tracers, small_layer, torch.randn(2, 3, 16).to(device), rounds=25)
for size, times in {
    "16 channels": small_times,
    "512 channels": in_turns(tracers, layer, x, rounds=10),
}.items():
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{size:12} {name:9} first {values[0]:6.2f} ms, median {median:6.2f} ms")
plain, traced, profiled = (statistics.median(v) for v in small_times.values())
assert plain < traced and plain < profiled

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
