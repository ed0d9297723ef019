# %% [markdown]
# # 44 · The port: a diffusion transformer leaves CUDA
#
# After this chapter you can
# - read a CUDA-only project and list what will stop, differ or be slow on an NPU,
# - port it step by step, and prove the port: same losses, same samples, from the same noise,
# - find the mistake that no checker finds, by comparing values,
# - run the diffusion transformer over ranks by heads, by tokens, and both, and say what it sends,
# - prefer: raise the share of what you like with video-DPO, and recognise a hacked reward.
#
# Time: 100 minutes to read, of which the cells take two; two hours for the lab. It builds on
# chapters 22 (tensor parallel), 24 (Ulysses, ring) and 43 (the DiT, flow matching).

# %%
import shardbook as sb

import inspect
import warnings
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardbook import calls, plot
from shardbook.studies import video
from shardbook.models.diffusion import video_dpo_loss
from shardbook.models.dit import DiT, DiTBlock, modulate
from shardbook.studies.preference import drift, pairs, prefer
from shardbook.models.rope3d import rope_3d
from shardbook.studies.train import seeded
from shardbook.models.dit_parallel import TensorParallelDiTBlock, attending, ulysses_dit_forward
from shardbook.parallel.ring import ring_attention
from shardbook.parallel.tensor import gather_from_group
from shardbook.parallel.ulysses import ulysses_attention
from shardbook.port.project import CudaAsCpu, modules, stub_cuda_libraries
from shardbook.port.rules import RULES

torch.set_num_threads(1)  # sums in one order: the same numbers in every run
CHAPTER = Path(sb.__file__).parents[1] / "book/44_dit_port"
ORIGINAL, PORT = CHAPTER / "cuda_project", CHAPTER / "ported_project"

# %% [markdown]
# ## What arrived
#
# Somebody's video diffusion transformer, `cuda_project`: training and sampling, seven files, written
# for this chapter in the manner of public DiT repositories. It has only ever run on NVIDIA GPUs.

# %%
for path in sorted(ORIGINAL.glob("*.py")):
    text = path.read_text().splitlines()
    print(f"{path.name:14} {len(text):4} lines   {text[0].strip(chr(34))}")

# %% [markdown]
# Before you port by hand: does somebody maintain this model for Ascend already (in MindSpeed-MM,
# for one)? Does it run with transfer_to_npu (chapter 02)? That shows within the hour what really
# stops. This chapter is for the rest: code that must run on both devices, and be proven to.
#
# ## Read it with the checker
#
# `sb.port.report` reads source without running it and follows names as far as a file shows
# (`from torch import cuda as gpu`, `"cuda:%d" % rank`, `getattr(torch, "cuda")`). On the command
# line it is `python -m shardbook port PATH`. Four severities: **breaks** stops with an error,
# **wrong** runs and differs silently, **slow**, and **style**, which has no effect.

# %%
report = sb.port.report(ORIGINAL)
for file, count in report.counts().items():
    print(f"{Path(file).name:14}", "  ".join(f"{n:3} {s}" for s, n in count.items()))
print(len(report), "findings; in the finished port:", len(sb.port.report(PORT)))

# %%
rules = Counter(f.rule for f in report.findings if f.severity == "wrong")
for rule, n in rules.most_common():
    print(f"{n} x {RULES[rule].what}\n      why      {RULES[rule].why}")
    print(f"      instead  {RULES[rule].instead}")

# %% [markdown]
# Begin with these. What *breaks* tells you itself; what is *wrong* gives a model that trains, in fp32
# although the script says bf16. (Its `torch.cuda.manual_seed_all` does nothing on an NPU. That is
# harmless here, since `torch.manual_seed` in the line above seeds every device; alone it would leave
# another seed on each start.) One of each kind, run
# here without CUDA: autocast runs on, in fp32, with a warning that a log swallows; the number of
# devices is 0, and the remainder by it raises.

