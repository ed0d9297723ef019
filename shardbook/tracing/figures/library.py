"""Figures of papers, redrawn in our own words."""

import difflib

TRANSFORMER = """
# Attention Is All You Need, arXiv 1706.03762, figure 1
input embedding: embedding, vocab -> d
encoder: stack
  encoder layer: block x N
    multi-head attention: attention, d -> d
    add & norm after attention: norm
    feed forward: mlp, d -> f -> d
    add & norm after feed forward: norm
decoder: stack
  decoder layer: block x N
    masked multi-head attention: attention, d -> d
    encoder-decoder attention: cross-attention, d -> d
    feed forward of the decoder: mlp, d -> f -> d
linear and softmax: head, d -> vocab
"""

VIT = """
# An Image is Worth 16x16 Words, arXiv 2010.11929, figure 1
linear projection of flattened patches: patch
position embedding: position
encoder block: block x L
  norm before attention: norm
  multi-head attention: attention, d -> d
  norm before the MLP: norm
  MLP: mlp, d -> f -> d
MLP head: head, d -> classes
"""

DIT = """
# Scalable Diffusion Models with Transformers, arXiv 2212.09748, figure 3
patchify: patch
timestep embedding: time
label embedding: embedding
DiT block: block x N
  adaLN-Zero: modulation, d -> 6d
  layer norm: norm
  multi-head self-attention: attention, d -> d
  second layer norm: norm
  pointwise feedforward: mlp, d -> 4d -> d
final layer norm: norm
linear and reshape: head
"""

UNET = """
# High-Resolution Image Synthesis with Latent Diffusion Models, arXiv 2112.10752, figure 3: U-Net
time embedding: time
first convolution: conv
down level: stage x N
  residual block: resnet
  spatial transformer: block
    self-attention: attention
    cross-attention: cross-attention
    feed-forward: mlp
  downsample: down
middle: stage
up level: stage x N
last convolution: conv
"""

VAE = """
# High-Resolution Image Synthesis with Latent Diffusion Models, arXiv 2112.10752, figure 3: E and D
encoder E: stack
  convolution of the pixels: conv, 3 -> c
  down level: stage x N
    residual block: resnet
    downsample: down
  middle of the encoder: stage
    attention of the encoder: attention
  mean and log-variance: conv
decoder D: stack
  convolution of the latent: conv
  middle of the decoder: stage
  up level: stage x N
    upsample: up
  convolution to pixels: conv, c -> 3
"""

MIXTRAL = """
# Mixtral of Experts, arXiv 2401.04088, figure 1: its layer in the whole model
token embedding: embedding, vocab -> d
layer: block x N
  attention: attention, d -> d
  mixture of experts layer: moe
    router: router, d -> n
    experts: experts
norm: norm
output: head, d -> vocab
"""

MAMBA = """
# Mamba, arXiv 2312.00752, figure 3: its block in the whole model
embedding: embedding, vocab -> d
residual block: block x N
  norm: norm
  Mamba block: ssm
    projections of both branches: linear, d -> 2e
    convolution: conv, e -> e
    projection to d: linear, e -> d
last norm: norm
output: head, d -> vocab
"""

WHISPER = """
# Robust Speech Recognition via Large-Scale Weak Supervision, arXiv 2212.04356, figure 1
encoder: stack
  first Conv1D: conv, mel -> d
  second Conv1D: conv, d -> d
  sinusoidal positions: position
  encoder block: block x N
    self attention: attention, d -> d
    MLP: mlp, d -> f -> d
decoder: stack
  token embedding: embedding, vocab -> d
  learned positions: position
  decoder block: block x N
    self attention of the decoder: attention, d -> d
    cross attention: cross-attention, d -> d
    MLP of the decoder: mlp, d -> f -> d
next-token prediction: head, d -> vocab
"""

CLIP = """
# Learning Transferable Visual Models From Natural Language Supervision, arXiv 2103.00020, figure 1
text encoder: stack
  token embedding: embedding, vocab -> t
  block of the text encoder: block x N
    attention over the text: attention, t -> t
    MLP over the text: mlp, t -> * -> t
image encoder: stack
  patch embedding: patch
  block of the image encoder: block x M
    attention over the image: attention, w -> w
    MLP over the image: mlp, w -> * -> w
projection of the image: linear, w -> e
projection of the text: linear, t -> e
"""

LLAVA = """
# Visual Instruction Tuning, arXiv 2304.08485, figure 1
vision encoder: stack
  patch embedding: patch
  vision block: block x N
    vision attention: attention, w -> w
projection: mlp, w -> d
language model: stack
  word embedding: embedding, vocab -> d
  decoder block: block x M
    causal attention: attention, d -> d
    feed forward: mlp, d -> f -> d
language response: head, d -> vocab
"""

STEP_VIDEO = """
# Step-Video-T2V Technical Report, arXiv 2502.10248, figure 3: the DiT with 3D attention
patch embedding: patch
timestep embedding: time
adaLN-single: modulation, d -> 6d
caption projection: mlp, text -> d
DiT block: block x N
  norm before attention: norm
  3D self-attention: attention, d -> d
    norm of the queries: norm
    norm of the keys: norm
  cross-attention to the text: cross-attention, d -> d
  norm before feed forward: norm
  feed forward: mlp, d -> 4d -> d
last norm: norm
linear: head
"""

GPT2 = """
# Language Models are Unsupervised Multitask Learners (2019, not on arXiv), section 2.3 as a figure
token embedding: embedding, vocab -> d
position embedding: position
block: block x N
  layer norm before attention: norm
  masked self-attention: attention, d -> d
  layer norm before feed forward: norm
  feed forward: mlp, d -> 4d -> d
last layer norm: norm
output: head, d -> vocab
"""

FIGURES = {
    "transformer": TRANSFORMER,
    "gpt-2": GPT2,
    "vit": VIT,
    "clip": CLIP,
    "llava": LLAVA,
    "whisper": WHISPER,
    "mixtral": MIXTRAL,
    "mamba": MAMBA,
    "unet": UNET,
    "vae": VAE,
    "dit": DIT,
    "step-video": STEP_VIDEO,
}


def find(figure: str) -> str:
    """The text of a figure: its own, or the library's of that name."""
    if "\n" in figure or ":" in figure:
        return figure
    name = figure.strip().lower()
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"there is no figure {figure!r}{meant}: give the text of one, a line a box, or one of "
            f"{', '.join(FIGURES)}"
        )
    return FIGURES[name]
