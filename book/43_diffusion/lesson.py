# %% [markdown]
# # 43 · Latent diffusion from nothing
#
# After this chapter you can
# - draw a latent diffusion model and name the module, shape and cost of every box,
# - train one on two CPU cores, with flow matching or DDPM, and say what is different,
# - judge samples with numbers that can fail: class accuracy, and Fréchet distance with its floor,
# - compare your diffusion transformer and your sampler with those of diffusers,
# - make it a video model: tokens over frames, rows and columns, RoPE-3D, trained on two ranks.
#
# Time: 90 minutes to read, of which the cells take two; 90 minutes for the lab. Chapter 12
# has the trace, chapter 21 data parallelism.

# %%
import shardbook as sb

import copy
import inspect
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.patches import FancyBboxPatch

from torch import nn

from shardbook import plot
from shardbook.studies import video
from shardbook.models.diffusion import (
    ddim_sample,
    ddpm_loss,
    euler_sample,
    flow_matching_loss,
    guided,
)
from shardbook.studies.digits import digits, judge, train_classifier
from shardbook.models.dit import DiT, DiTBlock
from shardbook.models.rope3d import apply_rope, rope_3d
from shardbook.studies.shapes import DIRECTIONS, SHAPES
from shardbook.studies.train import seeded, train
from shardbook.models.vae import VAE, vae_loss

torch.set_num_threads(1)  # sums in one order: the same numbers in every run
device = sb.device()

# %% [markdown]
# ## The figure
#
# Every latent diffusion paper has it in some form. Training uses the upper row from left to the
# middle; sampling starts at the noise and goes to the right.


# %%
def draw_figure():
    _, (ax,) = plot.figure(9, 3.4)
    boxes = [
        (0.0, 2, "image\n[1, 16, 16]", 7),
        (2.1, 2, "VAE.encoder", 0),
        (4.2, 2, "latent\n[4, 4, 4]", 7),
        (6.3, 2, "DiT.blocks\n16 tokens", 1),
        (8.4, 2, "VAE.decoder", 0),
        (10.5, 2, "sample\n[1, 16, 16]", 7),
        (4.2, 0, "noise\n[4, 4, 4]", 7),
        (6.3, 0, "t_embedder(t) +\ny_embedder(label)", 2),
    ]
    for x, y, text, colour in boxes:
        ax.add_patch(
            FancyBboxPatch(
                (x, y),
                1.7,
                0.9,
                boxstyle="round,pad=0.05",
                facecolor=plot.COLOURS[colour],
                edgecolor="black",
                alpha=0.5,
            )
        )
        ax.text(x + 0.85, y + 0.45, text, ha="center", va="center", fontsize=9)

    def arrow(start, end, **style):
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", **style})

    for x in (1.77, 3.87, 5.97, 8.07, 10.17):
        arrow((x, 2.45), (x + 0.28, 2.45))
    arrow((5.05, 0.97), (5.05, 1.93))  # noise is mixed into the latent
    arrow((7.15, 0.97), (7.15, 1.93))  # the condition
    arrow((8.05, 2.98), (6.25, 2.98), connectionstyle="arc3,rad=0.5")
    ax.text(7.15, 3.5, "20 steps", ha="center", fontsize=9)
    ax.set(xlim=(-0.2, 12.4), ylim=(-0.3, 3.9))
    ax.axis("off")


draw_figure()
plt.show()

# %% [markdown]
# ## Why latents?
#
# A transformer pays for tokens. Our image has 256 pixels; its latent has 4 x 4 places. The VAE is
# run once a sample, the denoiser 20 times or more. So make the repeated part small.


# %%
def flops_per_step(tokens, dim=64, depth=4):
    """Multiply-adds times two of a DiT's blocks: 12 D^2 a token in weights, 2 S D in scores."""
    return 2 * depth * tokens * (12 * dim**2 + 2 * tokens * dim)


pixels, latents = flops_per_step(16 * 16), flops_per_step(4 * 4)
print(f"pixels : 256 tokens, {pixels / 1e6:6.1f} MFLOPs a step")
print(f"latents:  16 tokens, {latents / 1e6:6.1f} MFLOPs a step: {pixels / latents:.1f} times less")

