"""Layers, attentions and MLPs: known by their matrices and what a run showed, helped by names."""

import functools
import itertools
from collections.abc import Callable

from .parts import Part, Sizes, root


def once(judge: Callable) -> Callable:
    """Keep what `judge` says of a part on the part, so that both go together."""

    @functools.wraps(judge)
    def kept(part: Part, *more: str) -> float:
        key = (judge.__name__, *more)
        if key not in part.memo:
            part.memo[key] = judge(part, *more)
        return part.memo[key]

    return kept


def is_layer(role: str):
    """Of one layer: that layer itself, or a module that holds no other."""

    def judge(part: Part) -> float:
        if part.role == role:
            return 1.0
        inside = part.layers("linear", "conv", "embedding")
        alone = [p.role for p in inside] == [role] and not tables(part)
        return 0.75 if alone else 0.0

    return judge


def norm(part: Part) -> float:
    """A vector of weights, or a class called so, that keeps the shape."""
    return 1.0 if part.role == "norm" else 0.0


def tables(part: Part) -> list[Sizes]:
    """Own parameters of a module that is no layer, with two sizes or more that are not 1."""
    if part.role:
        return []
    return [s for s in part.own.values() if sum(n > 1 for n in s) >= 2]


def embedding(part: Part) -> float:
    """Rows that are looked up by the numbers in its input."""
    plain = is_layer("embedding")(part)
    return plain * (0.6 if positional(part) > 0.5 else 1)


def positional(part: Part) -> float:
    """A table of positions: the same for a whole batch, owned as it is, so named."""
    named = 0.35 * part.says("pos", "relative")
    if part.role == "embedding":
        once = bool(part.inputs) and part.inputs[0][0][:-1] in ((), (1,))
        heads = part.parent is not None and attention(part.parent) > 0.5
        fewer = any(p.sizes[1] == part.sizes[1] and p.sizes[0] > part.sizes[0] for p in rows(part))
        return min(1.0, 0.3 + named + 0.35 * once + 0.5 * heads + 0.1 * fewer)
    held = [s for s in tables(part) if len(s) <= 4 and not part.layers("linear")]
    held = [s for s in held if len(s) == 2 or s[0] == 1]
    if not held and not part.numel and not part.children:  # a formula, known by its name alone
        return 0.6 if part.says("position") else 0.0
    return min(1.0, 0.6 + named) if held else 0.0


def rows(part: Part) -> list[Part]:
    """The embeddings of the model."""
    return root(part).layers("embedding")


# ---- a few layers together


def dense(part: Part) -> list[Part]:
    """Layers that mix channels alone: linear ones and 1x1 convolutions."""
    return [p for p in part.layers("linear", "conv") if p.role == "linear" or pointwise(p)]


def pointwise(part: Part) -> bool:
    """A convolution whose kernel has one element."""
    size = part.module.kernel_size
    return set(size if isinstance(size, tuple) else (size,)) == {1}


def projections(part: Part) -> list[Sizes]:
    """(in, out) of every matrix in a module, those it owns itself included."""
    owned = [(s[1], s[0]) for p in part.subtree() for s in tables(p) if len(s) == 2]
    return owned + [p.sizes for p in dense(part)]


@once
def attention(part: Part) -> float:
    """Projections to q, k, v (or to all three at once) and one back, and little else."""
    sizes = projections(part)
    if part.role or not 2 <= len(sizes) <= 10 or part.layers("conv") != _only_pointwise(part):
        return 0.0
    named = part.says("att")
    best = 0.0
    left = sizes
    used: list[Sizes] = []
    while found := qkv(left):  # a joint attention has two sets
        used += found
        left = list(left)
        for s in found:
            left.remove(s)
    if used:
        explained = sum(a * b for a, b in used) / sum(a * b for a, b in sizes)
        whole = any(s[0] == o[1] for o in used[1:] for s in used[:1])
        best = (0.75 if whole else 0.6) * explained**2
    elif named and len(sizes) >= 3:  # low-rank: in through latents, back to the model's size
        width = sizes[0][0]
        enter = sum(a == width for a, _ in sizes)
        best = 0.65 if enter >= 2 and any(b == width for _, b in sizes) else 0.0
    return min(1.0, best + 0.25 * named) if best > 0.3 else 0.0


def _only_pointwise(part: Part) -> list[Part]:
    return [p for p in part.layers("conv") if pointwise(p)]


