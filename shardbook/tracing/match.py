"""Which module each box of a paper's figure is: ``sb.match(model, figure, *inputs)``."""

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import trace, view
from .describe import module_info
from .figures import draw, library
from .figures.fit import Fit, Placed
from .figures.parts import Part, parts
from .figures.read import Box, read
from .merge import Trace
from .tables import Table, module_table
from .timeline import RankTrace

LARGE = 0.02
"""A module with this share of the parameters and no label is told of."""


def match(model: nn.Module, figure: str, *inputs: Any, **kwargs: Any) -> "Match":
    """Which module of `model` each box of a figure is.

    figure: transformer, gpt-2, vit, clip, llava, whisper, mixtral, mamba, unet, vae, dit or
    step-video, or text, a line a box: its label, its kind, and if you like how often it is repeated
    and its sizes from input to output. What lies inside a box is indented under it, and the lines
    are in the order of the arrows::

        # Attention Is All You Need, arXiv 1706.03762, figure 1
        input embedding: embedding, vocab -> d
        encoder: stack
          encoder layer: block x N
            multi-head attention: attention
            add & norm: norm
            feed forward: mlp, d -> 4d -> d
        linear: head, d -> vocab

    A size is a number, a letter that stands for the same number everywhere, a multiple of one, or
    `*`. ``x 6`` is six times, ``x N`` as often as the model has it. Without a kind the label's
    words decide ("add & norm" is a norm, "layer x 6" a block). Kinds are attention,
    cross-attention, mlp, norm, embedding, position, patch, time, rotary, modulation, linear, head,
    conv, resnet, down, up, moe, router, experts, ssm, block, stage, stack.

    With inputs the model runs once, as ``model(*inputs, **kwargs)`` in eval mode and without
    gradients; then shapes and the order of calls count too. Without inputs its parameters must do.
    The result is a mapping from label to dotted name and shows as a table.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sb.match() takes an nn.Module, not {type(model).__name__}")
    if not isinstance(figure, str):
        raise TypeError(f"sb.match() takes a figure as text, not {type(figure).__name__}")
    title, boxes = read(library.find(figure))
    run = _run(model, inputs, kwargs) if inputs or kwargs else None
    every = parts(model, run)
    placed = Fit(boxes, every).run()
    if run is None:
        run = RankTrace(modules=[module_info(n, m) for n, m in model.named_modules()])
    return Match(title, boxes, placed, every, module_table([run]), run)


def names() -> dict[str, str]:
    """The library's figures: name -> the paper and figure it redraws."""
    return {name: read(text)[0] for name, text in library.FIGURES.items()}


class Match(Mapping):
    """label -> dotted module name, of the labels that fit; prints and displays as a table.

    confidence: label -> 0 to 1. unplaced: the labels that no module fits. uncovered: (module,
    parameters) of the large modules that no label covers.
    """

    def __init__(
        self,
        title: str,
        boxes: list[Box],
        placed: dict[Box, Placed],
        parts: list[Part],
        rows: Table,
        run: RankTrace,
    ):
        self.title = title
        self._tops, self._run = boxes, run
        self._boxes = [(depth, box) for top in boxes for depth, box in _deep(top, 0)]
        self._placed = placed
        self._rows = {row["name"]: row for row in rows}
        self._names = {b.label: placed[b].part.name for _, b in self._boxes if b in placed}
        self.confidence = {b.label: placed[b].confidence for _, b in self._boxes if b in placed}
        self.unplaced = [b.label for _, b in self._boxes if b not in placed]
        self.uncovered = _uncovered(parts, placed)

    def __getitem__(self, label: str) -> str:
        if label in self.unplaced:
            raise KeyError(f"no module of this model is {label!r}")
        return self._names[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def table(self) -> Table:
        """A row a box: module, type, inputs, outputs, parameters, first call, confidence.

        A row's "call" is the place of its first call among those of all modules, from 1.
        """
        return Table([self._row(depth, box) for depth, box in self._boxes], COLUMNS, self.note())

    def draw(self) -> "Drawn":
        """The figure with each box filled in, over the trace of the run; a click goes to a slice.

        Of a match without inputs there is the figure alone.
        """
        return Drawn(self)

    def _row(self, depth: int, box: Box) -> dict:
        row = {"label": box.label, "depth": depth, "module": None, "kind": box.kind}
        if box not in self._placed:
            return row
        found = self._placed[box]
        part = found.part
        rows = [self._rows[name] for name in (part.name, *part.rest)]
        row |= {"module": " + ".join((part.name, *part.rest)), "confidence": found.confidence}
        row |= {
            "type": " + ".join(r["type"] for r in rows),
            "inputs": rows[0]["inputs"],
            "outputs": rows[-1]["outputs"],
        }
        row["parameters"] = sum(r["parameters"] for r in rows)
        times = [r["ms"] for r in rows]
        row["ms"] = None if None in times else sum(times)
        row["call"] = None if part.call is None else part.call + 1
        row["repeats"] = part.repeats if part.repeats > 1 else part.listed
        return row

    def note(self) -> str:
        """What does not fit, in sentences; "" if all does."""
        said = []
        if self.unplaced:
            said.append(f"No module fits {', '.join(map(repr, self.unplaced))}.")
        if self.uncovered:
            large = (f"{name} ({count:,} parameters)" for name, count in self.uncovered)
            said.append(f"No label covers {', '.join(large)}.")
        return " ".join(said)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.title, str(self.table())]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = f"<div><b>{html.escape(self.title)}</b></div>" if self.title else ""
        return title + self.table()._repr_html_()


