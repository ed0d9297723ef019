"""How well a module is of a kind, 0 to 1: by its layers and their sizes, what a run showed, and,
least of all, its names.
"""

from torch import nn

from .layers import (
    attention,
    chain,
    cross,
    dense,
    embedding,
    is_layer,
    mlp,
    norm,
    once,
    pointwise,
    positional,
    self_attention,
    wave,
)
from .parts import Part, root


@once
def score(part: Part, kind: str) -> float:
    """How well `part` is of `kind`. A wrapper is less so than what it wraps."""
    if type(part.module) in LISTS and kind not in ("stack", "experts"):
        return 0.0  # no forward of its own
    found = KINDS[kind](part)
    inner = max((score(c, kind) for c in part.children), default=0) if kind in WRAPPED else 0
    return round(found * 0.85 if 0 < found <= inner + 0.1 else found, 4)


def time(part: Part) -> float:
    """An MLP of the sines of a time step."""
    if part.role or chain([p.sizes for p in dense(part)]) is None:
        return 0.0
    return 0.6 * wave(part) + 0.4 * part.says("time", "noise", "sigma")


def modulation(part: Part) -> float:
    """A linear layer from one vector a sample to several of the width of the model."""
    layers = part.layers("linear")
    if len(layers) != 1 or part.layers("conv", "embedding"):
        return 0.0
    (given, made), fed = layers[0].sizes, layers[0].inputs
    around = part.parent.children if part.role and part.parent else part.subtree()
    widths = {given, *(p.sizes[0] for p in around if p.role == "norm" and p.sizes)}
    if not any(made % width == 0 and made > width for width in widths):
        return 0.0
    vector = bool(fed) and len(fed[0][0]) == 2
    ada = part.says("ada", "mod", "scale", "shift")
    return 0.4 + 0.4 * vector + 0.2 * ada


def head(part: Part) -> float:
    """The last linear layer, in no repeated block; often as wide as the vocabulary."""
    if part.role != "linear":
        return 0.0
    inner = any(name.isdecimal() for name in part.name.split(".")[:-1])
    layers = root(part).layers("linear")
    words = {p.sizes[0] for p in root(part).layers("embedding")}
    last = layers[-1] is part
    best = 0.35 + 0.35 * last + 0.2 * (part.sizes[1] in words) + 0.1 * part.says("head", "class")
    return best * (0.3 if inner else 1)


def patch(part: Part) -> float:
    """A convolution whose steps are as long as its kernel."""
    found = part.layers("conv", "linear", "embedding")
    if [p.role for p in found] != ["conv"]:
        return 0.0
    module = found[0].module
    steps = 0.9 * (tuple(module.stride) == tuple(module.kernel_size))
    if pointwise(found[0]):  # a patch of one pixel is a convolution like others, but the first
        steps *= 0.6 if root(part).layers("conv")[0] is found[0] else 0
    return steps + 0.1 * part.says("patch")


def rotary(part: Part) -> float:
    """No parameters: a table of frequencies, and two results of one shape, cos and sin."""
    if part.numel or part.children:
        return 0.0
    two = len(part.outputs) == 2 and part.outputs[0][0] == part.outputs[1][0]
    table = any("freq" in n or "cos" in n for n, _ in part.module.named_buffers())
    return 0.35 * two + 0.35 * table + 0.3 * part.says("rot", "rope")


# ---- boxes of convolutional models


def resnet(part: Part) -> float:
    """Two convolutions with norms, and no such thing inside."""
    wide = [p for p in part.layers("conv") if not pointwise(p)]
    alike = len(wide) == 2 and len(part.layers("norm")) >= 2
    return (0.8 + 0.2 * part.says("res")) if alike and part.numel and not part.role else 0.0


def change(part: Part) -> float:
    """By what factor the places of a sample (pixels, tokens) change; 0 if it isn't known."""
    if not part.inputs or not part.outputs:
        return 0.0
    given, made = part.inputs[0][0], part.outputs[0][0]
    if len(given) != len(made) or len(given) < 3:
        return 0.0
    where = slice(2, None) if len(given) > 3 else slice(1, 2)
    sizes = [m / g for g, m in zip(given[where], made[where], strict=True) if g]
    return max(sizes) if max(sizes, default=0) > 1 else min(sizes, default=0)


def resampling(part: Part, more: bool) -> float:
    """At most one layer that changes how many places there are."""
    layers = part.layers("linear", "conv", "embedding")
    if len(layers) > 1 or (not layers and not part.outputs):
        return 0.0
    factor = change(part)
    moved = factor > 1 if more else 0 < factor < 1
    stride = max((max(p.module.stride) for p in layers if p.role == "conv"), default=1)
    if not factor and stride > 1:
        moved = more == ("Transpose" in type(layers[0].module).__name__)
    named = part.says("up") if more else part.says("down", "merg")
    step = 0.1 * bool(layers)
    return min(1.0, 0.6 * moved + 0.3 * named + step) if moved or named else 0.0


