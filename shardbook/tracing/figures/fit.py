"""Place a figure's boxes: each in a module of its kind and sizes, in its parent's, in order."""

import collections
import dataclasses
import itertools
import re

from .kinds import count, score, works
from .layers import chain, dense
from .parts import Part
from .read import Box

LEAST = 0.35  # evidence below this places nothing
TRIED, ALIKE, KEPT = 16, 6, 96  # modules for a box; ways that end in one module; ways at all


@dataclasses.dataclass
class Placed:
    """Where a box is: the module, how sure that is, and how well its sizes fit (None: unknown)."""

    part: Part
    confidence: float
    shape: float | None = None


class Fit:
    """One figure in one model."""

    def __init__(self, boxes: list[Box], parts: list[Part]):
        self.boxes, self.root = boxes, parts[0]
        self.traced = self.root.call is not None
        self.parts = [p for p in parts if not p.copy]
        self.parts += flat_mlps(self.parts)
        self.parts.sort(key=lambda p: (p.start, -p.end))
        self.letters: dict[str, int] = {}
        self.memo: dict[tuple, tuple[float, dict[Box, Part]]] = {}

    def run(self) -> dict[Box, Placed]:
        """The best placing found; a box that nothing fits is not in it."""
        for _ in range(3):  # what the letters stand for is known once boxes are placed
            self.memo.clear()
            _, found = self.best(self.boxes, self.root)
            found = self.elsewhere(found)
            letters = self.read_letters(found)
            if letters == self.letters:
                break
            self.letters = letters
        return {box: self.judge(box, part, found) for box, part in found.items()}

    # ---- how well one module is one box

    def evidence(self, box: Box, part: Part) -> float:
        """By kind, sizes, repeats and words, 0 to about 1.1."""
        kind = 0.85 if part.rest and box.kind == "mlp" else score(part, box.kind)
        if kind < LEAST:
            return 0.0
        fits = self.sizes(box, part)
        kind *= 0.95 if fits is None else 0.3 + 0.7 * fits
        if box.repeats != 1:
            numbers = {part.repeats, part.listed} | ({count(part)} - {0})
            if isinstance(box.repeats, int):
                kind *= 1 if box.repeats in numbers else 0.6
            else:
                kind *= 1 if max(numbers) > 1 else 0.8
            if part.repeats == 1 and part.place > 0:  # it is drawn for all, so it is the first
                kind *= 0.8
        if self.traced and all(p.call is None for p in part.subtree()):
            kind *= 0.93  # not called in this run
        return kind + 0.08 * words_in_common(box, part)

    def sizes(self, box: Box, part: Part) -> float | None:
        """Which share of the figure's sizes the module has; None where neither says."""
        has = dims(part, box.kind, len(box.dims)) if box.dims else None
        if has is None:
            return None
        letters, good = dict(self.letters), 0
        for (times, letter), size in zip(box.dims, has, strict=True):
            if letter == "*":
                good += 1
            elif not letter:
                good += times == size
            elif letter in letters:
                good += times * letters[letter] == size
            elif size % times == 0:
                letters[letter] = size // times
                good += 1
        return good / len(has)

    def read_letters(self, found: dict[Box, Part]) -> dict[str, int]:
        """What most of the placed boxes say that a letter is."""
        votes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for box, part in found.items():
            has = dims(part, box.kind, len(box.dims)) if box.dims else None
            for (times, letter), size in zip(box.dims, has or [], strict=False):
                if letter not in ("", "*") and size % times == 0:
                    votes[letter][size // times] += 1
        return {letter: votes[letter].most_common(1)[0][0] for letter in votes}

    # ---- all boxes together

    def candidates(self, box: Box, scope: Part) -> list[tuple[float, Part, dict[Box, Part]]]:
        """(value, module, what lies inside) of the modules in `scope` that box may be."""
        found = []
        for part in self.parts:
            whole = part is self.root and self.boxes == [
                box
            ]  # a figure of one box: the model itself
            if (whole or scope.holds(part)) and (own := self.evidence(box, part)) >= LEAST:
                below, placed = self.best(box.inside, part)
                found.append((own + below - 0.03 * depth(part), part, placed))
        found.sort(key=lambda c: (-round(c[0], 6), c[1].start))
        return found[:TRIED]

    def best(self, boxes: list[Box], scope: Part) -> tuple[float, dict[Box, Part]]:
        """The best placing of boxes beside each other in a module, and of those inside them."""
        if not boxes:
            return 0.0, {}
        key = (boxes[0], scope.name, scope.rest)
        if key not in self.memo:
            ways: list[tuple[float, tuple, dict]] = [(0.0, (), {})]
            for box in boxes:
                choices = self.candidates(box, scope)
                more = list(ways)
                for value, beside, placed in ways:
                    taken = set(placed.values())
                    for own, part, inside in choices:
                        if part in taken or not taken.isdisjoint(inside.values()):
                            continue
                        gain = own + in_order(box, part, beside, self.traced)
                        both = placed | inside | {box: part}
                        more.append((value + gain, (*beside, (box, part)), both))
                ways = keep(more)
            value, _, placed = ways[0]
            self.memo[key] = (value, placed)
        return self.memo[key]

    def elsewhere(self, found: dict[Box, Part]) -> dict[Box, Part]:
        """Boxes that nothing inside their parent fits, placed in what is left of the model."""
        for top in self.boxes:
            for box in top.every():
                if box in found or box.inside:
                    continue
                free = [p for p in self.parts if p not in found.values()]
                ranked = [(self.evidence(box, p), -p.start, p) for p in free]
                value, _, part = max(ranked, key=lambda c: c[:2], default=(0, 0, None))
                if value >= 0.6:
                    found = found | {box: part}
        return found

    def judge(self, box: Box, part: Part, found: dict[Box, Part]) -> Placed:
        """How sure a placing is: its evidence, what lies inside, how near the next best comes."""
        own = min(1.0, self.evidence(box, part))
        inside = [b in found and part.holds(found[b]) for b in box.inside]
        own *= 0.6 + 0.4 * sum(inside) / len(inside) if inside else 1
        taken = [p for p in found.values() if p is not part]
        near = [p for p in self.parts if p not in taken and p is not part]
        # a wrapper and what it wraps are no doubt
        near = [p for p in near if not (p.holds(part) or part.holds(p))]
        second = max((self.evidence(box, p) for p in near), default=0.0)
        margin = max(0.0, 1 - second / own) if own else 0.0
        sure = own * (0.7 + 0.3 * min(1, 2 * margin))
        return Placed(part, round(sure, 2), self.sizes(box, part))


def keep(ways: list[tuple]) -> list[tuple]:
    """The best of these, and not all of them ending in one module."""
    ways.sort(key=lambda way: -round(way[0], 6))
    kept, ends = [], collections.Counter()
    for way in ways:
        last = way[1][-1][1] if way[1] else None
        ends[last] += 1
        if ends[last] <= ALIKE and len(kept) < KEPT:
            kept.append(way)
    return kept


def depth(part: Part) -> int:
    """How deep a module lies in the model; lists don't count."""
    return sum(not name.isdecimal() for name in part.name.split("."))


def in_order(box: Box, part: Part, beside: tuple, traced: bool) -> float:
    """More for a module called behind the boxes drawn before it, less for one inside them."""
    gain = 0.0
    # without a run the order is that of definition, which holds among boxes of one kind
    before = [p for b, p in beside if traced or b.kind == box.kind]
    if before:
        sure = traced or before[-1].parent is part.parent
        gain += (0.1 if part.start > before[-1].end else -0.15) * (1 if sure else 0.4)
    for other, at in beside:
        if drawn_once_for(other, at, part) or drawn_once_for(box, part, at):
            gain -= 0.5
        if (at.holds(part) or part.holds(at)) and "position" not in (box.kind, other.kind):
            gain -= 0.3
    return gain


def drawn_once_for(box: Box, at: Part, part: Part) -> bool:
    """Whether `box`, drawn once for a list of modules, stands for what `part` is or lies in."""
    if box.repeats == 1 or at.parent is None or at.listed == 1 or at.repeats > 1:
        return False
    return at.parent.holds(part) and part is not at and not at.holds(part)


def flat_mlps(parts: list[Part]) -> list[Part]:
    """MLPs that are no module: two linear layers in a row in a block, up and down again."""
    found = {}
    for part in parts:
        if part.role or not works(part) or score(part, "mlp") >= LEAST:
            continue
        closed = [
            p
            for p in part.subtree()[1:]
            if max(score(p, k) for k in ("attention", "mlp", "moe", "ssm")) > 0.5
            or (p.children and p.name.rsplit(".", 1)[-1].isdecimal())
        ]
        loose = [p for p in part.layers("linear") if not any(c.holds(p) for c in closed)]
        for a, b in itertools.pairwise(loose):
            if a.sizes == b.sizes[::-1] and a.sizes[1] > a.sizes[0]:
                both = {"end": b.end, "rest": (b.name,), "numel": a.numel + b.numel}
                found[a.name] = dataclasses.replace(a, memo={}, **both)
    return list(found.values())


def dims(part: Part, kind: str, many: int) -> tuple[int, ...] | None:
    """As many sizes of a module as the figure gives: in, (hidden,) out; None if not known."""
    if part.rest:
        return pick((*part.sizes, part.sizes[0]), many)
    if part.role == "norm":
        return part.sizes[:1] * many if part.sizes else None
    if part.role:
        return pick(part.sizes, many) if many < 3 else None
    if kind in ("mlp", "time"):
        whole = chain([p.sizes for p in dense(part)])
        return pick(whole, many) if whole else None
    layers = part.layers("linear", "conv", "embedding")
    ends = (layers[0].sizes[0], layers[-1].sizes[1]) if layers else None
    if ends and kind in ("linear", "modulation", "patch", "conv", "embedding", "head"):
        return pick(ends, many)
    if part.inputs and part.outputs:
        return pick(part.inputs[0][0][-1:] + part.outputs[0][0][-1:], many)
    return pick(ends, many) if ends and kind in ("attention", "cross-attention") else None


def pick(whole: tuple[int, ...], many: int) -> tuple[int, ...] | None:
    """As many of the sizes as asked for: all, the first and last, or the last."""
    if len(whole) == many:
        return tuple(whole)
    if many == 2 and whole:
        return (whole[0], whole[-1])
    return whole[-1:] if many == 1 and whole else None


def words_in_common(box: Box, part: Part) -> float:
    """Whether the label has a word of the module's names; never enough to place a box by itself."""
    own = set(re.findall(r"[a-z]{2,}", box.label.lower())) - set(box.kind.split("-"))
    hits = sum(any(alike(word, name) for name in part.words) for word in own)
    return min(1.0, hits / 2)


def alike(a: str, b: str) -> bool:
    """Whether two words begin alike; a word of two letters must be the other."""
    same = min(4, len(a), len(b))
    return a[:same] == b[:same] if same > 2 else a == b
