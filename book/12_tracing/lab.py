# %% [markdown]
# # 12 · Tracing a model: the lab
#
# You write a tracer of modules in four functions, look at its trace, and use it to find the boxes
# of a paper's figure in real models. 60 to 90 minutes.

# %%
import shardbook as sb

import time
from typing import Any

import torch
from torch import nn

from shardbook.checks import tracing as check
from shardbook.basics.tiny import counting_batch, tiny_lm
from shardbook.basics.by_hand import shapes_of

device = sb.device()

# %% [markdown]
# ## Exercise 1: who calls whom
#
# The model below has two blocks, each with two norms, attention (two linear layers) and an MLP (two
# linear layers); around them an embedding, a last norm and the head. How many module calls does one
# forward make? A `ModuleList` is a list, it is never called.

# %% predict="predicted"
predicted = 1 + 1 + 2 * (1 + 2 + 3 + 3) + 1 + 1  # model, embed, 2 blocks, norm, head
model = tiny_lm().to(device)
tokens = counting_batch(0)[0].to(device)
with sb.trace(model) as t:
    model(tokens)
sb.predict("module calls", predicted, sum(row["calls"] for row in t.table()))

# %% [markdown]
# Now write the recorder. torch calls what `register_forward_pre_hook` was given before each forward
# of a module, and what `register_forward_hook` was given after it. Both return a handle with
# `remove()`. `shapes_of(value)` is given: (shape, dtype) of a tensor, lists of those for a list,
# tuple or dict, `None` for anything else.
#
# A worked example: two modules in a `Sequential`, called on a tensor of 4 x 2, are three calls. This
# is what your function gives for them, but for `start_ns` and `end_ns`, which are readings of
# `time.monotonic_ns()` just before and just after the module's forward:

# %%
example = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).to(device)
given, made = [((4, 2), torch.float32)], [((4, 3), torch.float32)]
wanted = [
    {"name": "", "type": "Sequential", "depth": 0, "parameters": {}, "inputs": given},
    {"name": "0", "type": "Linear", "depth": 1, "inputs": given},
    {"name": "1", "type": "ReLU", "depth": 1, "parameters": {}, "inputs": made},
]
wanted[1]["parameters"] = {"weight": (3, 2), "bias": (3,)}
wanted = [event | {"outputs": made} for event in wanted]

# %% [markdown]
# The rest of the contract, with two tensors `a` of [4, 2] and `b` of [3] as arguments:
#
# - `module(a, 7, mask=b)`: `inputs` is `[((4, 2), float32), ((3,), float32)]`. Keyword arguments come
#   after the others, the 7 is no tensor and is left out.
# - `module([a, b])`: `inputs` is `[[((4, 2), float32), ((3,), float32)]]`. Nesting is kept. A module
#   that returns a tuple or a dict has `outputs` like it, as a list.
# - A module that is called twice gives two events. `parameters` are its own, not its children's.
#
# <details><summary>Hint 1</summary>
#
# Two hooks on every module. The first makes the event and puts it into the list of events *and* on
# a stack of running calls; the second takes it off the stack and completes it.
# </details>
# <details><summary>Hint 2</summary>
#
# The depth of a call is the height of the stack when it starts. `with_kwargs=True` gives the hooks
# the keyword arguments: `hook(module, args, kwargs)` and `hook(module, args, kwargs, output)`.
# </details>
# <details><summary>Hint 3</summary>
#
# `try: model(...) finally: remove all`. And what becomes of your stack when a module raises and its
# parent catches it? `always_call=True`.
# </details>

# %% exercise="shardbook.basics.by_hand.record_modules"

# %%
check.record_modules(record_modules)

# %%
events = record_modules(example, torch.ones(4, 2, device=device))
print("as in the example:", [{k: e[k] for k in wanted[0]} for e in events] == wanted)

# %% [markdown]
# Your events of the small model, indented by depth:

# %%
for event in record_modules(model, tokens)[:9]:
    outputs = ", ".join(str(list(shape)) for shape, _ in event["outputs"])
    print("  " * event["depth"] + (event["name"] or event["type"]), "->", outputs)