class Drawn:
    """A matched figure as a notebook shows it; as text it is the match's table."""

    def __init__(self, match: Match):
        self.match = match

    def __repr__(self) -> str:
        return str(self.match)

    def _repr_html_(self) -> str:
        match, run = self.match, self.match._run
        rows = {box: match._row(0, box) for _, box in match._boxes}
        filled = {box: _filled(row) for box, row in rows.items() if row["module"] is not None}
        drawing = draw.svg(match._tops, filled)
        words = [f"{r['label']}: {r['module'] or 'no module'}" for r in rows.values()]
        said = f"{match.title or 'figure'}, each box with its module: {'; '.join(words)}"
        named = {m["name"]: run.name(i) for i, m in enumerate(run.modules)}
        boxes = [match._placed.get(box) for box in rows]
        found = [[b.part.name, *b.part.rest] if b else [] for b in boxes]
        modules = [[named[name] for name in names] for names in found]
        figure = view.Figure(drawing, said, modules)
        if not run.records:
            return view.still(figure)
        return view.html(Trace([run]).chrome(), match.title, figure=figure)


def _filled(row: dict) -> draw.Filled:
    first, *rest = row["module"].split(" + ")
    near = first.rpartition(".")[0] + "."
    names = " + ".join([first or "(model)", *(name.removeprefix(near) for name in rest)])
    kinds = ", ".join(dict.fromkeys(row["type"].split(" + ")))
    given, made = (", ".join(dict.fromkeys(_shapes(row[side]))) for side in ("inputs", "outputs"))
    facts = f"{row['parameters']:,} parameters"
    if row["ms"] is not None:
        facts += f" · call {row['call']} · {row['ms']:.2f} ms"
    shapes = f"{given} → {made}" if made else "not called"
    return draw.Filled(f"{names}: {kinds}", shapes, facts, row["repeats"])


def _shapes(described: str) -> list[str]:
    """The shapes in what a table says of inputs, without the dtype that most of them share."""
    return re.findall(r"(?:int64)?\[[^\]]*\]", described.replace("float32", ""))


COLUMNS = {
    "label": lambda r: "  " * r["depth"] + r["label"],
    "module": lambda r: "–" if r["module"] is None else r["module"] or "(model)",
    "type": lambda r: r.get("type", "") + (f" × {r['repeats']}" if r.get("repeats", 1) > 1 else ""),
    "inputs": lambda r: r.get("inputs", ""),
    "outputs": lambda r: r.get("outputs", ""),
    "parameters": lambda r: f"{r['parameters']:,}" if "parameters" in r else "",
    "first ms": lambda r: "" if r.get("ms") is None else f"{r['ms']:.3f}",
    "confidence": lambda r: f"{r['confidence']:.2f}" if "confidence" in r else "",
}


def _deep(box: Box, depth: int) -> list[tuple[int, Box]]:
    return [(depth, box), *(d for inner in box.inside for d in _deep(inner, depth + 1))]


def _run(model: nn.Module, inputs: tuple, kwargs: dict) -> RankTrace:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()  # so that no running mean moves
        with torch.no_grad(), trace(model) as t:
            model(*inputs, **kwargs)
    except Exception as error:
        said = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        raise ValueError(
            f"the model does not run on these inputs ({type(error).__name__}: {said}): give "
            "others, or none to match by its parameters alone"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return t.ranks[0]


def _uncovered(every: list[Part], placed: dict[Box, Placed]) -> list[tuple[str, int]]:
    labelled = {n for p in placed.values() for n in (p.part.name, *p.part.rest)}
    # drawn once for all of a list
    listed = [p.part.parent for b, p in placed.items() if b.repeats != 1 and p.part.repeats == 1]
    labelled |= {child.name for up in listed if up for child in up.children if child.listed > 1}
    above = {name.rsplit(".", i)[0] for name in labelled for i in range(1, name.count(".") + 1)}
    found = []

    def visit(part: Part) -> None:
        if part.copy or part.numel < LARGE * every[0].numel or part.name in labelled:
            return
        if part.name in above or not part.name:
            for child in part.children:
                visit(child)
        else:
            found.append((part.name, part.numel))

    visit(every[0])
    return found