# %%
layer, x = nn.Linear(3, 3), torch.ones(2, 3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        print("wrong:  under autocast for CUDA, without CUDA:", layer(x).dtype)
devices = torch.cuda.device_count()  # port: example
try:
    print("device of rank 0:", 0 % devices)
except ZeroDivisionError as error:
    print("breaks: rank % device_count():", type(error).__name__)

# %% [markdown]
# The whole table, one file at a time; open what you want to read.

# %% tags=["nbval-ignore-output"]
sb.port.report(ORIGINAL / "diffusion.py")

# %% [markdown]
# How far to trust it: on five sets of files from 27 public repositories, annotated by reading
# before it first ran on them, it found 231 of 243 places that break and 428 of 446 of any severity,
# and 8 of its 506 findings were not in the annotation (1.6 %). Of 130 findings drawn by chance from
# other files of two of the sets' repositories, 7 were judged false (5.4 %). What each set showed
# led to general rules; on the last two sets, still unseen, it was 91 of 93, 149 of 157 and 1 of 168
# (tests/port/measured.md). A checker reads one file at a time. It cannot know what a function of
# another file returns, nor that a formula is wrong. Both happen below.
#
# ## Boxes and code
#
# The port's model, traced: each box of the DiT figure (arXiv 2212.09748; chapter 43 draws ours) is one
# module. The video
# becomes `frames x rows x columns` tokens; the condition enters every block through adaLN.

# %%
port = modules(PORT, "model", "ops", "diffusion")
model = seeded(lambda: port.model.ClipDiT(), 0).to(sb.device())
frames = torch.randn(2, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1)).to(sb.device())
t, y = torch.tensor([300.0, 700.0]).to(sb.device()), torch.tensor([3, 7]).to(sb.device())
parts = {
    "patchify": model.embed,
    "timestep embedder": model.time,
    "label embedder": model.label,
    "a DiT block": model.blocks[0],
    "  its adaLN": model.blocks[0].modulation,
    "  its attention": model.blocks[0].attn,
    "  its MLP": model.blocks[0].mlp,
    "final layer": model.head,
}
for name, part in parts.items():
    print(f"{name:18} {sum(p.numel() for p in part.parameters()):7} parameters")
print("a clip becomes", 8 * 4 * 4, "tokens, each a patch of", 4 * 4, "values")

# %% tags=["nbval-ignore-output"]
with sb.trace(model) as trace, torch.no_grad():
    model(frames, t, y)
trace

# %% [markdown]
# | figure | `cuda_project` | what is CUDA's there | port |
# |---|---|---|---|
# | patchify | `model.ClipDiT.embed`, Conv3d | older CANN stops in bf16 conv3d | a Linear over each patch |
# | position | `precompute_freqs`, `apply_rotary` | float64, complex | real cos and sin, fp32 |
# | timestep | `TimestepEmbedder` | float64 on the device | fp32 |
# | adaLN, modulate | `ops.norm_modulate` | a fused op; the fallback | torch's layer_norm |
# | attention | `ops.attention`, flash_attn | the library, its layout, its fp16 | SDPA |
# | noise, time | `diffusion.flow_loss`, `sample` | CUDA's generator and types | CPU generator |
# | step | `train.train` | nccl, apex, amp, nvtx, device numbers | `device.setup`, torch |
#
# ## Port it, step by step
#
# **1. One place decides the device.** Everything else receives it. `device.py` of the port is the
# only file that may ask; it also takes the process group's backend from the device.

# %%
source = (PORT / "device.py").read_text()
print(source[source.index("def pick") : source.index("def synchronize")].strip())

# %% [markdown]
# **2. Random numbers come from the CPU.** One seed gives other numbers on every device. With a CPU
# generator and `.to(device)` a run can be compared with another device's at all. (The price is a
# copy a step; drop it when the proof is done, if it matters.)
#
# **3. Real numbers.** A complex rotary embedding multiplies the pair (a, b) by exp(i angle). The same
# is (a cos - b sin, b cos + a sin): two real tables, and fp32 is enough. Is it?

# %%
stub_cuda_libraries()
with CudaAsCpu():
    original = modules(ORIGINAL, "model", "ops")
    table = original.model.precompute_freqs(8, 4, 4, (8, 8, 8))
    q = torch.randn(2, 128, 4, 24, generator=torch.Generator().manual_seed(2))
    turned = original.model.apply_rotary(q, table)
