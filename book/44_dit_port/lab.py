# %% [markdown]
# # 44 · The port: the lab
#
# You write what a port of a video diffusion transformer needs: rotary positions without complex
# numbers, the block over ranks by heads, the model over ranks by tokens, and the preference loss.
# Two hours.
#
# Every check runs your code on real groups of 1 to 4 ranks where it has ranks, compares values and
# gradients with the whole model, and counts calls, bytes and memory. Groups need not begin at
# rank 0: use `dist.get_rank(group)`.

# %%
import shardbook as sb

import copy

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook import calls, plot
from shardbook.checks import dit_port as check
from shardbook.models.dit import DiT, DiTBlock, modulate

# Given: a process group or None, and a mode that replaces torch's attention.
from shardbook.models.dit_parallel import Group, attending

# Given: from chapters 22 and 24.
from shardbook.parallel.tensor import (
    ColumnParallelLinear,  # (linear, group): f, then this rank's rows
    RowParallelLinear,  # (linear, group): this rank's columns, then g and the bias
    gather_from_group,  # (x, dim, group): all parts; backward keeps our own
    share_of,  # (total, size, what): total / size, or a ValueError that names what
    take_rows,  # (linear, rows): nn.Linear of these output rows, in memory of its own
)
from shardbook.parallel.ulysses import ulysses_attention

# %% [markdown]
# ## Exercise 1: find the habits
#
# Before you write, read. In this piece of code six lines stop or differ on an NPU. Write their
# numbers (the first line is 1), with the severity you expect, then ask the checker.

# %%
code = """
import torch
from torch import cuda as gpu

def freqs(steps, device):
    table = torch.linspace(0, 1, steps, dtype=torch.float64)
    return table.to(device)

def step(model, x, y, scaler, rank):
    gpu.manual_seed(7)
    x = x.to("cuda:%d" % rank)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x, freqs(8, x.device)).square().mean()
    if x.is_cuda:
        gpu.synchronize()
    return loss
""".strip()
for i, line in enumerate(code.splitlines(), 1):
    print(f"{i:2} {line}")

# %% predict="lines"
lines = [
    6,
    9,
    10,
    11,
    13,
    14,
]  # the cast after the move, the seed, the device, autocast, branch, sync

# %%
from shardbook.port.scan import scan_source

found = scan_source(code)
for finding in found:
    print(f"{finding.line:2} {finding.severity:6} {finding.rule}")
sb.predict("lines", lines, sorted({finding.line for finding in found}))

# %% [markdown]
# ## Exercise 2: rotary positions over frames, rows and columns
#
# `rope_3d(positions, head_dim, split)`: positions `[S, 3]`, `split` says how many channels of a head
# turn with each axis. In the block of an axis with n channels, channels 2i and 2i+1 turn by
# `position * 10000^(-2i / n)`. Return cos and sin `[S, head_dim]` in fp32. A split that is odd or
# does not sum to the head is a `ValueError`.
#
# `apply_rope(x, cos, sin)`: x `[B, H, S, D]`; the pair (a, b) becomes (a cos - b sin, b cos + a sin),
# computed in fp32, returned in x's dtype. No float64, no complex numbers: an NPU has few kernels for
# them.
#
# <details><summary>Hint 1</summary>
#
# One angle for each pair, then `repeat_interleave(2, dim=-1)` for both of its channels.
# </details>
# <details><summary>Hint 2</summary>
#
# `x[..., 0::2]` and `x[..., 1::2]` are all a and all b. Stack (-b, a) and flatten: that is x turned by
# a quarter, and the result is `x * cos + turned * sin`.
# </details>
# <details><summary>Hint 3</summary>
#
# Where an axis has 0 channels, `-2i / n` divides by zero: `max(n, 1)`. New tensors on
# `positions.device`.
# </details>

# %% exercise="shardbook.models.rope3d.rope_3d shardbook.models.rope3d.apply_rope"

