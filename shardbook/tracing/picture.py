"""The trace as a small PNG: what a reader sees before the notebook is trusted, and on GitHub."""

import io
import itertools
from functools import cache
from pathlib import Path

from .layout import AXIS, COUNTER, GAP, HEADER, NAMES, ROW, Layout, Track, content_height, describe

WIDTH, SCALE = 900, 1.5  # CSS pixels; drawn larger, so that text stays sharp
TALLEST = 820
INK, PALE, GRID, BAND = "#1b1f24", "#57606a", "#e4e7eb", "#eef1f5"


@cache
def _font(size: int, bold: bool = False):
    import matplotlib
    from PIL import ImageFont

    # matplotlib ships this font: the same picture on every machine
    face = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / face), round(size * SCALE))


def png(made: Layout, title: str = "") -> bytes:
    """Draw the whole trace on a white card. Deterministic: the same trace gives the same bytes."""
    from PIL import Image, ImageDraw

    full = content_height(made) + AXIS + 30
    high = min(full, TALLEST)
    image = Image.new("RGB", (round(WIDTH * SCALE), round(high * SCALE)), "white")
    draw = ImageDraw.Draw(image)

    def box(x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        a, b, c, d = (round(v * SCALE) for v in (x0, y0, x1, y1))
        draw.rectangle((a, b, max(a, c - 1), max(b, d - 1)), fill=colour)

    def text(x: float, y: float, words: str, colour: str = INK, size: int = 11, bold=False) -> None:
        draw.text((x * SCALE, y * SCALE), words, fill=colour, font=_font(size, bold), anchor="lm")

    def fits(words: str, width: float, size: int = 11) -> str:
        font = _font(size)
        if font.getlength(words) <= width * SCALE:
            return words
        while words and font.getlength(words + "…") > width * SCALE:
            words = words[:-1]
        return words + "…" if words else ""

    span = max(1, made.duration)

    def at(ns: float) -> float:
        return NAMES + ns / span * (WIDTH - NAMES - 6)

    text(4, 13, fits(describe(made, title), WIDTH - 90, 12), size=12)
    if made.label:
        text(WIDTH - 80, 13, made.label, "#B34700", 12, bold=True)
    y = 26.0
    for ns in ticks(span):
        box(at(ns), y + AXIS - 8, at(ns) + 1, high, GRID)
        words = f"{ns / 1e6:g} ms" if span >= 1e6 else f"{ns / 1e3:g} µs"
        text(min(at(ns) + 3, WIDTH - 6 * len(words)), y + 8, words, PALE, 9)
    y += AXIS
    last, top = object(), {}
    for track in made.tracks:
        if y > high:
            break
        if track.pid != last:
            last = track.pid
            box(0, y, WIDTH, y + HEADER - 2, BAND)
            text(6, y + HEADER / 2 - 1, fits(made.processes[last], WIDTH - 20), bold=True)
            y += HEADER
        text(6, y + min(ROW, COUNTER) / 2, fits(track.name, NAMES - 10, 9), PALE, 9)
        if track.points:
            _counter(track, at, y, COUNTER, box)
            y += COUNTER + GAP
            continue
        top[id(track)] = y
        for s in track.slices:
            x0, x1 = at(s.ts), max(at(s.ts + s.dur), at(s.ts) + 0.7)
            row = y + s.row * track.row
            colour = made.kinds[s.kind][1]
            gap = 0.7 if x1 - x0 > 3 else 0  # neighbours of one colour stay two bars
            box(x0, row, x1 - gap, row + track.row - 2, colour)
            if x1 - x0 > 30 and track.row == ROW:
                words = fits(short(s.name), x1 - x0 - 6, 9)
                text(x0 + 3, row + ROW / 2 - 1, words, "white" if dark(colour) else INK, 9)
        y += track.rows * track.row + GAP
    if len(made.flows) <= 80:  # more would hide the bars
        for (a, s, t0), (b, r, t1) in made.flows:
            if id(a) in top and id(b) in top:
                ends = [(at(t0), top[id(a)] + (s.row + 0.5) * a.row)]
                ends += [(at(t1), top[id(b)] + (r.row + 0.5) * b.row)]
                draw.line([(x * SCALE, v * SCALE) for x, v in ends], fill="#6e7781", width=1)
    if full > high:
        box(0, high - 20, WIDTH, high, "white")
        text(6, high - 10, "… more lanes below: trust the notebook to see them", PALE, 10)
    out = io.BytesIO()
    # a palette: half the bytes, and the colours here are few
    image.quantize(48, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _counter(track: Track, at, y: float, height: float, box) -> None:
    """A counter as steps, from 0 or, where it hardly moves, from its lowest value."""
    values = [v for points in track.points.values() for _, v in points]
    high, low = max(values), min(values)
    low = low if high > low > high / 2 or low < 0 else 0
    floor = y + height - 3
    for points in track.points.values():
        for (ts, value), after in zip(points, [*points[1:], None], strict=True):
            end = after[0] if after else ts
            level = (value - low) / ((high - low) or 1) * (height - 8)
            box(at(ts), floor - level, at(end) + 0.7, floor, "#8FBFDD")


def short(name: str) -> str:
    """The end of a dotted name, which says most: wq of layers.0.attn.wq, layers.0 of layers.0."""
    parts = name.removesuffix(" (backward)").split(".")
    words = [i for i, part in enumerate(parts) if not part[:1].isdigit()]
    dotted = len(parts) > 1 and words and " " not in "".join(parts)
    return ".".join(parts[words[-1] :]) if dotted else name


def ticks(span: float) -> list[int]:
    """Round times to mark on an axis `span` ns long: four to ten of them."""
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    step = next(s for s in steps if span / s <= 10)
    return list(range(0, round(span) + 1, step))


def dark(colour: str) -> bool:
    """Whether white text reads better than black on it (WCAG 2 relative luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179
