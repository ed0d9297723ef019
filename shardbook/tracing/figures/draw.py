"""A figure with its boxes filled in, as an svg: what each box is in the model that was matched.

Arrows go up, as papers draw them: stacks stand side by side, in each the first box at the bottom.
What an "add" adds comes from below the box before it, and cross-attention reads the stack before.
The card is white, so that it reads the same in a dark theme.
"""

import dataclasses
import html
import re
from collections.abc import Mapping

from ..palette import INK, LINE, OKABE_ITO
from .read import Box

WIDE, LEAF, HEAD, GAP, PAD, ASIDE, EDGE = 408, 50, 38, 16, 10, 26, 14  # pixels
LETTERS = 65  # of a line in a box
INPUTS = {"embedding", "position", "patch", "time"}  # these stand under the stack that follows
FAMILY = 'font-family="DejaVu Sans, Verdana, sans-serif"'
MONO = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
COLOURS = {  # of kinds; the words say what a box is, colours only repeat it
    "attention": OKABE_ITO[1],
    "cross-attention": OKABE_ITO[1],
    "mlp": OKABE_ITO[4],
    "norm": OKABE_ITO[6],
    "embedding": OKABE_ITO[3],
    "position": OKABE_ITO[3],
    "head": OKABE_ITO[2],
}


@dataclasses.dataclass
class Filled:
    """What a box says of its module: where and what it is, its shapes, its size and time."""

    module: str
    shapes: str
    facts: str
    times: int = 1


def svg(tops: list[Box], filled: Mapping[Box, Filled]) -> str:
    """The figure; a box that is not in `filled` is dashed: no module fits it.

    The boxes are groups with `data-box`, their number in the order of the figure's lines.
    """
    numbers = {box: i for i, box in enumerate(b for top in tops for b in top.every())}
    columns = _columns(tops)
    high = max(sum(_height(b) + GAP for b in column) for column in columns) + 2 * EDGE
    wide = 2 * EDGE + len(columns) * (WIDE + 2 * PAD + 2 * ASIDE) - ASIDE
    draw = _Drawing(filled, numbers)
    for i, column in enumerate(columns):
        draw.aside = EDGE + i * (WIDE + 2 * PAD + 2 * ASIDE)
        y = high - EDGE
        for box in column:
            y = draw.box(box, draw.aside + ASIDE, y, WIDE + 2 * PAD)
            draw.up(draw.aside + ASIDE + PAD + WIDE // 2, y + GAP)
    shown = "".join(draw.boxes + draw.arrows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" {FAMILY}>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        f'<rect width="{wide}" height="{high}" rx="6" fill="white"/>{shown}</svg>'
    )


def _columns(tops: list[Box]) -> list[list[Box]]:
    """Stacks side by side, what is put in under its stack, what comes out over it."""
    columns: list[list[Box]] = [[]]
    waiting: list[Box] = []  # inputs after a stack: of the next one, if one follows
    for top in tops:
        full = any(b.kind == "stack" for b in columns[-1])
        if full and top.kind in INPUTS:
            waiting.append(top)
        elif full and top.kind == "stack":
            columns.append([*waiting, top])
            waiting = []
        else:
            columns[-1] += [*waiting, top]
            waiting = []
    columns[-1] += waiting
    return columns


def _height(box: Box) -> int:
    if not box.inside:
        return LEAF
    return HEAD + sum(_height(b) + GAP for b in box.inside)


class _Drawing:
    """Boxes and arrows, bottom to top."""

    def __init__(self, filled: Mapping[Box, Filled], numbers: Mapping[Box, int]):
        self.filled, self.numbers = filled, numbers
        self.boxes: list[str] = []
        self.arrows: list[str] = []
        self.stack = (0, 0)  # right edge of the stack drawn before
        self.aside = 0  # left of the column, where arrows go past boxes
        self.below = 0  # the lower edge of the box drawn before

    def box(self, box: Box, x: int, bottom: int, wide: int) -> int:
        """Draw a box that stands on `bottom`; where the next one stands."""
        high, middle = _height(box), x + wide // 2
        y = bottom - high
        self._frame(box, x, y, wide, high)
        inner = bottom - GAP
        for child in box.inside:
            self.up(middle, inner + GAP)  # out of the one below, or in at the frame
            inner = self.box(child, x + PAD // 2, inner, wide - PAD)
        if not box.inside:
            self._past(box, x, y)
            self.below = bottom
        if box.kind == "stack":
            self.stack = (x + wide, y + HEAD // 2)
        return y - GAP

    def _frame(self, box: Box, x: int, y: int, wide: int, high: int) -> None:
        found = self.filled.get(box)
        colour = "white" if box.inside or not found else COLOURS.get(box.kind, "#cccccc")
        label = re.sub(r" \(\d+\)$", "", box.label)
        if box.repeats != 1:
            times = f"{box.repeats} = {found.times}" if found else box.repeats
            label += f"  × {times if isinstance(box.repeats, str) else box.repeats}"
        text = [_text(x + 8, y + 15, label, INK, 12, ' font-weight="bold"')]
        if found:
            text.append(_text(x + wide - 8, y + 15, found.facts, INK, 10, ' text-anchor="end"'))
            shown = [found.module] if box.inside else [found.module, found.shapes]
            told = [label, found.module, found.shapes, found.facts]
        else:
            shown = told = ["no module of this model"]
        for i, line in enumerate(shown):
            text.append(_text(x + 8, y + 29 + 14 * i, _cut(line), INK, 10, f" {MONO}"))
        dashed = "" if found else ' stroke-dasharray="5 4"'
        self.boxes.append(
            f'<g data-box="{self.numbers[box]}"><title>{html.escape(chr(10).join(told))}</title>'
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" fill="{colour}" '
            f'fill-opacity="0.4" stroke="{LINE}"{dashed}/>{"".join(text)}</g>'
        )

    def _past(self, box: Box, x: int, y: int) -> None:
        """Arrows that do not come from the box below."""
        if re.search(r"\badd\b", box.label) and self.below:  # past the box before, added back
            low = self.below + GAP // 2
            self._arrow(f"M{x + WIDE // 2} {low}H{x - 12}V{y + LEAF // 2}H{x}")
        if box.kind == "cross-attention" and self.stack != (0, 0):
            right, top = self.stack
            self._arrow(f"M{right} {top}H{self.aside + 2}V{y + LEAF // 2}H{x}")

    def up(self, x: int, bottom: int) -> None:
        """An arrow from here over one gap."""
        self._arrow(f"M{x} {bottom}V{bottom - GAP + 1}")

    def _arrow(self, path: str) -> None:
        self.arrows.append(
            f'<path d="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)" '
            'pointer-events="none"/>'
        )


def _cut(line: str) -> str:
    return line if len(line) <= LETTERS else line[: LETTERS - 1] + "…"


def _text(x: int, y: int, words: str, colour: str, size: int, style: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{style}>'
        f"{html.escape(words)}</text>"
    )