cos, sin = port.model.rotary_tables(8, 4, 4, (8, 8, 8))
error = (port.model.apply_rotary(q, cos, sin) - turned).abs().max()
print("complex in float64:", table.dtype, "  real tables:", cos.dtype)
print("the same within 1e-5:", bool(error < 1e-5))
grid = torch.cartesian_prod(torch.arange(8), torch.arange(4), torch.arange(4))
ours = rope_3d(grid, 24, (8, 8, 8))
print("and as chapter 43's:", torch.allclose(ours[0], cos, atol=1e-6))

# %% [markdown]
# `CudaAsCpu` runs parts of the original here: inside it, "cuda" means the CPU. That is how you get
# reference numbers without a GPU. It is a reference, not a port. flash_attn is replaced by SDPA on
# the CPU, rounded to fp16 as the library does.
#
# **4. Convolution.** A patch lies inside one frame, so the Conv3d with kernel = stride (1, p, p) is a
# linear layer over p x p values. Same weights, one reshape. In April 2025 a bf16 Conv3d failed on a
# 910B ([ComfyUI#7784](https://github.com/Comfy-Org/ComfyUI/issues/7784)); CANN's
# [ops-nn](https://gitcode.com/cann/ops-nn/tree/master/conv/conv3d_v2) now names bf16 for A2 and A3.
# The linear layer runs on both.
#
# **5. Attention.** flash_attn takes `[B, S, H, D]`, SDPA `[B, H, S, D]`. Both accept the wrong layout
# without a word when the sizes allow it.

# %%
k, v = (torch.randn(q.shape, generator=torch.Generator().manual_seed(s)) for s in (3, 4))
flash = original.ops.attention(q, k, v)
sdpa = port.ops.attention(q, k, v)
wrong = F.scaled_dot_product_attention(q, k, v).flatten(2)  # attends over heads, not tokens
print("SDPA, transposed, within fp16's 5e-3:", bool((flash - sdpa).abs().max() < 5e-3))
print("SDPA, layout forgotten:              ", bool((flash - wrong).abs().max() < 5e-3))
print("and its shape is the same:           ", wrong.shape == flash.shape)

# %% [markdown]
# **6. The fused op.** `norm_modulate` calls a compiled CUDA op, and has a fallback for other devices.
# The checker says that the branch is lost on an NPU. It does not say that the fallback is right;
# nobody has ever run it. The op's contract is adaLN's: LayerNorm, times (1 + scale), plus shift.

# %%
h, shift, scale = (
    torch.randn(*s, generator=torch.Generator().manual_seed(i))
    for i, s in enumerate([(2, 128, 96), (2, 96), (2, 96)])
)
contract = modulate(F.layer_norm(h, (96,), eps=1e-6), shift, scale)
fallback = original.ops.norm_modulate(h, shift, scale)
print("the fallback:", bool((fallback - contract).abs().max() < 1e-5))
print(
    "the port:    ", bool((port.ops.norm_modulate(h, shift, scale) - contract).abs().max() < 1e-5)
)
difference = contract - fallback - F.layer_norm(h, (96,), eps=1e-6)
print("what is missing is LayerNorm(x), the 1 of 1 + scale:", bool(difference.abs().max() < 1e-5))

# %% [markdown]
# A model trained with the op and sampled with the fallback gives noise; a model *trained* with the
# fallback adapts to it, and nobody notices until a checkpoint changes machines. **Test every
# fallback against its fused op before the first training step.**
#
# **7. The rest of the list** is mechanical: `torch.autocast(device.type, …)`, torch's AdamW, no
# CUDA graph, `dist.init_process_group` with the device's backend, MAX of a flag instead of a sum
# scaled by NCCL (PREMUL_SUM), processes by spawn, one card a rank (`pick` above says so where
# there are too few). `python -m shardbook port --fix` shows the mechanical rewrites as a
# diff. Read it before you apply it: they use `torch.accelerator`, which older torch lacks, and a file
# that already chooses among several kinds of device may not want them.
#
# What a port drops belongs into its notes, or the next reader takes it for a mistake. Ours trains
# in fp32 unless told otherwise (the original in bf16), loads data without pinned memory, and has no
# `--compile`, `--graph`, `--profile` and `--device`.
#
# ## Prove it
#
# Same weights, same noise, same times: then the losses have to agree, step by step, and the samples.
# The reference is the original's model on the CPU with the fused op's contract in place of the
# fallback. First with its fp16 attention, then with attention in fp32, to see which part of the
# difference is rounding.