# %% [markdown]
# ## Exercise 2: a file that every viewer reads
#
# A Chrome trace is a dict, `{"traceEvents": […]}`, and each event is a dict. A complete event has
# `ph` "X", a `name` (here the module's; of the root, whose name is empty, its type), `pid` and `tid`
# (which process and thread: here the rank and 1), `ts` and `dur` in **microseconds** from the start
# of the first event, and `args` for whatever you like to see when you click it. Times must come back
# within a nanosecond, and json must be able to write it all.
#
# Predict: a clock counts from 1970 and shows 1,790,000,000,123,456,789 ns. Written in microseconds
# as a float, is the next nanosecond another number?

# %% predict="predicted"
predicted = False  # the next nanosecond is another float, in microseconds: True or False?
now = 1_790_000_000_123_456_789
sb.predict("the next nanosecond is another float", predicted, now / 1000 != (now + 1) / 1000)
print("it survives the way back:", round(now / 1000 * 1000) == now)

# %% [markdown]
# At 1.8e15 a float has steps of 0.25: a quarter of a microsecond. With the nanoseconds goes the
# nesting of short calls, and Perfetto drops a slice that sticks out of the one it began in: its
# overview counts that among the trace's errors, the timeline shows nothing. Times rounded to two
# digits have the same fate.
#
# <details><summary>Hint 1</summary>
#
# Subtract the first event's start while the times are whole numbers, divide then.
# </details>
# <details><summary>Hint 2</summary>
#
# "First" is the smallest start, whatever the order of the list. No events: an empty list.
# </details>
# <details><summary>Hint 3</summary>
#
# json knows no dtype. `str(event["inputs"])` will do.
# </details>

# %% exercise="shardbook.basics.by_hand.to_chrome"

# %%
check.to_chrome(to_chrome)

# %% [markdown]
# **A trace to read.** Your recorder, your file, in the viewer. Which call has the largest part that
# none of its children explains? (Click a slice: "own" is the time without the children.)

# %% tags=["nbval-ignore-output"]
record_modules(model, tokens)  # the first run sets things up
chrome = to_chrome(record_modules(model, tokens))
lanes = [("process_name", "tiny_lm"), ("thread_name", "modules, by my hooks")]
chrome["traceEvents"] += [
    {"ph": "M", "name": what, "pid": 0, "tid": 1, "args": {"name": name}} for what, name in lanes
]  # events "M" name a process and its threads
sb.show(chrome, title="my own tracer")

# %% [markdown]
# <details><summary>What to look for</summary>
#
# A module that computes in functions instead of children: attention's scores and softmax belong to no
# module, so they are the attention's own; a block's own part is its two additions.
# </details>
#
# ## Exercise 3: where the parameters are
#
# Per module, subtree included, the number and the bytes of its parameters. The trap is sharing:
# GPT-2 and many others use one matrix as the embedding and as the head. Predict the total with the
# head tied to the embedding (vocabulary 64, width 64; untied it is 108,288).

# %% predict="predicted"
predicted = 108_288 - 64 * 64  # the head's matrix is the embedding's
tied = tiny_lm()
tied.head.weight = tied.embed.weight
sb.predict("parameters", predicted, sum(p.numel() for p in tied.parameters()))
one_by_one = sum(p.numel() for m in tied.modules() for p in m.parameters(recurse=False))
print("added up module by module it would be", one_by_one)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `module.parameters()` walks the subtree and gives each parameter once.
# </details>
# <details><summary>Hint 2</summary>
#
# `p.element_size()` is the bytes of one element: 2 for bfloat16.
# </details>
# <details><summary>Hint 3</summary>
#
# If you add up the children instead, remember the parameters you have seen by `id(p)`: a tied one
# comes twice. Buffers are no parameters; frozen parameters are.
# </details>

# %% exercise="shardbook.basics.by_hand.parameter_table"

# %%
check.parameter_table(parameter_table)

# %%
for name, (count, nbytes) in parameter_table(model).items():
    if name.count(".") < 2:
        print(f"{name or '(model)':12} {count:>8,} parameters {nbytes:>8,} bytes")