# %% [markdown]
# In Stable Diffusion the ratio is larger: 512 x 512 x 3 values become 64 x 64 x 4, 48 times fewer
# ([arXiv 2112.10752](https://arxiv.org/abs/2112.10752)).
#
# ## Data, and a judge
#
# Samples that look good prove little: they may all be the same one. Before we train anything, we
# build what can say no.
#
# - **Class accuracy**: a classifier, trained on the real images, looks at samples. Are they what
#   was asked for?
# - **Fréchet distance** (FD): take the classifier's 64 features of real and of generated images,
#   as two Gaussians, and measure the distance of these
#   ([arXiv 1706.08500](https://arxiv.org/abs/1706.08500)). Samples without variety have a small
#   covariance, and the distance sees it.
#
# FD between two sets of *real* images is not 0, because sets are finite. That is the floor: a perfect
# sampler lands near it, a little above or below. It depends on the number of images, so use the same
# everywhere.

# %%
images, labels, test_images, test_labels = (t.to(device) for t in digits())
classifier = train_classifier(images, labels)
on_test = judge(classifier, test_images, test_labels, test_images)
print(f"{len(images)} images to train, {len(test_images)} to test, {tuple(images.shape[1:])}")
print("classifier right on at least 95 % of the test images:", on_test["accuracy"] >= 0.95)

N = 500  # samples for every judgement
floor = judge(classifier, images[:N], labels[:N], test_images)["frechet"]
one_class = judge(classifier, images[labels == 3], labels[labels == 3], test_images)["frechet"]
print("FD of one digit only is more than ten times the floor:", one_class > 10 * floor)

# %% tags=["nbval-ignore-output"]
print(f"classifier {on_test['accuracy']:.3f}   floor {floor:.1f}   threes only {one_class:.0f}")

# %% [markdown]
# ## The VAE
#
# A reconstruction loss, plus a little KL divergence so that the latent is smooth. Then one step
# that is easy to forget: **standardise**. The diffusion model will mix latents with noise of
# variance 1; if latents have another variance, "half noise" is not half.


# %%
def vae_batch_loss(model, generator):
    pick = torch.randint(len(images), (64,), generator=generator).to(device)
    noise = torch.randn(64, 4, 4, 4, generator=generator).to(device)
    return vae_loss(model, images[pick], noise)


# %% tags=["nbval-ignore-output"]
vae, vae_losses = train(
    seeded(VAE, 0).to(device), vae_batch_loss, steps=400, lr=2e-3, warmup=50, ema=0.98,
    weight_decay=0.0, report=lambda step, loss: print(f"step {step}: loss {loss:.4f}"),
)  # fmt: skip

# %%
spread = vae.encode(images).std().item()
vae.standardise(images)
latents = vae.encode(images)  # [1400, 4, 4, 4]
decoded = judge(classifier, vae.decode(vae.encode(test_images)), test_labels, test_images)
print(f"{sum(p.numel() for p in vae.parameters()):,} parameters")
print("latents were not of deviation 1:", abs(spread - 1) > 0.02)
print("standardised:", abs(latents.std().item() - 1) < 0.01)
print("decoded test images recognised, at least 95 %:", decoded["accuracy"] >= 0.95)


# %%
def show(rows, titles, scale=0.55):
    """Images in a grid: each row [n, 1, R, W], a title at its left."""
    _, axes = plt.subplots(
        len(rows), len(rows[0]), squeeze=False, layout="constrained",
        figsize=(scale * len(rows[0]) + 1.2, scale * len(rows)),
    )  # fmt: skip
    for line, row, title in zip(axes, rows, titles, strict=True):
        for ax, image in zip(line, row.cpu(), strict=True):
            ax.imshow(image[0], cmap="gray", vmin=-1, vmax=1)
            ax.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)


show([test_images[:12], vae.decode(vae.encode(test_images[:12]))], ["image", "decoded"])
plt.show()

# %% [markdown]
# ## The denoiser
#
# `shardbook.models.dit` is the DiT of [arXiv 2212.09748](https://arxiv.org/abs/2212.09748). What
# is new against the transformer of chapter 12 is how the condition enters. Time and label become
# one vector `c`, and **adaLN-Zero** turns it into six vectors a block: shift, scale and gate for
# attention, and the same for the MLP. They are zero at first, so a new block is the identity, and a
# deep stack of new blocks is too: training starts from something harmless.


# %%
def new_dit(kind):
    scale = 1000.0 if kind == "flow" else 1.0  # t in [0, 1], or a step of 0 to 999
    return seeded(lambda: DiT(4, (4, 4), 64, 4, 4, num_classes=10, time_scale=scale), 0)


x, c = torch.randn(2, 16, 64), torch.randn(2, 64)
print("a new block is the identity:", torch.equal(DiTBlock(64, 4)(x, c), x))