# %%
def filled(model, seed=0):
    """Weights from one CPU generator, none zero: adaLN-Zero would hide most of the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


def attention_in_fp32(q, k, v):
    return port.ops.attention(q, k, v)


def reference_model(fallback=False, fp16=True):
    """The original's model on the CPU."""
    ops = original.ops
    original.model.norm_modulate = ops.norm_modulate if fallback else port.ops.norm_modulate
    original.model.attention = ops.attention if fp16 else attention_in_fp32
    with CudaAsCpu():
        return filled(original.model.ClipDiT())


def learn(model, steps=12):
    """The losses of a few steps on noise clips; everything random is drawn on the CPU."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 1, 8, 16, 16, generator=generator).sign().to(device)
        labels = torch.randint(12, (4,), generator=generator).to(device)
        loss = port.diffusion.flow_loss(model, x, labels, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(model):
    labels = torch.tensor([0, 5, 11]).to(next(model.parameters()).device)
    return port.diffusion.sample(model, labels, (1, 8, 16, 16), steps=4, guidance=2.0).cpu()


ported = port.model.ClipDiT()
ported.load_state_dict(port.model.from_original(reference_model().state_dict()))
ported.to(sb.device())
samples, curves = {"the port": draw(ported)}, {"the port": learn(ported)}
for name, options in {
    "original, attention in fp32": {"fp16": False},
    "original": {},
    "original with its fallback": {"fallback": True},
}.items():
    reference = reference_model(**options)
    samples[name], curves[name] = draw(reference), learn(reference)


def agree(name, tolerance):
    loss = max(abs(a - b) for a, b in zip(curves["the port"], curves[name], strict=True))
    sample = (samples["the port"] - samples[name]).abs().max().item()
    print(f"{name:28} losses and samples within {tolerance}: {loss < tolerance}, ", end="")
    print(sample < tolerance)


agree("original, attention in fp32", 1e-4)
agree("original", 1e-2)
agree("original with its fallback", 1e-2)

# %% tags=["nbval-ignore-output"]
(ax,) = plot.curves(curves, "step", "loss").axes
ax.lines[2].set(linestyle="--")  # three of the four lie on each other
ax.legend()
plt.show()

# %% [markdown]
# With attention in fp32 the port's model agrees with the original's within 1e-4. (Its model: loss,
# sampler and optimizer are the port's in all four runs, so this test says nothing about the
# original's.) What fp16 attention adds is rounding. And the fallback passes half of the test: from
# these weights its *losses* agree within 1e-2, its samples do not. A loss that falls proves
# nothing, and a loss that agrees on average is a weak witness; samples from the same noise compound
# every error of every step.
#
# This runs in CI on the CPU and on a stand-in NPU that refuses float64, complex numbers and
# "cuda" as an NPU does: the unported project stops there only at places that the checker named, the
# port gives the same losses and samples, on 1 and on 4 ranks.
#
# ## Parallel: by heads, by tokens, or both
#
# A video has many tokens: 75,888 in Step-Video-T2V (arXiv 2502.10248), of width 6144. One block over
# four ranks, three ways, and a 2 x 2 mesh with heads cut in one direction and tokens in the other.
#
# - **Tensor parallel**: heads and hidden channels cut, all tokens on every rank. adaLN depends on
#   `[B, D]` only and stays whole; the biases of the second layers are added once.
# - **Ulysses** and **ring**: tokens cut, weights whole. Everything but attention works on single
#   tokens, so only attention communicates. A rank's rotary tables are those of *its* positions.
#
# Predict: bytes a block hands to collectives forward, B=2, S=48, D=24 in fp32, on 4 ranks.

# %% predict="tensor ulysses ring"
tensor = 2 * (2 * 48 * 24 * 4)  # two all-reduces of [B, S, D]
ulysses = 4 * (2 * 12 * 24 * 4)  # four all-to-alls of [B, S/P, D]
ring = 2 * 3 * (2 * 12 * 24 * 4)  # K and V, P - 1 times [B, S/P, D]


# %%
GRID = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(4))  # 48 tokens


def inputs():
    generator = torch.Generator().manual_seed(3)
    x, c, weight = (
        torch.randn(*s, generator=generator) for s in ((2, 48, 24), (2, 24), (2, 48, 24))
    )
    rope = tuple(table.to(sb.device()) for table in rope_3d(GRID, 6, (2, 2, 2)))
    return (*(v.to(sb.device()) for v in (x, c, weight)), rope)


def one_block():
    return filled(DiTBlock(24, 4), seed=9).to(sb.device())


def over_ranks(way):
    """(error of the output, of the gradients, bytes forward) against the whole block."""
    heads, tokens = {"tensor": (4, 1), "ulysses": (1, 4), "ring": (1, 4)}.get(way, (2, 2))
    mesh = init_device_mesh(sb.device().type, (heads, tokens), mesh_dim_names=("heads", "tokens"))
    by_heads, by_tokens = mesh["heads"].get_group(), mesh["tokens"].get_group()
    rank = dist.get_rank(by_tokens)
    x, c, weight, rope = inputs()
    whole, block = one_block(), one_block()
    expected = whole(x, c, rope=rope)
    (expected * weight).sum().backward()
    if heads > 1:
        block = TensorParallelDiTBlock(block, by_heads)
    attend = ring_attention if way == "ring" else ulysses_attention
    mine = x.chunk(tokens, 1)[rank]  # [B, S/P, D]
    tables = tuple(table.chunk(tokens)[rank] for table in rope)  # of our positions
    with calls.record() as log:
        if tokens > 1:
            with attending(attend, by_tokens):
                out = block(mine, c, rope=tables)
        else:
            out = block(mine, c, rope=tables)
    with attending(attend, by_tokens):  # backward communicates by itself
        (out * weight.chunk(tokens, 1)[rank]).sum().backward()
    grad, wanted = block.attn.proj.bias.grad, whole.attn.proj.bias.grad
    modulation = block.adaLN_modulation[1].weight.grad
    for g in (grad, modulation):
        dist.all_reduce(g, group=by_tokens)  # tokens of all ranks
    errors = [(grad - wanted).abs().max() / wanted.abs().max()]
    wanted = whole.adaLN_modulation[1].weight.grad
    errors.append((modulation - wanted).abs().max() / wanted.abs().max())
    error = (out - expected.chunk(tokens, 1)[rank]).abs().max().item()
    moved = {op: nbytes for op, (_, nbytes) in calls.summary(log).items() if op != "recv"}
    return error, max(errors).item(), moved


ways = {}
for way in ("tensor", "ulysses", "ring", "tensor 2 x ulysses 2"):
    results = sb.run(over_ranks, way, world_size=4).values
    ways[way] = results[0][2]
    out, grads = max(r[0] for r in results), max(r[1] for r in results)
    print(
        f"{way:21} output within 1e-5: {out < 1e-5}, gradients within 1e-4: {grads < 1e-4}", end=""
    )
    print("  ", results[0][2])

# %%
sb.predict("tensor ", tensor, ways["tensor"]["all_reduce"])
sb.predict("ulysses", ulysses, ways["ulysses"]["all_to_all"])
sb.predict("ring   ", ring, ways["ring"]["send"])

# %% [markdown]
# The whole model by tokens, traced on four ranks: between embedding and output each rank sees its
# own quarter of the clip. Look for the four all-to-alls of a block.


# %% tags=["nbval-ignore-output"]
def traced():
    model = filled(DiT(1, (4, 8, 8), 48, 2, 4, 12, patch=2)).to(sb.device())
    generator = torch.Generator().manual_seed(1)
    clip = torch.randn(1, 1, 4, 8, 8, generator=generator).to(sb.device())
    time, label = torch.tensor([0.4]).to(sb.device()), torch.tensor([2]).to(sb.device())
    with sb.mark("forward"), torch.no_grad():
        ulysses_dit_forward(model, clip, time, label)


sb.run(traced, world_size=4, trace=True).trace

# %% [markdown]
# ### A failure to provoke
#
# Take the tables of the first positions on every rank, as code does that builds its rotary table
# from the length of what it sees.


# %%
def first_positions():
    x, c, _, rope = inputs()
    block, rank, world = one_block(), dist.get_rank(), dist.get_world_size()
    with torch.no_grad(), attending(ulysses_attention, None):
        out = block(x.chunk(world, 1)[rank], c, rope=tuple(table[:12] for table in rope))
        out = gather_from_group(out, 1)
    expected = block(x, c, rope=rope)
    return (out - expected).abs().amax((0, 2)).view(world, -1).amax(1).gt(1e-5).tolist()


print("tokens of ranks 0 to 3 are off:", sb.run(first_positions, world_size=4).values[0])

# %% [markdown]
# Even rank 0's tokens are off: it turned its queries rightly, and met keys that were not. Nothing
# raises, and a model trained like this finds its frames in one place.
#
# ### The same block at Step-Video's size
#
# The formulas do not care about the size. One sample in bf16, forward, for one of *our* blocks:
# attention and MLP, so two all-reduces. Step-Video's own block has cross-attention to the text as
# well, a third one: that is what chapter 13 counts.

# %%
S, D = 75_888, 6144


def block_bytes(P):
    whole = S * D * 2  # bytes of [1, S, D] in bf16
    return {
        "tensor": 2 * whole,
        "ulysses": 4 * whole / P,
        "ring": 2 * (P - 1) * whole / P,
        # 4 ranks by heads, the rest by tokens: all of it on 4/P of the tokens
        "tensor x ulysses": 2 * whole * 4 / P + (4 * whole / P if P > 4 else 0),
    }


for P in (4, 8, 16):
    text = "  ".join(f"{name} {n / 1e9:.2f} GB" for name, n in block_bytes(P).items())
    print(f"{P:2} ranks: {text}")
print(f"weights of a block, bf16: {18 * D * D * 2 / 1e9:.2f} GB")

# %%
fig = plot.bars(
    {f"{P} ranks": {n: b / 1e9 for n, b in block_bytes(P).items()} for P in (4, 8, 16)},
    "GB a block, forward",
)
fig.axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# Ulysses sends less with every rank, tensor parallel never does; but only tensor parallel cuts the
# weights. Fewer bytes need not mean less time: on 8 H20, xDiT measured 30.4 s an iteration with
# tensor and 30.1 s with sequence parallel
# ([xDiT#454](https://github.com/xdit-project/xDiT/pull/454)). Of 48 heads, Ulysses divides by 4, 8
# and 16; the ring has no such limit. (Sizes handed to the collectives; a ring all-reduce puts up to
# twice that on the wire.)
#
# ## Prefer: Video-DPO
#
# A model that fits the data is not yet the one people want. Direct preference optimisation takes
# pairs, one video preferred to the other, and no reward model: the error on the winner should fall
# more than the reference's, compared with the loser (Diffusion-DPO, arXiv 2311.12908). Step-Video's
# last training stage does this with pairs that people judged. Winner and loser of a pair get the same
# noise and time, and so do model and reference. What the loss does where the two begin as one:

# %%
win, lose = (torch.full((4,), 0.5, device=sb.device(), requires_grad=True) for _ in range(2))
loss = video_dpo_loss(win, lose, win.detach(), lose.detach(), beta=20.0)
loss.backward()
print(
    f"loss {loss.item():.3f} = log 2, slope of the winner's error {win.grad.sum().item():.1f}",
    end="",
)
print(f", of the loser's {lose.grad.sum().item():.1f}")
for change in (-0.2, -0.05, 0.0, 0.05, 0.2):  # of the winner's error: below 0 is what we want
    ahead = video_dpo_loss(win + change, lose, win.detach(), lose.detach(), beta=20.0)
    slope = torch.autograd.grad(ahead, win)[0].sum().item()
    print(f"winner's error {change:+.2f}: loss {ahead.item():.3f}, slope {slope:.2f}")

# %% [markdown]
# A pair that is already told apart (the first line) pulls no more: its slope goes to 0, and beta
# says how soon. The
# loss sees only differences: it falls as well when the winner's error *rises* and the loser's rises
# more. So measure two things, the share of what you prefer among new samples, and how far the model
# has moved from its reference; the loss alone shows neither.
#
# ### What we prefer: to the right
#
# The reference is chapter 43's video model, trained again in the same way on two ranks. Asked
# without a label it draws what it likes: every direction, squares less often than crosses or
# triangles. We prefer videos that move to the right.


# %% tags=["nbval-ignore-output"]
def progress(step, loss):
    print(f"step {step:4}: loss {loss:.3f}", flush=True)


run = sb.run(video.learn, 700, report=progress, world_size=2, timeout=1800)
reference = run.values[0][0]

# %% [markdown]
# Pairs come from the reference's own samples. A classifier of shape and direction judges them, and only
# videos of which it is sure become winners (to the right) or losers (any other direction).

# %%
clips, clip_labels = video.clips(2000, seed=0)
test_clips, test_labels = video.clips(240, seed=1)
watcher = video.video_classifier(clips.to(sb.device()), clip_labels.to(sb.device()))
unlabelled = torch.full((480,), video.NO_LABEL)
drawn = sb.run(video.draw, reference, unlabelled, seed=9, world_size=2, timeout=300).values
drawn = torch.cat(drawn)  # [480, 1, 6, 12, 12]
with torch.no_grad():
    sure, found = watcher(drawn[:, 0].to(sb.device())).softmax(1).cpu().max(1)
to_the_right = found % 4 == 0
wins, losers = pairs(to_the_right, sure > 0.9, 400)
print("both kinds at least 30 times:", min(len(wins.unique()), len(losers.unique())) >= 30)

# %% tags=["nbval-ignore-output"]
print(f"{int((sure > 0.9).sum())} of {len(drawn)} are sure, ", end="")
print(f"{len(wins.unique())} winners and {len(losers.unique())} losers in {len(wins)} pairs")

# %% [markdown]
# Two ranks, two runs that don't talk to each other: rank 0 with a careful learning rate, rank 1 with
# ten times that. The same pairs, the same noise, 120 steps of 16 pairs.

# %%
RATES = {"DPO": 3e-4, "DPO, rate x 10": 3e-3}


def preferring(weights, wins, losers):
    """Each rank prefers with its own learning rate: (weights, losses)."""
    model = video.video_dit()
    model.load_state_dict(weights)
    model, where = model.to(sb.device()), sb.device()
    lr = list(RATES.values())[dist.get_rank()]
    model, losses = prefer(
        model, wins.to(where), losers.to(where), video.NO_LABEL, steps=120, beta=200.0, lr=lr
    )
    return {name: value.cpu() for name, value in model.state_dict().items()}, losses


run = sb.run(preferring, reference, drawn[wins], drawn[losers], world_size=2, timeout=900)
models = {"reference": reference}
models |= {name: weights for name, (weights, _) in zip(RATES, run.values, strict=True)}

# %% [markdown]
# Judged on new noise. *Prefers*: the share of unlabelled samples that move to the right. *Obeys*:
# samples asked for by label, does the direction still come out as asked, for all four? *Astray*: of
# those asked for another direction, the share that moves to the right. *Drift*: how much the velocity
# differs from the reference's on real clips, relative to its size.


# %%
def samples(models):
    """This rank's part of new samples of every model: without a label, and one for each label."""
    free, asked = torch.full((240,), video.NO_LABEL), torch.arange(12).repeat(10)
    return {
        name: (video.draw(weights, free, seed=5), video.draw(weights, asked, seed=6))
        for name, weights in models.items()
    }