def qkv(sizes: list[Sizes]) -> list[Sizes]:
    """Which of these are an attention's: q, k, v (and o), or fused ones; [] if none."""
    several = sorted({s for s in sizes if sizes.count(s) >= 2})
    without: list[Sizes] = []
    for kv in several:
        rest = list(sizes)
        rest.remove(kv)
        rest.remove(kv)
        for q in sorted(set(rest)):
            if max(q[1], kv[1]) % min(q[1], kv[1]) or q[1] < kv[1]:
                continue
            others = list(rest)
            others.remove(q)
            back = [o for o in others if o[1] == q[0] and o[0] == q[1]]
            if back and not (q[1] != kv[1] and q[0] != kv[0] and q[1] > 2 * q[0]):
                return [q, kv, kv, back[0]]
            if q == kv or (q[1] == kv[1] and q[1] <= 2 * q[0]):
                without = [q, kv, kv]
    for q, kv, o in itertools.permutations(sizes, 3):
        if q != kv and o == q[::-1] and q[1] <= 2 * q[0] and q[1] % max(1, kv[1] // 2) == 0:
            return [q, kv, o] if kv[1] % 2 == 0 else []
    for fused, back in itertools.combinations(sizes, 2):
        shared = fused[1] - back[0]
        grouped = shared > 0 and shared % 2 == 0 and back[0] % (shared // 2) == 0
        if back[1] == fused[0] and (fused[1] == 3 * back[0] or (grouped and shared < back[0])):
            return [fused, back]
    return without


def cross(part: Part) -> float:
    """An attention whose keys come from elsewhere than its queries."""
    whole = attention(part)
    if not whole:
        return 0.0
    layers = dense(part)
    widths = {p.sizes[0] for p in layers if p.sizes[0] not in {q.sizes[1] for q in layers}}
    widths |= {p.sizes[0] for p in layers[:3]}
    fed = {p.inputs[0][0] for p in layers if p.inputs}
    pairs = {s[:-1] for s in fed if len(s) == 3}
    apart = len(pairs) > 1 or len(widths) > 1
    named = part.says("cross", "enc")
    second = (
        part.parent is not None
        and sum(attention(p) > 0.5 for p in part.parent.subtree()[1:] if p.end < part.start) > 0
    )
    return whole * min(1.0, 0.3 + 0.5 * apart + 0.25 * named + 0.25 * second)


def self_attention(part: Part) -> float:
    """An attention, less so where its keys come from elsewhere."""
    whole = attention(part)
    return whole * (0.7 if whole and cross(part) > 0.7 * whole else 1)


def chain(sizes: list[Sizes]) -> tuple[int, int, int] | None:
    """(in, hidden, out) where two or three matrices follow each other, as in an MLP."""
    if len(sizes) == 2:
        (a, f), (g, b) = sizes
        return (a, g, b) if f in (g, 2 * g) else None
    if len(sizes) == 3:
        for i, (g, b) in enumerate(sizes):
            first, second = sizes[:i] + sizes[i + 1 :]
            if first == second and first[1] == g and (b != g or first[0] == b):
                return (first[0], g, b)
    return None


def mlp(part: Part) -> float:
    """Two linear layers in a row, or two side by side and a third: up, and down again."""
    if part.role or tables(part):
        return 0.0
    layers = dense(part)
    found = chain([p.sizes for p in layers])
    if found is None or len(part.layers("conv")) > len([p for p in layers if p.role == "conv"]):
        return 0.0
    width, hidden, out = found
    best = 0.6 + 0.15 * (hidden > max(width, out)) + 0.1 * (width == out)
    best += 0.15 * part.says("mlp", "feed", "ff", "dense", "project", "expert")
    best *= 1 if wave(part) == 0 else 0.8
    best *= 1 if len(part.layers("norm")) <= 1 else 0.6
    return best if attention(part) < 0.5 else best * 0.4


def wave(part: Part) -> float:
    """Whether what it reads are sines of a time: a vector each, made without parameters."""
    beside = part.parent.children if part.parent is not None else []
    vector = bool(part.inputs) and len(part.inputs[0][0]) == 2
    for other in beside:
        made = other.outputs[0][0] if other.outputs else ()
        if not other.numel and not other.children and len(made) == 2 and vector:
            asked = other.inputs[0][0] if other.inputs else ()
            if len(asked) <= 1 and part.inputs[0][0] == made:
                return 1.0
    return 0.0
