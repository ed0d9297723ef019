"""A difference under its cell: of each rank that differs both lanes, expected above, got below.

An svg inside an `<img>`: it needs no script and stays in a notebook that is not trusted. Its card
is white, so that it reads the same in a dark theme.
"""

import base64
import html as escape

from .align import Column
from .palette import OKABE_ITO
from .picture import INK, PALE
from .steps import P2P, Step
from .words import count, group_text, ranks_text

NAMES, COLUMN, LANE, HEADER = 78, 136, 36, 24
BEFORE, SHOWN, RANKS = 2, 6, 4  # columns before the first difference, columns, ranks drawn
EQUAL = ("#EEF1F5", "#D0D7DE")  # of a call: paper and frame
WANTED, FOUND = ("#DCEBF5", OKABE_ITO[0]), ("#FBE3D3", OKABE_ITO[5])
BAND, FIRST = "#FFF4C9", "#8A3700"


def html(words: str, columns: dict[int, list[Column]], firsts: list[int]) -> str:
    """The sentence, and below it the picture of the ranks whose calls differ.

    firsts are the ranks that share the first difference.
    """
    said = escape.escape(words)
    differing = [rank for rank, mine in columns.items() if not all(c.equal for c in mine)]
    if not differing:
        return f"<div>{said}</div>"
    data = base64.b64encode(svg(columns, differing, firsts).encode()).decode()
    return (
        f'<div>{said}</div><img alt="{said}" src="data:image/svg+xml;base64,{data}" '
        f'style="max-width:100%;margin-top:4px">'
    )


def svg(columns: dict[int, list[Column]], differing: list[int], firsts: list[int]) -> str:
    """The lanes of these ranks, a window of columns around the first difference of each."""
    out: list[str] = []
    y, alike = 6, sorted(set(firsts[1:]) & set(differing))  # drawn once
    drawn = [*firsts[:1], *(rank for rank in differing if rank not in firsts)]
    for rank in drawn[:RANKS]:
        y = _rank(out, columns[rank], rank, rank == firsts[0], y)
    equal, more = sorted(set(columns) - set(differing)), len(drawn) - RANKS
    rest = [f"{ranks_text(alike)}: the same"] if alike else []
    rest += [f"{ranks_text(equal)}: equal"] if equal else []
    rest += [f"{count(more, 'more rank')} differ{'s' if more == 1 else ''}"] if more > 0 else []
    if rest:
        out.append(_text(8, y + 12, "; ".join(rest), PALE))
        y += 20
    most = max(len(columns[rank]) for rank in drawn[:RANKS])
    width, height = NAMES + max(3, min(SHOWN, most)) * COLUMN + 8, y + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Verdana, sans-serif">'
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>{"".join(out)}</svg>'
    )


def _rank(out: list[str], columns: list[Column], rank: int, first: bool, y: int) -> int:
    at = next(i for i, c in enumerate(columns) if not c.equal)
    start = max(0, min(at - BEFORE, len(columns) - SHOWN))
    shown = columns[start : start + SHOWN]
    out.append(_text(8, y + 14, f"rank {rank}", INK, 12, bold=True))
    for row, name in enumerate(("expected", "got")):
        out.append(_text(8, y + HEADER + LANE * row + 20, name, PALE))
    for place, c in enumerate(shown):
        x = NAMES + place * COLUMN
        if start + place == at and first:
            high = HEADER + 2 * LANE + 2
            out.append(f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{high}" fill="{BAND}"/>')
            out.append(_text(x + 6, y + 15, f"▼ step {c.step}: first", FIRST, 11, bold=True))
        else:
            out.append(_text(x + 6, y + 15, f"step {c.step}", PALE, 10))
        for row, (step, other) in enumerate(((c.expected, c.got), (c.got, c.expected))):
            top = y + HEADER + LANE * row
            _cell(out, x + 3, top, step, other, EQUAL if c.equal else (WANTED, FOUND)[row], c)
    end = y + HEADER + 2 * LANE
    before, after = start, len(columns) - start - len(shown)
    if before or after:
        hidden = [f"{n} more {side}" for n, side in ((before, "before"), (after, "after")) if n]
        out.append(_text(8, end + 13, f"… {', '.join(hidden)}", PALE, 10))
        end += 16
    return end + 12


def _cell(out: list[str], x: int, y: int, step: Step | None, other, colours, c: Column) -> None:
    fill, line = colours
    box = f'<rect x="{x}" y="{y}" width="{COLUMN - 6}" height="{LANE - 4}" rx="3" '
    if step is None:
        out.append(box + f'fill="white" stroke="{line}" stroke-dasharray="4 3"/>')
        words = "nothing" if c.moved is None else f"is step {c.moved + 1}"
        out.append(_text(x + 6, y + 20, words, PALE))
        return
    out.append(box + f'fill="{fill}" stroke="{line}" stroke-width="{1 if c.equal else 2}"/>')
    upper, lower = lines(step, other)
    out.append(_text(x + 6, y + 13, upper, INK, 11, bold=not c.equal))
    out.append(_text(x + 6, y + 26, lower, INK, 10))


def lines(step: Step, beside: Step | None = None) -> tuple[str, str]:
    """A call in two short lines."""
    if step.detail:
        return step.op, step.detail
    word = "from" if step.op in ("recv", "broadcast", "scatter") else "to"
    upper = step.op + (f" {word} {step.peer}" if step.peer is not None else "")
    size = f"{step.nbytes:,} B" if step.op != "barrier" else ""
    for mine, other in (
        (step.reduce, beside and beside.reduce),
        (step.dtype, beside and beside.dtype),
    ):
        size += f" {mine}" if other and mine != other else ""
    alone = step.op in P2P and (beside is None or beside.group == step.group)
    return upper, size if alone else ", ".join(filter(None, [size, group_text(step, beside)]))


def _text(x: int, y: int, words: str, colour: str, size: int = 11, bold: bool = False) -> str:
    most = round((COLUMN - 12) / size / (0.66 if bold else 0.58)) if x >= NAMES else 90
    words = words if len(words) <= most else words[: most - 1] + "…"
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{weight}>'
        f"{escape.escape(words)}</text>"
    )