def moved(weights):
    """drift of these weights on real clips, without a label."""
    nets = []
    for state in (weights, reference):
        nets.append(video.video_dit().to(sb.device()))
        nets[-1].load_state_dict(state)
    none = torch.full((len(test_clips),), video.NO_LABEL)
    return drift(*nets, test_clips.to(sb.device()), none.to(sb.device()))


parts = sb.run(samples, models, world_size=2, timeout=600).values
table = {}
for name, weights in models.items():
    free, asked = (torch.cat([part[name][i] for part in parts]).to(sb.device()) for i in (0, 1))
    labels = torch.arange(12).repeat(10).to(sb.device())
    with torch.no_grad():
        free, asked = (watcher(v[:, 0]).argmax(1) % 4 for v in (free, asked))  # 0 is to the right
    table[name] = {
        "prefers": (free == 0).float().mean().item(),
        "obeys": (asked == labels % 4).float().mean().item(),
        "astray": (asked[labels % 4 != 0] == 0).float().mean().item(),
        "drift": moved(weights),
    }

before, careful, hasty = table.values()
print(
    "DPO: to the right at least 1.5 times as often:", careful["prefers"] > 1.5 * before["prefers"]
)
print("     labels obeyed, at least 85 %:            ", careful["obeys"] >= 0.85)
print("     drift below 0.4:                         ", careful["drift"] < 0.4)
print("rate x 10: to the right even more often:      ", hasty["prefers"] > careful["prefers"])
print("     labels obeyed, at least 85 %:            ", hasty["obeys"] >= 0.85)
print("     asked elsewhere, to the right all the same:", hasty["astray"] > 0.3)
print("     drift more than double:                  ", hasty["drift"] > 2 * careful["drift"])