model = new_dit("flow").to(device)
total = sum(p.numel() for p in model.parameters())
modulation = sum(p.numel() for n, p in model.named_parameters() if "adaLN" in n)
print(f"{total:,} parameters, {modulation:,} of them ({100 * modulation // total} %) in adaLN")

# %% [markdown]
# A third of the parameters for a modulation that is computed once a *sample*, not once a token: it
# costs little time. The trace shows it.
#
# ## The figure, traced
#
# The figure's three boxes in one module: encode, denoise once under a condition, decode. `x_t` is a
# mixture of latent and noise; the model says in which direction the noise is. Open a block of
# `dit` in the trace and compare `adaLN_modulation` with `mlp`.


# %% tags=["nbval-ignore-output"]
class LatentDiffusion(nn.Module):
    """The figure: encode an image, mix noise in, take it out in one step, decode."""

    def __init__(self, vae, dit):
        super().__init__()
        self.vae, self.dit = vae, dit

    def forward(self, image, noise, t, label):
        at = t.view(-1, 1, 1, 1)
        x_t = (1 - at) * self.vae.encode(image) + at * noise  # [B, 4, 4, 4]
        return self.vae.decode(x_t - at * self.dit(x_t, t, label))


whole = LatentDiffusion(vae, model)
noise = torch.randn(64, 4, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
inputs = images[:64], noise, torch.full((64,), 0.5).to(device), labels[:64]
with torch.no_grad():
    whole(*inputs)  # once before: the first run sets things up
    with sb.trace(whole, flops=True) as traced:
        whole(*inputs)
traced

# %%
figure_to_code = {
    "encode": "vae.encoder",
    "denoise": "dit",
    "  patches to tokens": "dit.x_embedder",
    "  time": "dit.t_embedder",
    "  label": "dit.y_embedder",
    "  block": "dit.blocks.0",
    "    shift, scale, gate": "dit.blocks.0.adaLN_modulation",
    "    attention": "dit.blocks.0.attn",
    "    mlp": "dit.blocks.0.mlp",
    "  tokens to patches": "dit.final_layer",
    "decode": "vae.decoder",
}
rows = {row["name"]: row for row in traced.table()}
print(f"{'box':23}{'module':30}{'parameters':>10}  output")
for box, name in figure_to_code.items():
    row = rows[name]
    shape = row["outputs"].removeprefix("float32")
    print(f"{box:23}{name:30}{row['parameters']:>10,}  {shape}")

# %% tags=["nbval-ignore-output"]
for box in ("encode", "denoise", "decode"):
    row = rows[figure_to_code[box]]
    print(f"{box:8}{row['ms']:7.1f} ms{row['flops'] / 1e6:8.0f} MFLOPs for 64 images")

# %% [markdown]
# The denoiser does most of the work already in one step, and a sample takes 20 of them.
#
# ## Two ways to learn
#
# Both mix data `x` with noise and ask the model about the mixture. (Flow matching in general, for
# paths of other shapes too, is [arXiv 2210.02747](https://arxiv.org/abs/2210.02747); the straight
# path below is that of rectified flow.)
#
# | | DDPM ([2006.11239](https://arxiv.org/abs/2006.11239)) | Flow matching ([2209.03003](https://arxiv.org/abs/2209.03003)) |
# |---|---|---|
# | mixture | $\sqrt{a_t}\,x + \sqrt{1-a_t}\,n$ | $(1-t)\,x + t\,n$ |
# | model says | the noise $n$ | the velocity $n - x$ |
# | t | 1,000 integer steps, a table $a_t$ | a number in [0, 1] |
# | sampling | DDIM: solve for $x$, mix again | Euler: $x \leftarrow x - v/\text{steps}$ |
#
# For both, one label in ten is replaced by "no label". Guidance will need it. And both keep a
# moving average (EMA) of the weights, which is what we sample from.
#
# The two trainings don't talk to each other, so they are two ranks: flow matching is rank 0 and
# DDPM rank 1, at the same time, from the same weights, the same batches, for the same steps.

# %%
alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)  # fp32, made on the host


def drop_labels(labels, generator, null=10, share=0.1):
    return torch.where(torch.rand(len(labels), generator=generator) < share, null, labels)