# %%
check.rope_3d(rope_3d)

# %%
check.apply_rope(apply_rope)


# %%
def shifted():
    """Scores of two clips, the second one 5 frames later, with your tables."""
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).to(sb.device())
    q, k = (torch.randn(1, 1, 12, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    q, k = q.to(sb.device()), k.to(sb.device())
    scores = []
    for offset in (0, 5):
        later = grid + torch.tensor([offset, 0, 0], device=grid.device)
        tables = rope_3d(later, 12, (4, 4, 4))
        scores.append(apply_rope(q, *tables) @ apply_rope(k, *tables).transpose(2, 3))
    return (scores[0] - scores[1]).abs().max().item()


print("scores depend on distances only, within 1e-4:", shifted() < 1e-4)

# %% [markdown]
# ## Exercise 3: the block by heads
#
# A `DiTBlock` cut over the ranks: a copy of the block, whose forward stays what it is, with the
# parallel layers of chapter 22 in place of the four of `attn` and `mlp`. The norms and adaLN stay
# whole.
#
# First a prediction: bytes all-reduced by a forward of x `[2, 12, 24]` in fp32, and does the number
# depend on the ranks?

# %% predict="predicted"
predicted = 2 * 2 * 12 * 24 * 4  # two all-reduces of x's size, on any number of ranks


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# qkv and fc1 are column parallel, proj and fc2 row parallel: f is in the first two, g in the other
# two. A rank computes `num_heads / P` heads.
# </details>
# <details><summary>Hint 2</summary>
#
# A fused qkv is three matrices, and `ColumnParallelLinear` gives rank r the r-th part of the rows.
# So first put the rows in the order in which the ranks want them: `take_rows(attn.qkv, rows)`.
# </details>
# <details><summary>Hint 3</summary>
#
# f comes *after* the modulation. Then the gradient that reaches shift and scale is the full one on
# every rank, and so is adaLN's.
# </details>
# <details><summary>Hint 4</summary>
#
# Row 0 of `torch.arange(out_features).view(3, P, -1)` is q; column r of it is rank r's.
# </details>

# %% exercise="shardbook.models.dit_parallel.TensorParallelDiTBlock"

# %%
check.tensor_parallel_dit_block(TensorParallelDiTBlock)


# %%
def block_bytes():
    block = TensorParallelDiTBlock(DiTBlock(24, 4).to(sb.device()))
    x, c = torch.randn(2, 12, 24).to(sb.device()), torch.randn(2, 24).to(sb.device())
    with calls.record() as log, torch.no_grad():
        block(x, c)
    return calls.summary(log)["all_reduce"][1]


measured = [sb.run(block_bytes, world_size=p).values[0] for p in (2, 4)]
sb.predict("bytes all-reduced, 2 ranks", predicted, measured[0])
sb.predict("bytes all-reduced, 4 ranks", predicted, measured[1])

# %% [markdown]
# ## Exercise 4: the model by tokens
#
# `ulysses_dit_forward(model, x, t, labels, group)` runs a whole model whose source you may not
# change: it has `blocks`, called as `block(tokens, c, rope=...)`, and a `final_layer`. Between them
# every rank keeps S/P tokens; the full output comes back on every rank; the model is as it was
# afterwards.
#
# <details><summary>Hint 1</summary>
#
# `register_forward_pre_hook(hook, with_kwargs=True)` on the blocks can replace tokens and rope,
# `register_forward_hook` on the final layer can replace the output.
# </details>
# <details><summary>Hint 2</summary>
#
# Tokens are cut once, before the first block. The tables are cut before *every* block, with the
# piece of this rank: its positions do not begin at 0.
# </details>
# <details><summary>Hint 3</summary>
#
# `with attending(ulysses_attention, group):` around the model's call.
# </details>
# <details><summary>Hint 4</summary>
#
# Remove the hooks in `finally`. Refuse tokens that do not divide; Ulysses refuses the heads.
# </details>

# %% exercise="shardbook.models.dit_parallel.ulysses_dit_forward"

# %%
check.ulysses_dit_forward(ulysses_dit_forward)

# %% [markdown]
# ### A trace to read
#
# A small video model over four ranks. How many all-to-alls has a block, which of its modules have a
# quarter of the tokens, and which have all?


# %% tags=["nbval-ignore-output"]
def clip():
    generator = torch.Generator().manual_seed(0)
    model = DiT(1, (4, 8, 8), 48, 2, 4, 12, patch=2).to(sb.device())
    video = torch.randn(1, 1, 4, 8, 8, generator=generator).to(sb.device())
    t, label = torch.tensor([0.4]).to(sb.device()), torch.tensor([3]).to(sb.device())
    with sb.mark("by tokens"), torch.no_grad():
        ulysses_dit_forward(model, video, t, label)


sb.run(clip, world_size=4, trace=True).trace

# %% [markdown]
# ### A failure to provoke
#
# A rank that keeps the whole table gets an error, if it is lucky. One that takes the first S/P rows
# gets none. What do you expect of the output, on which ranks?


# %%
def first_rows():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 8, 6, generator=generator).to(sb.device())
    angle = torch.arange(8.0)[:, None] * torch.ones(6)
    cos, sin = angle.cos().to(sb.device()), angle.sin().to(sb.device())
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = apply_rope(q, cos, sin)
    whole = F.scaled_dot_product_attention(whole, whole, q)
    mine = q.chunk(world, 2)[rank]
    wrong = apply_rope(mine, cos[: mine.shape[2]], sin[: mine.shape[2]])
    out = ulysses_attention(wrong, wrong, mine)
    return bool((out - whole.chunk(world, 2)[rank]).abs().max() < 1e-5)


print("right on ranks 0 to 3:", sb.run(first_rows, world_size=4).values)

# %% [markdown]
# ## Exercise 5: prefer
#
# `video_dpo_loss(model_win, model_lose, ref_win, ref_lose, beta)`, from squared errors `[B]` on the
# preferred video and on the other. Errors, so smaller is better. The mean of
# `-log sigmoid(-beta * advantage)`, where the advantage is how much more the model's error exceeds
# the reference's on the winner than on the loser.
#
# <details><summary>Hint 1</summary>
#
# `(model_win - ref_win) - (model_lose - ref_lose)`. If it is negative, the model does what we want.
# </details>
# <details><summary>Hint 2</summary>
#
# `F.logsigmoid`: the log of a sigmoid that has underflowed to 0 is -inf.
# </details>

# %% exercise="shardbook.models.diffusion.video_dpo_loss"

# %%
check.video_dpo_loss(video_dpo_loss)


# %%
def slopes():
    """The loss and its gradients, where model and reference are one."""
    errors = [torch.full((4,), 0.5, device=sb.device(), requires_grad=True) for _ in range(2)]
    loss = video_dpo_loss(*errors, *[e.detach() for e in errors], 2.0)
    win, lose = torch.autograd.grad(loss, errors)
    return round(loss.item(), 3), win.sum().item(), lose.sum().item()


loss, win, lose = slopes()
print(f"loss {loss}, gradient of the winner's error {win:.2f}, of the loser's {lose:.2f}")

# %% [markdown]
# ## On a real cluster
#
# - `python -m shardbook port PATH` on a project of yours; then one device against the CPU in fp32,
#   before any rank. A port is proven by equal losses from equal noise, not by a curve that falls.
# - In a `.py` file that ends in `sb.run(…)` (chapter 02 has an example) and is started with `torchrun`,
#   `sb.run` runs in place on the ranks it made, with HCCL, NCCL or gloo.
# - On an Ascend NPU, attention goes to `npu_fusion_attention` through SDPA; time it once against the
#   `[B, S, H, D]` call before you transpose anything.
# - For long videos cut tokens across hosts and heads inside: the lesson's 2 x 2 mesh, larger.