# %% tags=["nbval-ignore-output"]
for name, row in table.items():
    print(f"{name:14}", "  ".join(f"{key} {value:.2f}" for key, value in row.items()))

# %% tags=["nbval-ignore-output"]
fig = plot.bars(table, "share, and relative size")
fig.set_size_inches(9.5, 3)  # room for twelve numbers
fig.axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# The hasty model gets 1.00 of what we prefer: the judge calls every sample of it a move to the
# right, whatever was asked for (*astray* near 1; *obeys* near 0.25, what one fixed answer to four
# questions gets). Its velocity has moved away from the reference's by about as much as that velocity
# is large (*drift* near 1). Do not read this as videos that move to the right. The judge is a classifier
# of twelve classes that must name one of them, for anything, noise included, and **the same
# classifier chose the pairs**. What has been raised is its verdict. That is **reward hacking**: a
# model pushed far enough finds what the judge pays for, and it need not be what we meant. (Look at
# the samples: in a run of this training they were noise, all of one class, and their Fréchet
# distance was 34,475 against the reference's 2,550.)
#
# So never let the judge that made the preference be the only one that grades it. Keep apart: a
# second judge that saw none of the pairs, a distance from real data (chapter 43's Fréchet
# distance), the drift, a test of what the model could do before, and your own eyes. The careful
# model's numbers (preferred more often than before, as obedient as before, a drift of about a
# quarter) are consistent with a real preference; they come from the same judge and do not prove one.
#
# ## On a real cluster
#
# - On an Ascend host: CANN and torch_npu of matching versions, then `python -m shardbook doctor`. Start
#   with one device, fp32, the CPU's losses beside it; then bf16; then the ranks.
# - SDPA reaches torch_npu's fused attention in fp16 and bf16 only, in fp32 it does not; for lengths
#   that differ in a batch use `torch_npu.npu_fusion_attention` with actual sequence lengths. Try a
#   bf16 Conv3d before you rely on it: older CANN stops there.
# - HCCL has sum, product, min and max, and torch_npu makes AVG of a sum and a division. Bitwise
#   reductions exist on gloo only, PREMUL_SUM on NCCL. Create groups in the same order
#   on every rank.
# - Tensor parallel inside the host (HCCS, NVLink), tokens across hosts (RDMA): Ulysses while heads
#   divide, the ring beyond.
# - What the checker calls *slow* you measure: the profiler of torch_npu, not the one of CUDA.
#
# | published | figure | source |
# |---|---|---|
# | Step-Video-T2V | 30B parameters, 204 frames, 48 blocks, Video-DPO as the last stage | arXiv 2502.10248 |
# | Diffusion-DPO on SDXL | people preferred it to SDXL with its refiner | arXiv 2311.12908 |
# | Ulysses | communication stays constant when sequence and devices grow alike | arXiv 2309.14509 |
#
# Now do it yourself: [the lab](../labs/44_dit_port.ipynb). It is the last chapter; the map of all of
# them is on [the first page](00_start_here.ipynb).