# ---- mixtures of experts, state spaces


def count(part: Part) -> int:
    """How many experts a module holds: in one tensor, or in a list."""
    cubes = [s for s in part.own.values() if len(s) == 3 and s[0] > 1]
    if cubes and len(cubes) == len([s for s in part.own.values() if len(s) > 2]) and not part.role:
        return cubes[0][0]
    rows = [c for c in part.children if c.name.rsplit(".", 1)[-1].isdecimal()]
    if len(rows) > 1 and len(rows) == len(part.children) and all(mlp(c) > 0.5 for c in rows):
        return len(rows)
    return 0


def experts(part: Part) -> float:
    """Many MLPs: matrices with one size more, or a list."""
    return 0.75 + 0.25 * part.says("expert") if count(part) else 0.0


def routed(part: Part) -> list[tuple[Part, Part]]:
    """(router, experts) in a module: a linear layer to as many as there are experts."""
    inside = part.subtree()
    many = [p for p in inside if count(p)]
    return [(r, e) for e in many for r in inside if r.role == "linear" and r.sizes[1] == count(e)]


def router(part: Part) -> float:
    """A linear layer to as many numbers as there are experts beside it."""
    up = part.parent
    if part.role != "linear" or up is None:
        return 0.0
    found = any(r is part for r, _ in routed(up))
    return 0.75 * found + 0.25 * part.says("gate", "rout") * (found or part.numel < up.numel / 8)


def moe(part: Part) -> float:
    """The smallest module with a router and its experts."""
    return 0.0 if part.layers("norm") or part.role or not routed(part) else 1.0


def ssm(part: Part) -> float:
    """Own parameters of the states, a convolution of each channel alone, projections."""
    each = [p for p in part.layers("conv") if p.module.groups == p.sizes[0] > 1]
    states = [s for s in part.own.values() if len(s) <= 2]
    named = part.says("mamba", "ssm", "mixer")
    return 0.8 + 0.2 * named if each and states and len(dense(part)) >= 2 else 0.0


# ---- boxes of boxes

LISTS = (nn.ModuleList, nn.ModuleDict)


def works(part: Part) -> bool:
    """Whether it holds what blocks are made of."""
    return any(attention(p) > 0.5 or mlp(p) > 0.5 or resnet(p) or ssm(p) for p in part.subtree())


def block(part: Part) -> float:
    """A module of several layers, best one that repeats."""
    if part.role or len(part.layers("linear", "conv", "norm")) < 2:
        return 0.0
    if not works(part):
        return 0.3
    return 0.5 + 0.2 * (part.listed > 1) + 0.2 * (part.repeats > 1) + 0.1 * row(part)


def row(part: Part) -> bool:
    """Whether it stands in a list."""
    return part.name.rsplit(".", 1)[-1].isdecimal()


def stage(part: Part) -> float:
    """A module that holds lists of blocks, best several."""
    if part.role:
        return 0.0
    lists = {p.parent.name for p in part.subtree()[1:] if row(p) and p.children and works(p)}
    return 0.8 + 0.1 * (len(lists) > 1) if lists else 0.0


def stack(part: Part) -> float:
    """A module with a list of blocks, the nearer the better."""
    lists = [p for p in part.subtree()[1:] if row(p) and p.listed > 1 and p.children]
    if not lists:
        return 0.0
    depth = min(p.name.count(".") for p in lists) - (part.name.count(".") if part.name else -1)
    if type(part.module) in LISTS:
        return 0.6
    return max(0.4, 1.0 - 0.1 * max(0, depth - 2))


WRAPPED = {
    *("attention", "cross-attention", "mlp", "time", "modulation", "patch", "moe", "ssm"),
    *("embedding", "conv", "linear", "down", "up", "experts", "resnet"),
}
KINDS = {
    "attention": self_attention,
    "cross-attention": cross,
    "mlp": mlp,
    "norm": norm,
    "embedding": embedding,
    "position": positional,
    "patch": patch,
    "time": time,
    "rotary": rotary,
    "modulation": modulation,
    "linear": is_layer("linear"),
    "head": head,
    "conv": is_layer("conv"),
    "resnet": resnet,
    "down": lambda part: resampling(part, more=False),
    "up": lambda part: resampling(part, more=True),
    "moe": moe,
    "router": router,
    "experts": experts,
    "ssm": ssm,
    "block": block,
    "stage": stage,
    "stack": stack,
}