def learn(latents, labels, steps):
    """Rank 0 learns by flow matching, rank 1 by DDPM: (weights of the average, losses)."""
    kind = ["flow", "ddpm"][dist.get_rank()]
    where = sb.device()
    alphas = alphas_cumprod.to(where)

    def batch_loss(model, generator):
        pick = torch.randint(len(latents), (64,), generator=generator)
        noise = torch.randn(64, 4, 4, 4, generator=generator).to(where)
        z, y = latents[pick].to(where), drop_labels(labels[pick], generator).to(where)
        if kind == "flow":  # more often in the middle, where it is hard (arXiv 2403.03206)
            t = torch.sigmoid(torch.randn(64, generator=generator)).to(where)
            return flow_matching_loss(model, z, y, noise, t)
        t = torch.randint(1000, (64,), generator=generator).to(where)
        return ddpm_loss(model, z, y, noise, t, alphas)

    def report(step, loss):
        print(f"{kind} step {step:4}: loss {loss:.3f}", flush=True)

    average, losses = train(
        new_dit(kind).to(where), batch_loss, steps, lr=6e-3, report=report, every=175
    )
    return {name: value.cpu() for name, value in average.state_dict().items()}, losses


# %% tags=["nbval-ignore-output"]
run = sb.run(learn, latents.cpu(), labels.cpu(), 700, world_size=2, timeout=1800)
(flow_weights, flow_losses), (ddpm_weights, ddpm_losses) = run.values


