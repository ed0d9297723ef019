"""What each module of a model is made of: its layers, their sizes, its place in the order of calls.

From the parameters alone, and better with the shapes of one traced run.
"""

import dataclasses
import math
import re
from typing import Any

from torch import nn

from ..timeline import RankTrace

Sizes = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Part:
    """A module, or several in a row (`rest`) that are one box in a figure."""

    name: str
    module: nn.Module
    parent: "Part | None" = None
    children: list["Part"] = dataclasses.field(default_factory=list)
    own: dict[str, Sizes] = dataclasses.field(default_factory=dict)  # its parameters
    role: str = ""  # linear, conv, embedding or norm, where it is such a layer
    sizes: Sizes = ()  # of a layer: in, out; of an embedding rows, width; of a norm its width
    inputs: list[tuple[Sizes, Any]] = dataclasses.field(default_factory=list)  # (shape, dtype)
    outputs: list[tuple[Sizes, Any]] = dataclasses.field(default_factory=list)
    call: int | None = None  # its place among all first calls
    start: int = 0  # in the order of calls, a module's subtree is start … end
    end: int = 0
    repeats: int = 1  # how many in a row are built like it
    listed: int = 1  # how many its list holds
    place: int = 0  # in its list
    copy: bool = False  # of the one before it in its list, or inside such a copy
    rest: tuple[str, ...] = ()
    numel: int = 0
    memo: dict = dataclasses.field(default_factory=dict, repr=False)

    def subtree(self) -> list["Part"]:
        """Itself and all below, in order."""
        return [self, *(p for child in self.children for p in child.subtree())]

    def layers(self, *roles: str) -> list["Part"]:
        """The layers of these roles at or below it, in order."""
        return [p for p in self.subtree() if p.role in roles]

    def holds(self, other: "Part") -> bool:
        """Whether `other` lies inside this module."""
        return self is not other and self.start <= other.start and other.end <= self.end

    @property
    def words(self) -> set[str]:
        """Of the class and of the attribute, in lower case."""
        split = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", type(self.module).__name__)
        split += re.findall(r"[A-Za-z]+", self.name.rsplit(".", 1)[-1])
        return {w.lower() for w in split}

    def says(self, *stems: str) -> bool:
        """Whether a word of its names begins like one of these."""
        return any(w.startswith(stems) for w in self.words)


def parts(model: nn.Module, run: RankTrace | None = None) -> list[Part]:
    """All modules of `model` in order of their first calls, the model itself first."""
    found: dict[str, Part] = {}
    for name, module in model.named_modules():
        own = {n: tuple(p.shape) for n, p in module._parameters.items() if _sized(p)}
        part = found[name] = Part(name, module, own=own)
        part.numel = sum(p.numel() for p in module.parameters() if _sized(p))
        if name:
            up = name.rpartition(".")[0]
            part.parent = found[up]
            part.parent.children.append(part)
    if run is not None:
        for place, visit in enumerate(run.visits()):
            part = found.get(run.modules[visit.module]["name"])
            if part is not None and part.call is None:
                part.call = place
                part.inputs, part.outputs = flat(visit.record[6]), flat(visit.record[7])
    for part in found.values():
        part.role, part.sizes = layer(part)
    root = found[""]
    _order(root)
    _number(root, 0)
    _runs(root)
    for part in found.values():
        part.copy = part.copy or (part.parent is not None and part.parent.copy)
    return root.subtree()


def root(part: Part) -> Part:
    """The model that a part is of."""
    while part.parent is not None:
        part = part.parent
    return part


def _sized(p: nn.Parameter | None) -> bool:
    return p is not None and not nn.parameter.is_lazy(p)


def flat(described: Any) -> list[tuple[Sizes, Any]]:
    """(shape, dtype) of every tensor of what `describe` gives, nesting gone."""
    if described is None:
        return []
    if isinstance(described, tuple):
        return [(tuple(described[0]), described[1])]
    inner = described.values() if isinstance(described, dict) else described
    return [one for value in inner for one in flat(value)]


def layer(part: Part) -> tuple[str, Sizes]:
    """Which layer a module is, by its class or by what its parameters and shapes say."""
    module, own = part.module, part.own
    if isinstance(module, nn.Linear):
        return "linear", (module.in_features, module.out_features)
    if hasattr(module, "kernel_size") and hasattr(module, "in_channels"):
        return "conv", (module.in_channels, module.out_channels)
    if isinstance(module, nn.Embedding):
        return "embedding", (module.num_embeddings, module.embedding_dim)
    if any(c.numel for c in part.children):
        return "", ()
    tables = [s for s in own.values() if len(s) == 2]
    vectors = [s for s in own.values() if len(s) == 1]
    if len(tables) == 1 and len(tables) + len(vectors) == len(own):
        return _table(part, tables[0], vectors)
    named = type(module).__name__.lower().endswith("norm")
    same = not part.inputs or not part.outputs or part.inputs[0][0] == part.outputs[0][0]
    if vectors and len(vectors) == len(own) <= 2 and len(set(vectors)) == 1 and same:
        return "norm", vectors[0]
    if named and not part.children and not tables:
        return "norm", part.inputs[0][0][-1:] if part.inputs else ()
    return "", ()


def _table(part: Part, table: Sizes, vectors: list[Sizes]) -> tuple[str, Sizes]:
    """A module of one matrix: x W or W x, or rows that are looked up."""
    rows, columns = table
    if part.inputs and part.outputs:
        (given, dtype), (made, _) = part.inputs[0], part.outputs[0]
        if not dtype.is_floating_point and made[-1:] == (columns,):
            return "embedding", table
        ends = (given[-1:], made[-1:])
        for sizes in ((columns, rows), (rows, columns)):
            if ends == (sizes[:1], sizes[1:]):
                return "linear", sizes
    if vectors and vectors[0] == (columns,) and rows != columns:
        return "linear", (rows, columns)
    if "weight" in part.own:
        return "linear", (columns, rows)
    return "", ()


def _order(part: Part) -> float:
    """Put children in order of their calls; one that is not called stays behind its neighbour."""
    keys, last = [], -1.0
    for place, child in enumerate(part.children):
        called = _order(child)
        last = called if called < math.inf else last
        keys.append((last, called == math.inf, place))
    if part.call is not None or any(k[0] >= 0 for k in keys):
        part.children = [part.children[k[2]] for k in sorted(keys)]
    return min([math.inf if part.call is None else part.call, *(k[0] for k in keys if k[0] >= 0)])


def _number(part: Part, at: int) -> int:
    part.start = at
    for child in part.children:
        at = _number(child, at + 1)
    part.end = at
    return at


def signature(part: Part) -> tuple:
    """How a module is built: equal for two of the same class, layers and sizes."""
    inner = sorted((c.name.rsplit(".", 1)[-1], signature(c)) for c in part.children)
    return (type(part.module).__name__, tuple(sorted(part.own.items())), tuple(inner))


def _runs(part: Part) -> None:
    """Mark the modules of a list that repeat the one before them."""
    rows = [c for c in part.children if c.name.rsplit(".", 1)[-1].isdecimal()]
    rows.sort(key=lambda c: int(c.name.rsplit(".", 1)[-1]))
    previous, first = None, None
    for place, child in enumerate(rows):
        child.listed, child.place = len(rows), place
        built = signature(child) if child.children else None
        if built is not None and built == previous:
            child.copy = True
            first.repeats += 1
        else:
            first = child
        previous = built
    for child in part.children:
        if not child.copy:
            _runs(child)