# %% [markdown]
# ## Exercise 4: from the figure to the model
#
# You know a figure, and a model whose names you don't. `figure` maps a label to a dict: `kind`, the
# end of a class name; `shapes`, all parameters that the module itself owns, by name; and sometimes
# `inside`, an earlier label whose module holds this one, at any depth. Find the module of each
# label. Boxes that look alike are taken in order of `named_modules()`, each module once. Where
# nothing fits, raise a ValueError that names the label.
#
# <details><summary>Hint 1</summary>
#
# For each label go through `model.named_modules()` and take the first module that fits and has no
# label yet.
# </details>
# <details><summary>Hint 2</summary>
#
# A name is inside `outer` if it begins with `outer + "."`. Mind the root, whose name is empty:
# everything but itself is inside it.
# </details>
# <details><summary>Hint 3</summary>
#
# `for … else` runs its else part where no module fitted: raise there, and name the label.
# </details>

# %% exercise="shardbook.basics.by_hand.label_figure"

# %%
check.label_figure(label_figure)

# %% [markdown]
# The right half of the paper's figure 1, in torch's decoder layer of the paper's size:

# %%
D, F = 512, 2048
attention = {
    "kind": "Attention",
    "shapes": {"in_proj_weight": (3 * D, D), "in_proj_bias": (3 * D,)},
}
norm = {"kind": "Norm", "shapes": {"weight": (D,), "bias": (D,)}}
figure = {
    "Masked Multi-Head Attention": attention,
    "Multi-Head Attention": attention,
    "Add & Norm (1)": norm,
    "Add & Norm (2)": norm,
    "Add & Norm (3)": norm,
    "Feed Forward, in": {"kind": "Linear", "shapes": {"weight": (F, D), "bias": (F,)}},
    "Feed Forward, out": {"kind": "Linear", "shapes": {"weight": (D, F), "bias": (D,)}},
}
with torch.device("meta"):
    decoder = nn.TransformerDecoderLayer(D, 8, F)
for label, name in label_figure(decoder, figure).items():
    print(f"{label:28} {name}")

# %% [markdown]
# You gave exact shapes and class names. `sb.match`, the lesson's, has kinds and letters only, and
# nothing of torch's names; do the two agree on the attention boxes and on the feed forward?

# %% predict="predicted"
predicted = True  # the same modules: True or False?
text = """
masked multi-head attention: attention, d -> d
add & norm: norm
multi-head attention: cross-attention, d -> d
add & norm: norm
feed forward: mlp, d -> f -> d
add & norm: norm
"""
theirs = [row["module"] for row in sb.match(decoder, text).table() if row["kind"] != "norm"]
labels = label_figure(decoder, figure)
yours = [labels["Masked Multi-Head Attention"], labels["Multi-Head Attention"]]
yours.append(f"{labels['Feed Forward, in']} + {labels['Feed Forward, out']}")
sb.predict("the two agree", predicted, theirs == yours)

# %% [markdown]
# ## Provoke it: hooks that stay
#
# A recorder without `finally`, and a model of two modules that fails three times. How many events does
# a run log afterwards that nobody traces?


# %%
class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] > 3:
            raise ValueError("too many rows")
        return self.line(x)


def careless(model, x, log):
    handles = [m.register_forward_hook(lambda m, a, o: log.append(m)) for m in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()


# %% predict="predicted"
fragile, log = Fragile().to(device), []
predicted = 3 * 2  # three failed runs, two modules each
for rows in (4, 5, 6):
    try:
        careless(fragile, torch.ones(rows, 4, device=device), log)
    except ValueError as error:
        print(error)
fragile(torch.ones(1, 4, device=device))
sb.predict("events of an untraced run", predicted, len(log))

# %% [markdown]
# Three failed runs left three hooks on each of the two modules, so a run that nobody traces logs six
# events. In a notebook this grows with every cell you run again: the model gets slower, memory is
# held by the log, and nothing says why. The same happens with profilers that are started and never
# stopped.
#
# ## On a real cluster
#
# Every rank would record its own events; `pid` is the rank, so the files of all ranks can be joined
# into one list. `sb.run(…, trace=True)` does that. Two things then need care. The ranks' clocks must
# be the same (they are on one host: `time.monotonic_ns()` counts from the host's start), and on an
# NPU or a GPU a call returns before the work is done, so a hook's clock times the asking. Device
# events in the stream time the work: `torch.Event(device, enable_timing=True)`, recorded in both
# hooks, read after the step.
#
# Next: [chapter 13](../notebooks/13_communication.ipynb), where ranks talk.