# %%
def smooth(values, window=40):
    means = torch.tensor(values).unfold(0, window, window // 4).mean(1)
    return means.tolist()


plot.curves(
    {"flow matching": smooth(flow_losses), "DDPM": smooth(ddpm_losses)},
    xlabel="tens of steps",
    ylabel="squared error",
    title="Two losses that can't be compared",
)
plt.show()
late = [sum(v[-100:]) / sum(v[:100]) for v in (flow_losses, ddpm_losses)]
print("both losses fell below half of what they were:", all(r < 0.5 for r in late))

# %% [markdown]
# DDPM's loss is much lower, and says nothing: at most of its steps the mixture is nearly all noise,
# and the noise is easy to tell then. **A diffusion loss can't be compared between objectives**, and
# hardly between runs. This is why we built the judge.
#
# ## Noise becomes digits

# %%
flow = new_dit("flow").to(device).eval().requires_grad_(False)
flow.load_state_dict(flow_weights)
ten = torch.arange(10, device=device)
start = torch.randn(10, 4, 4, 4, generator=torch.Generator().manual_seed(3)).to(device)

stages, at = [start], start
for i in range(20):
    t = torch.full((10,), 1 - i / 20).to(device)
    at = at - guided(flow, at, t, ten, 2.0, 10) / 20
    stages.append(at)
show([vae.decode(stages[i]) for i in (0, 5, 10, 15, 20)], [f"step {i}" for i in (0, 5, 10, 15, 20)])
plt.show()
same = torch.equal(at, euler_sample(flow, start, ten, 20, 2.0, 10))
print("these are the steps of euler_sample:", same)


# %% [markdown]
# ## Judged
#
# 500 samples of each model, 50 of each class, 20 steps. Sampling is data parallel without any
# communication: every rank takes its part of the noise. The noise is drawn once, on the CPU, since
# every kind of device has another generator.


# %%
def draw(kind, weights, noise, labels, guidance):
    """This rank's part of the samples."""
    where = sb.device()
    model = new_dit(kind).to(where).eval()
    model.load_state_dict(weights)
    rank, size = dist.get_rank(), dist.get_world_size()
    noise, labels = noise.chunk(size)[rank].to(where), labels.chunk(size)[rank].to(where)
    if kind == "flow":
        return euler_sample(model, noise, labels, 20, guidance, 10).cpu()
    return ddim_sample(model, noise, labels, 20, alphas_cumprod.to(where), guidance, 10).cpu()


def samples(kind, weights, guidance):
    """Judgement and images of N samples."""
    noise = torch.randn(N, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    asked = torch.arange(10).repeat(N // 10)
    parts = sb.run(draw, kind, weights, noise, asked, guidance, world_size=2, timeout=300).values
    made = vae.decode(torch.cat(parts).to(device))
    return judge(classifier, made, asked.to(device), test_images), made


judged = {g: samples("flow", flow_weights, float(g)) for g in (1, 2, 3, 4)}
judged_ddpm = samples("ddpm", ddpm_weights, 1.0)

# %% tags=["nbval-ignore-output"]
print(f"floor                        FD {floor:6.1f}")
for g, (scores, _) in judged.items():
    accuracy, distance = scores.values()
    print(f"flow matching, guidance {g}: accuracy {accuracy:.3f}, FD {distance:6.1f}")
accuracy, distance = judged_ddpm[0].values()
print(f"DDPM, guidance 1:          accuracy {accuracy:.3f}, FD {distance:6.1f}")

# %%
plain, strong = judged[1][0], judged[2][0]
print("guidance 1: accuracy at least 0.90:", plain["accuracy"] >= 0.90)
print("guidance 1: FD at most twice the floor:", plain["frechet"] <= 2 * floor)
print("guidance 2: accuracy at least 0.98:", strong["accuracy"] >= 0.98)
print("flow matching ahead of DDPM, accuracy:", plain["accuracy"] > judged_ddpm[0]["accuracy"])
print("flow matching ahead of DDPM, FD:", plain["frechet"] < judged_ddpm[0]["frechet"])

# %% [markdown]
# The same network, data, training steps and sampling steps, and flow matching is ahead. More sampling
# steps do not close the gap: with 20, 50, 100 and 250 of them this DDPM's distance stays between 58
# and 50 (measured apart, in a run like this one). It is a difference of what was learned in a short
# training, and one run of each says nothing about long ones.
#
# ## Guidance 1 to 4
#
# Guidance asks the model twice, with and without the label, and goes further along the difference:
# $u + g\,(c - u)$ ([arXiv 2207.12598](https://arxiv.org/abs/2207.12598)). What does it cost?

# %%
fig, (left, right) = plot.figure(8, 2.8, columns=2)
gs = list(judged)
left.plot(gs, [judged[g][0]["accuracy"] for g in gs], marker="o")
left.set(xlabel="guidance", ylabel="class accuracy", xticks=gs)
right.plot(gs, [judged[g][0]["frechet"] for g in gs], marker="o", color=plot.COLOURS[1])
right.axhline(floor, color="#666666", linestyle="--", linewidth=1)
right.set(xlabel="guidance", ylabel="Fréchet distance", xticks=gs, ylim=(0, None))
right.text(gs[-1], floor, "floor", ha="right", va="bottom", color="#666666")
plt.show()

# %%
threes = [made[3:123:10] for _, made in judged.values()]
show(threes, [f"guidance {g}" for g in gs])
plt.show()


# %%
def variety(made):
    """Mean deviation of a pixel over the samples of one class."""
    return made.view(N // 10, 10, -1).std(0).mean().item()


print("accuracy rises from 1 to 2:", strong["accuracy"] > plain["accuracy"])
print("FD rises from 1 to 4:", judged[4][0]["frechet"] > plain["frechet"])
print("variety falls from 1 to 4:", variety(judged[4][1]) < variety(judged[1][1]))

# %% [markdown]
# Twelve threes from the same noise. Samples become clearer and more alike: accuracy is bought with
# variety, and with twice the work, because a guided step is a batch twice as large. Accuracy alone
# would have called guidance 4 the best.
#
# One image of each class, in columns, at guidance 2:

# %%
show([judged[2][1][10 * i : 10 * i + 10] for i in range(4)], [""] * 4)
plot.show("Samples, four rows: in each a digit of every class from 0 to 9.")

# %% [markdown]
# ## What breaks in practice
#
# Nothing of this raises an error. What do these slips cost? We take the trained model and sample
# with one thing wrong: time that is not scaled to the embedding's 0 to 1000, time that runs the
# other way (public code has both conventions: in some, t = 0 is noise), latents decoded without
# undoing the standardisation.


# %%
def accuracy_with(model, decode=vae.decode, count=100):
    noise = torch.randn(count, 4, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    asked = torch.arange(10).repeat(count // 10).to(device)
    made = decode(euler_sample(model, noise, asked, 20))
    return judge(classifier, made, asked, test_images)["accuracy"]


unscaled = copy.deepcopy(flow)
unscaled.time_scale = 1.0
slips = {
    "as trained": accuracy_with(flow),
    "t not scaled": accuracy_with(unscaled),
    "t reversed": accuracy_with(lambda x, t, y: flow(x, 1 - t, y)),
    "label 0 for all": accuracy_with(lambda x, t, y: flow(x, t, y * 0)),
    "not scaled back": accuracy_with(flow, lambda z: vae.decoder(z).detach().clamp(-1, 1)),
}
for name in ("t not scaled", "t reversed", "label 0 for all"):
    loss = slips["as trained"] - slips[name]
    print(f"{name:16} costs at least 5 points of accuracy: {loss >= 0.05}")

# %% tags=["nbval-ignore-output"]
for name, value in slips.items():
    print(f"{name:16} accuracy {value:.2f}")

# %% [markdown]
# None of them is a crash, and reversed time still draws most digits: looking at a few samples
# would not have found it. Forgetting to scale back is nearly invisible here, because our KL term
# has left the latents almost standard. In Stable Diffusion the factor is 0.18215. A small test case
# can be too kind: compare values with the code you port from, not only results.
#
# ## Is it the DiT?
#
# The strongest test of a model is somebody else's. diffusers has `DiTTransformer2DModel`; with our
# trained weights in it, the outputs should be equal. Four things stand in the way, all silent (three
# are diffusers', one is ours):
#
# 1. it repeats the embedders of time and label in every block: copy them into each;
# 2. its time embedding divides by `half - 1` (`downscale_freq_shift=1`), DiT's by `half`;
# 3. its `norm3` has an eps of 1e-5, DiT's norms 1e-6;
# 4. its position table begins with columns, as DiT's own code does; ours begins with rows.

# %%
warnings.filterwarnings("ignore", module="tqdm")  # diffusers' progress bar misses a widget
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler


def as_diffusers(dit):
    """diffusers' module with the weights of ours, patch 1, on the CPU."""
    state = {n: v.detach().cpu() for n, v in dit.state_dict(keep_vars=True).items()}
    dim, channels = state["x_embedder.weight"].shape
    heads = dit.blocks[0].attn.num_heads
    theirs = DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=dim // heads, in_channels=channels,
        out_channels=channels, num_layers=len(dit.blocks), sample_size=dit.grid[-1], patch_size=1,
        num_embeds_ada_norm=len(state["y_embedder.weight"]) - 1, norm_num_groups=channels,
    ).eval()  # fmt: skip
    names = {"pos_embed.proj": "x_embedder", "proj_out_1": "final_layer.adaLN_modulation.1"}
    names["proj_out_2"] = "final_layer.linear"
    for i in range(len(dit.blocks)):
        a, b = f"transformer_blocks.{i}.", f"blocks.{i}."
        names |= {
            a + "norm1.emb.timestep_embedder.linear_1": "t_embedder.0",
            a + "norm1.emb.timestep_embedder.linear_2": "t_embedder.2",
            a + "norm1.emb.class_embedder.embedding_table": "y_embedder",
            a + "norm1.linear": b + "adaLN_modulation.1",
            a + "attn1.to_out.0": b + "attn.proj",
            a + "ff.net.0.proj": b + "mlp.fc1",
            a + "ff.net.2": b + "mlp.fc2",
        }
        for part in ("weight", "bias"):
            qkv = state[f"{b}attn.qkv.{part}"].chunk(3)
            for name, value in zip("qkv", qkv, strict=True):
                theirs.get_submodule(f"{a}attn1.to_{name}").get_parameter(part).data = value
    for name, ours in names.items():
        for part, p in theirs.get_submodule(name).named_parameters():
            p.data = state[f"{ours}.{part}"].view_as(p)
    return theirs


def align(theirs):
    """The settings of the DiT paper's own code."""
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
        block.norm3.eps = 1e-6
    table = theirs.pos_embed.pos_embed
    columns, rows = table.chunk(2, dim=-1)
    theirs.pos_embed.pos_embed = torch.cat([rows, columns], dim=-1).to(table)


theirs, ours = as_diffusers(flow), copy.deepcopy(flow).cpu()
z, y = torch.randn(20, 4, 4, 4, generator=torch.Generator().manual_seed(7)), torch.arange(20) % 11
t = torch.linspace(0.05, 1, 20)


def difference():
    with torch.no_grad():
        return (theirs(z, t * 1000, y).sample - ours(z, t, y)).abs().max().item()


print("weights copied, settings as they come: within 1e-5:", difference() < 1e-5)
align(theirs)
print("settings of the DiT code:              within 1e-5:", difference() < 1e-5)

# %% [markdown]
# And the sampler. `FlowMatchEulerDiscreteScheduler` is three lines of Euler, if it is given the
# times. Left alone it chooses 1 to 1/1000 instead of 1 to 1/steps, and the last step is another.


# %%
def with_diffusers(noise, labels, steps, explicit):
    scheduler = FlowMatchEulerDiscreteScheduler()
    sigmas = torch.linspace(1, 1 / steps, steps).tolist()
    scheduler.set_timesteps(**({"sigmas": sigmas} if explicit else {"num_inference_steps": steps}))
    x = noise
    for step in scheduler.timesteps:
        with torch.no_grad():
            v = ours(x, step.expand(len(x)) / 1000, labels)
        x = scheduler.step(v, step, x).prev_sample
    return x


mine = euler_sample(ours, z, y, 20)
for explicit in (False, True):
    apart = (with_diffusers(z, y, 20, explicit) - mine).abs().max().item()
    print(f"explicit sigmas {explicit!s:5}: within 1e-4: {apart < 1e-4}")


# %% [markdown]
# ## Moving shapes: the same for videos
#
# A video adds one axis. Our set: three shapes, four directions, a pixel a frame; a label is a
# shape and a direction. The judge is a classifier again, which sees the six frames as channels.

# %%
train_clips, train_labels = video.clips(2000, seed=0)
test_clips, test_clip_labels = (v.to(device) for v in video.clips(480, seed=1))
watcher = video.video_classifier(train_clips.to(device), train_labels.to(device))
on_test = video.judge_videos(watcher, test_clips, test_clip_labels, test_clips)
names = [f"{shape} {direction}" for shape in SHAPES for direction in DIRECTIONS]
print(f"{len(train_clips)} clips of {tuple(train_clips.shape[1:])}, {len(names)} labels")
print("shape and direction of test clips right, at least 99 %:", on_test["both"] >= 0.99)

# %% [markdown]
# **Tokens** are patches of 4 x 4 pixels of one frame, counted over frames, rows and columns.
# **Full 3D attention** lets every token see every other, in all frames. Earlier video models
# attended inside a frame and along time by turns, which is cheaper; but what moves is then at
# the same place in no two frames.

# %%
positions = torch.cartesian_prod(torch.arange(6), torch.arange(3), torch.arange(3))  # [54, 3]
for token in (0, 1, 3, 9, 53):
    print(f"token {token:2} is frame, row, column", positions[token].tolist())
full = len(positions) ** 2
by_turns = 6 * 9**2 + 9 * 6**2  # 9 tokens a frame, 6 frames
print(f"full attention: {full} pairs; inside frames, then along time: {by_turns}")

# %% [markdown]
# **RoPE-3D.** Attention itself doesn't know order. Rotary embedding turns pairs of channels of q and
# k by an angle that grows with the position; the score of two tokens then depends on the
# *difference* of their angles ([arXiv 2104.09864](https://arxiv.org/abs/2104.09864)). A video has
# three positions, so the channels of a head are divided: here 8 of 16 turn with the frame, 4 with
# the row, 4 with the column. Written with complex numbers it is a multiplication by
# exp(i angle); an NPU has few complex kernels, so we use cos and sin.

# %%
cos, sin = rope_3d(positions, 16, (8, 4, 4))  # [54, 16]
_, (ax,) = plot.figure(7, 2.6)
ax.imshow(cos.T, aspect="auto", cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
ax.set(xlabel="token", xticks=range(0, 54, 9), yticks=[3.5, 9.5, 13.5])
ax.set_yticklabels(["frame", "row", "column"])
ax.hlines([7.5, 11.5], -0.5, 53.5, color="white")
ax.set_title("cos of the angle: 16 channels of a head, three axes")
plt.show()

q, k = (torch.randn(1, 4, 54, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
later = rope_3d(positions + torch.tensor([5, 0, 0]), 16, (8, 4, 4))
scores = [apply_rope(q, *t) @ apply_rope(k, *t).transpose(-1, -2) for t in ((cos, sin), later)]
same = (scores[0] - scores[1]).abs().max().item() < 1e-4
print("all tokens five frames later, the same scores within 1e-4:", same)

# %% [markdown]
# Distances, and nothing else: which frame is the first one, RoPE doesn't say. But "to the right"
# means that the shape is at the left in the *first* frame. A large model learns that from the
# edges of the video. Ours has a minute, so its tokens also get a fixed table of places
# (`video.Places`).
#
# Training is `train` of above on two data-parallel ranks: each takes half of the batch, gradients are
# averaged (chapter 21). Rank 0 reports while it runs. One thing differs from the digits, the **times**.

# %%
print(inspect.getsource(video.learn))

# %% [markdown]
# A video repeats itself: six frames show the same shape, so at t = 0.5 the noise hides nothing. The
# direction is decided while nearly all is noise, and if these times are rare in training, the
# model never learns to obey that part of the label: it reads the direction off the mixture
# instead. So times are moved towards the noise; the larger the image or video, the further
# ([arXiv 2403.03206](https://arxiv.org/abs/2403.03206), section 5.3.2). How hidden is a clip?
# Take a mixture's nearest training clip as a guess:


# %%
def direction_read(t):
    """The share of directions that the best match over all training clips finds, at time t."""
    g = torch.Generator().manual_seed(5)
    clean = test_clips[:200].cpu()
    mixed = (1 - t) * clean + t * torch.randn(clean.shape, generator=g)
    distance = torch.cdist(mixed.flatten(1), (1 - t) * train_clips.flatten(1))
    found = train_labels[distance.argmin(1)]
    return (found % 4 == test_clip_labels[:200].cpu() % 4).float().mean().item()


# %% tags=["nbval-ignore-output"]
for t in (0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
    print(f"t = {t:.2f}: direction read off the mixture in {100 * direction_read(t):3.0f} %")


# %% tags=["nbval-ignore-output"]
def progress(step, loss):
    print(f"step {step:4}: loss {loss:.3f}", flush=True)


run = sb.run(video.learn, 700, report=progress, world_size=2, timeout=1800)
video_weights, other_rank = run.values[0][0], run.values[1][0]

# %%
equal = all(torch.equal(video_weights[name], other_rank[name]) for name in video_weights)
print("both ranks have the same weights:", equal)

asked = torch.arange(12).repeat(20)
judged_videos = {}
for g in (1, 2):
    parts = sb.run(video.draw, video_weights, asked, float(g), world_size=2, timeout=300).values
    made = torch.cat(parts).to(device)
    scores = video.judge_videos(watcher, made, asked.to(device), test_clips)
    judged_videos[g] = scores, made
    print(f"guidance {g}: shape right, at least 85 %:    ", scores["shape"] >= 0.85)
    print(f"guidance {g}: direction right, at least 90 %:", scores["direction"] >= 0.9)

# %% tags=["nbval-ignore-output"]
for g, (scores, _) in judged_videos.items():
    text = ", ".join(f"{name} {scores[name]:.3f}" for name in ("shape", "direction", "both"))
    print(f"guidance {g}: {text}; FD {scores['frechet']:.0f}")
real = train_clips[:240].to(device), train_labels[:240].to(device)  # as many as samples
floor_videos = video.judge_videos(watcher, *real, test_clips)["frechet"]
print(f"the floor, as many real clips: FD {floor_videos:.0f}")

# %% [markdown]
# Chance would be 33 % and 25 %. The Fréchet distance is stricter: the samples do what the label says,
# and are not yet as good as data. A clip of the data, and below it a sample for the same label at
# guidance 2:

# %%
shown, titles = [], []
for label in (0, 5, 10, 3):  # a square to the right, a cross to the left, …
    of_label = train_clips[train_labels == label]
    shown += [of_label[0].transpose(0, 1), judged_videos[2][1][label].transpose(0, 1)]
    titles += [f"{names[label]}, data", "sample"]
show(shown, titles)
plt.show()

# %% [markdown]
# ## On a real cluster
#
# - **Memory is weights and activations, and each strategy cuts another part**: a video latent has
#   tens of thousands of tokens, and the model has its billions of weights. Step-Video's 544 x 992
#   pixels and 204 frames are a latent of 36 x 34 x 62 = 75,888 tokens of width 6144, in 48 layers
#   ([Step-Video-T2V](https://github.com/stepfun-ai/Step-Video-T2V)). Attention over all of them is
#   cut over ranks as in chapter 24; chapter 44 does it.
# - **NPU**: fp32 or bf16, no float64: the table of alphas is made on the host and cast before it
#   moves. Noise comes from a CPU generator if a sample should be the same on every device.
#   Collectives go over HCCS in a server and RoCE between servers, by HCCL.
# - **CUDA**: the same code over NVLink and NCCL. Some trainers keep the EMA in fp32 beside bf16
#   weights: an average that moves by a thousandth does not move at all in bf16.
# - **VAE and text encoder are frozen**: encode the data set once and train from stored latents, as
#   we did, or give them ranks of their own. Decoding a video needs more memory than denoising it;
#   it is cut into tiles.
# - **Guidance** doubles the batch: two groups of ranks can each take one half (cfg parallel).
#
# Published: DiT-XL/2, 675 M parameters, reaches an FID of 2.27 on ImageNet 256 x 256 with guidance
# 1.5, after 7 M steps of 256 images ([arXiv 2212.09748](https://arxiv.org/abs/2212.09748), tables 1
# and 2). Step-Video on H20, time of one sampling iteration and memory of a card
# ([xDiT#454](https://github.com/xdit-project/xDiT/pull/454)):
#
# | cards | seconds an iteration | GB on a card |
# |---|---|---|
# | 1 | 213.6 | 92.2, of which 53.8 are the weights of attention and MLP |
# | 8, sequence parallel | 30.1 | 79.7 |
# | 8, tensor parallel | 30.4 | 30.0 |
#
# In time they are equal, though chapter 44 counts many more bytes for tensor parallel: here they do not
# decide. In memory they are not: only tensor parallel cuts the weights.
#
# Next: [the lab](../labs/43_diffusion.ipynb). Then [chapter 44](44_dit_port.ipynb) takes a project like
# this that runs on CUDA only, and ports it.
