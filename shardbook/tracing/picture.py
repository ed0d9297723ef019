"""The trace as a small PNG: what a reader sees before the notebook is trusted, and on GitHub."""

import io
import itertools
from functools import cache
from pathlib import Path

from .lanes import AXIS, COUNTER, GAP, HEADER, NAMES, ROW, Slice, Track
from .layout import Layout, content_height, describe, length
from .palette import OTHER

WIDTH, SCALE = 900, 1.5  # CSS pixels; drawn larger, so that text stays sharp
TALLEST = 820
INK, PALE, GRID, BAND, ARROW = "#1b1f24", "#57606a", "#e4e7eb", "#eef1f5", "#6e7781"
LEGEND = 18


@cache
def _font(size: int, bold: bool = False):
    import matplotlib
    from PIL import ImageFont

    # matplotlib ships this font: the same picture on every machine
    face = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / face), round(size * SCALE))


def png(made: Layout, title: str = "") -> bytes:
    """Draw the trace as its view opens, on a white card. The same trace gives the same bytes."""
    from PIL import Image

    legend = _legend(made)
    full = content_height(made) + AXIS + 26 + LEGEND * len(legend) + 6
    high = min(full, TALLEST)
    image = Image.new("RGB", (round(WIDTH * SCALE), round(high * SCALE)), "white")
    card = _Card(image, made.window)
    card.text(4, 13, fits(describe(made, title), WIDTH - 90, 12), size=12)
    if made.label:
        card.text(WIDTH - 80, 13, made.label, "#B34700", 12, bold=True)
    y = 26.0
    for row in legend:
        for x, name, colour in row:
            card.box(x, y + 3, x + 10, y + 13, colour)
            card.text(x + 14, y + 8, name, PALE, 9)
        y += LEGEND
    _axis(card, made, y, high)
    y += AXIS
    where: dict[int, tuple[float, float, Track | None]] = {}  # of a lane: top, height, rows or one
    left = 0
    for pid, name in made.processes.items():
        if y + HEADER > high - (20 if full > high else 0):
            left += 1
            continue
        y = _process(card, made, pid, name, y, where)
    if len(made.flows) <= 160:  # more would hide the bars
        for (a, s, t0), (b, r, t1) in made.flows:
            if id(a) in where and id(b) in where:
                card.arrow(t0, _middle(where[id(a)], s), t1, _middle(where[id(b)], r))
    if full > high:
        card.box(0, high - 20, WIDTH, high, "white")
        if left:
            shown = len(made.processes) - left
            words = f"the first {shown} of {len(made.processes)} ranks; the live view has them all"
        else:
            words = "the lanes below are cut off here; the live view has them all"
        card.text(6, high - 10, "… " + words, PALE, 10)
    out = io.BytesIO()
    # a palette: half the bytes, and the colours here are few
    image.quantize(48, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _process(card, made: Layout, pid, name: str, y: float, where: dict) -> float:
    """A rank: its name, and its lanes below, or one row that stands for them. The y below it."""
    lanes = [t for t in made.tracks if t.pid == pid]
    shut = pid in made.shut
    card.box(0, y, NAMES - 3 if shut else WIDTH, y + HEADER - 2, BAND)
    card.text(6, y + HEADER / 2 - 1, fits(name, NAMES - 14 if shut else WIDTH - 20, 11), bold=True)
    if shut:
        lanes = [t for t in lanes if not t.points]
        for track in sorted((t for t in lanes if t.nests), key=lambda t: t.paced):
            for s in sorted(track.slices, key=lambda s: s.row):
                card.slice(made, s, y + 1, HEADER - 2, s.own * 2 > s.dur)
        for track in (t for t in lanes if not t.nests):
            for s in track.slices:
                card.slice(made, s, y + HEADER - 7, 6, False)
        where |= {id(t): (y, HEADER, None) for t in lanes}
        return y + HEADER
    y += HEADER
    for track in (t for t in lanes if t.height):
        words = track.name.rpartition(" (")[0] or track.name if track.points else track.name
        card.text(6, y + ROW / 2, fits(words, NAMES - 10, 9), PALE, 9)
        if track.points:
            _counter(card, track, y)
        for s in sorted(track.slices, key=lambda s: s.row):
            row = y if track.fold else y + s.row * track.row
            tall = ROW if track.fold else track.row
            card.slice(made, s, row, tall, tall == ROW and (not track.fold or s.own * 2 > s.dur))
        where[id(track)] = (y, track.height, None if track.fold else track)
        y += track.height + GAP
    return y


def _middle(place: tuple[float, float, Track | None], s: Slice) -> float:
    top, height, track = place
    return top + ((s.row + 0.5) * track.row if track else height / 2) - 1


class _Card:
    """Drawing in CSS pixels and in nanoseconds."""

    def __init__(self, image, window: tuple[int, int]):
        from PIL import ImageDraw

        self.draw, (self.start, self.stop) = ImageDraw.Draw(image), window

    def at(self, ns: float) -> float:
        share = (ns - self.start) / max(1, self.stop - self.start)
        return NAMES + min(max(share, -0.01), 1) * (WIDTH - NAMES - 6)

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        a, b, c, d = (round(v * SCALE) for v in (x0, y0, x1, y1))
        self.draw.rectangle((a, b, max(a, c - 1), max(b, d - 1)), fill=colour)

    def text(self, x: float, y: float, words: str, colour=INK, size=11, bold=False, anchor="lm"):
        font = _font(size, bold)
        self.draw.text((x * SCALE, y * SCALE), words, fill=colour, font=font, anchor=anchor)

    def slice(self, made: Layout, s: Slice, top: float, tall: float, words: bool) -> None:
        if s.end < self.start or s.ts > self.stop:
            return
        x0, x1 = max(self.at(s.ts), NAMES), max(self.at(s.end), self.at(s.ts) + 0.7)
        colour = made.kinds[s.kind][1]
        if s.mark:
            x1 = x0 + 2.5
        gap = 0.7 if x1 - x0 > 3 else 0  # neighbours of one colour stay two bars
        self.box(x0, top, x1 - gap, top + tall - 2, colour)
        if words and x1 - x0 > 16:
            room = x1 - x0 - 4
            ink = "white" if dark(colour) else INK
            self.text(x0 + 2.5, top + tall / 2 - 1, caption(s, room), ink, 9)

    def arrow(self, t0: float, y0: float, t1: float, y1: float) -> None:
        if max(t0, t1) < self.start:
            return
        x0, x1 = self.at(t0), self.at(t1)
        points = [(v * SCALE, w * SCALE) for v, w in ((x0, y0), (x1 - 3, y1))]
        self.draw.line(points, fill=ARROW, width=1)
        head = ((x1, y1), (x1 - 5, y1 - 2.6), (x1 - 5, y1 + 2.6))
        self.draw.polygon([(v * SCALE, w * SCALE) for v, w in head], fill=ARROW)


def _axis(card: _Card, made: Layout, y: float, high: float) -> None:
    span = card.stop - card.start
    for ns in ticks(min(span, max(1, made.duration)), max(0, card.start)):
        if not card.start <= ns <= card.stop:
            continue
        card.box(card.at(ns), y + AXIS - 8, card.at(ns) + 1, high, GRID)
        words = f"{ns / 1e6:g} ms" if span >= 1e6 else f"{ns / 1e3:g} µs"
        card.text(min(card.at(ns) + 3, WIDTH - 6 * len(words)), y + 8, words, PALE, 9)
    if card.start > 0:
        card.text(4, y + 8, f"from {length(card.start)} on", PALE, 9)


def _legend(made: Layout) -> list[list[tuple]]:
    """Rows of (x, name, colour), at most two; kinds without a colour of their own are one."""
    shown = {s.kind for t in made.tracks for s in t.slices if s.end >= made.window[0]}
    named = [(n, c) for i, (n, c) in enumerate(made.kinds) if c != OTHER and i in shown]
    others = sum(c == OTHER for _, c in made.kinds)
    if others:
        named.append((f"{others} other kinds" if others > 1 else made.kinds[-1][0], OTHER))
    rows, x = [[]], 4.0
    for i, (name, colour) in enumerate(named):
        words = fits(name, 150, 9)
        wide = _font(9).getlength(words) / SCALE + 26
        if x + wide > WIDTH - 60:
            if len(rows) == 2:
                rows[-1].append((x, f"and {len(named) - i} more", "white"))
                break
            rows.append([])
            x = 4.0
        rows[-1].append((x, words, colour))
        x += wide
    return rows if named else []


def _counter(card: _Card, track: Track, y: float) -> None:
    """A counter as steps, from 0 or, where it hardly moves, from its lowest value."""
    values = [v for points in track.points.values() for _, v in points]
    high, low = max(max(values), 0), min(values)
    low = low if high > low > high / 2 or low < 0 else 0
    floor, tall = y + COUNTER - 5, COUNTER - 10
    unit = track.name.rpartition("(")[2].rstrip(")") if track.name.endswith(")") else ""
    card.text(NAMES - 6, y + 24, f"{high:.4g} {unit}".strip(), PALE, 8, anchor="rm")
    card.text(NAMES - 6, floor - 1, f"{low:.4g} {unit}".strip(), PALE, 8, anchor="rm")
    card.box(NAMES, floor - tall, WIDTH, floor - tall + 1, GRID)
    for points in track.points.values():
        for (ts, value), after in zip(points, [*points[1:], None], strict=True):
            end = after[0] if after else ts
            if end < card.start:
                continue
            level = (value - low) / ((high - low) or 1) * tall
            card.box(max(card.at(ts), NAMES), floor - level, card.at(end) + 0.7, floor, "#8FBFDD")


def fits(words: str, width: float, size: int = 11) -> str:
    """The words, cut with … to `width` pixels; of a long name most is never measured."""
    font = _font(size)
    words = words[: int(width)]  # no letter is narrower than a pixel
    if font.getlength(words) <= width * SCALE:
        return words
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if font.getlength(words[:middle] + "…") <= width * SCALE:
            low = middle
        else:
            high = middle - 1
    return words[:low] + "…" if low else ""


def caption(s: Slice, room: float) -> str:
    """What a bar says: its name and, of a call, its bytes, where there is room."""
    name = s.name.removesuffix(" (paced)").removesuffix(" (simulated)")
    nbytes = s.args.get("bytes")
    if s.cat in ("collective", "p2p") and isinstance(nbytes, int) and nbytes > 0:
        both = f"{name} {size(nbytes)}"
        if len(both) < room and _font(9).getlength(both) <= room * SCALE:
            return both
    return fits(short(name), room, 9)


def size(nbytes: float) -> str:
    """Bytes to read: 512 B, 262 kB, 4.2 MB."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes:g} B"


def short(name: str) -> str:
    """The end of a dotted name, which says most: wq of layers.0.attn.wq, layers.0 of layers.0."""
    if len(name) > 500:
        return name
    parts = name.removesuffix(" (backward)").split(".")
    words = [i for i, part in enumerate(parts) if not part[:1].isdigit()]
    dotted = len(parts) > 1 and words and " " not in "".join(parts)
    return ".".join(parts[words[-1] :]) if dotted else name


def ticks(span: float, start: float = 0) -> list[int]:
    """Round times to mark on an axis `span` ns long: four to ten of them."""
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    step = next(s for s in steps if span / s <= 10)
    first = -(-round(start) // step) * step
    return list(range(first, round(start + span) + 1, step))


def dark(colour: str) -> bool:
    """Whether white text reads better than black on it (WCAG 2 relative luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179
