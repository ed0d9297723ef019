"""The inline view: one text/html that needs no server and no network.

An `<iframe srcdoc>` holds the viewer (the files in viewer/) and the events, both gzipped. Beside
it, in the same html, stands a picture of the trace: Jupyter drops the iframe of a notebook it does
not trust, and the picture stays; where the view runs, it hides the picture and takes its room.

The view has every slice; what is narrower than a pixel shares one only while it is drawn. Past
LIMIT bytes short slices are joined in what the notebook stores, and the view says so: t.save()
writes the whole trace to a file.

The memory of the process is recorded in every trace and is in what Save and Perfetto get, but it
says little of a step (it hardly falls), so its lanes show when asked for, by the button "memory".
A device's memory and the counters of other tools' traces have their lanes, with a scale.
"""

import base64
import gzip
import html as escape
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import picture
from .lanes import AXIS, COUNTER, GAP, HEADER, NAMES, ROW
from .layout import Layout, content_height, describe, layout
from .palette import OTHER

LIMIT = 600_000  # characters of packed events that a notebook cell may hold
MOST = 5000  # slices that are kept past that
BARS = 94  # tool bar, legend, bottom bar
LOWEST, HIGHEST = 200, 844
# page.js comes last: it runs the view
FILES = [
    "words",
    "data",
    "look",
    "lanes",
    "paint",
    "find",
    "tell",
    "mouse",
    "away",
    "figure",
    "page",
]

PAGE = """<!doctype html><meta charset="utf-8"><title>trace</title><body><script>
const bytes = text => new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]);
const unzip = text =>
  new Response(bytes(text).stream().pipeThrough(new DecompressionStream('gzip'))).text();
(async () => {
  const script = document.createElement('script');
  script.textContent = await unzip('%s');
  document.body.append(script);
  view(JSON.parse(await unzip('%s')));
})().catch(error => {
  document.body.textContent = 'This browser cannot show the trace: ' + error;
  try {
    frameElement.onload = null;
    frameElement.previousElementSibling.hidden = false;
    frameElement.style.height = '40px';
  } catch { /* another origin's page: the words above stay */ }
});
</script>"""


@dataclass
class Figure:
    """A drawing to stand over the lanes: its svg, what it says in words, the slices of its boxes.

    modules: of each box, in the order of `data-box`, the names of its modules' slices.
    """

    svg: str
    words: str
    modules: list[list[str]]

    @property
    def high(self) -> int:
        """Pixels as the svg asks for them."""
        return int(re.search(r'height="(\d+)"', self.svg)[1])


def html(
    chrome: dict,
    title: str = "",
    height: int | None = None,
    most: int | None = None,
    figure: Figure | None = None,
) -> str:
    """The trace `{"traceEvents": [...]}` (ts and dur in µs) as html for one notebook cell.

    height: pixels, else as high as the lanes need, up to what the page shows at once. most: past so
    many slices the short ones are joined, else past LIMIT bytes; the view says so. figure: a
    drawing over the lanes whose boxes lead to the slices of their modules.
    """
    made = layout(chrome, most)
    events = _pack(_json(pack(made, title, height, figure)))
    if most is None and len(events) > LIMIT:
        made = layout(chrome, MOST)
        events = _pack(_json(pack(made, title, height, figure)))
    # the view itself sees how high the notebook is; 85vh is for pages where it may not
    high = min(max(content_height(made) + AXIS + BARS, LOWEST), HIGHEST) + (
        figure.high if figure else 0
    )
    size = f"{height}px" if height else f"min({high}px,85vh)"
    page = PAGE % (_pack(script()), events)
    png = base64.b64encode(picture.png(made, title)).decode()
    words = escape.escape(describe(made, title))
    # escape only what ends an attribute: the page is long
    srcdoc = page.replace("&", "&amp;").replace('"', "&quot;")
    return (
        f'<div class="shardbook-trace"><div>{still(figure) if figure else ""}'
        f'<img alt="{words}" src="data:image/png;base64,{png}" style="max-width:100%">'
        "<br><small>A still picture of the trace. Where its scripts may run (in Jupyter once you "
        "ran the cell or trusted the notebook, in an exported page in a browser) a live view stands"
        " here, to zoom and click; on a site that shows notebooks, such as GitHub, the picture is"
        " all.</small></div>"
        # no height until it runs: with scripts off there is no empty box below the picture
        f'<iframe srcdoc="{srcdoc}" title="{words}" style="width:100%;border:0;height:0" '
        f'onload="this.previousElementSibling.hidden=true;if(!this.offsetHeight)'
        f"this.style.height='{size}'\">"
        "</iframe></div>"
    )


@cache
def script() -> bytes:
    """The viewer as one function: its files, without indentation and lines that are comments."""
    lines = ["function view(data) {", "'use strict';"]
    for name in FILES:
        text = (Path(__file__).with_name("viewer") / f"{name}.js").read_text(encoding="utf-8")
        lines += [line for line in map(str.strip, text.splitlines()) if line[:2] not in ("//", "")]
    return "\n".join([*lines, "}"]).encode()


def still(figure: Figure) -> str:
    """The figure as a picture alone: what stays where no script runs."""
    data = base64.b64encode(figure.svg.encode()).decode()
    words = escape.escape(figure.words)
    return f'<img alt="{words}" src="data:image/svg+xml;base64,{data}" style="max-width:100%"><br>'


def pack(
    made: Layout, title: str = "", height: int | None = None, figure: Figure | None = None
) -> dict:
    """The layout as viewer/data.js reads it: columns of integers, each text and args dict once."""
    texts, args = _Once(), _Once()
    tracks, where = [], {}
    for i, track in enumerate(made.tracks):
        slices = track.slices
        where |= {id(s): (i, j) for j, s in enumerate(slices)}
        starts = [s.ts for s in slices]
        tracks.append(
            {
                "pid": track.pid,
                "tid": track.tid,
                "name": track.name,
                "rows": track.rows,
                "px": track.row,
                "loose": not track.nests,
                "paced": track.paced,
                "memory": track.memory,
                "fold": track.fold,
                "marks": [j for j, s in enumerate(slices) if s.mark],
                # differences are short numbers, which gzip well
                "ts": [b - a for a, b in zip([0, *starts], starts, strict=False)],
                "dur": [s.dur for s in slices],
                "own": [s.own - s.dur for s in slices],
                "row": [s.row for s in slices],
                "kind": [s.kind for s in slices],
                "text": [texts(s.name) for s in slices],
                "cat": [texts(s.cat) for s in slices],
                "args": [args(_dump(s.args)) for s in slices],
                "series": [
                    {"name": name, "ts": [p[0] for p in points], "value": [p[1] for p in points]}
                    for name, points in track.points.items()
                ],
            }
        )
    return {
        "title": title,
        "figure": {"svg": figure.svg, "modules": figure.modules} if figure else None,
        "label": made.label,
        "duration": made.duration,
        "total": made.total,
        "below": made.below,
        "window": made.window,
        "shut": [i for i, pid in enumerate(made.processes) if pid in made.shut],
        "other": OTHER,
        "height": height or 0,
        "sizes": {
            "row": ROW,
            "header": HEADER,
            "counter": COUNTER,
            "gap": GAP,
            "axis": AXIS,
            "names": NAMES,
            "lowest": LOWEST,
        },
        "processes": [[pid, name] for pid, name in made.processes.items()],
        "kinds": made.kinds,
        "texts": list(texts.seen),
        "args": [json.loads(a) for a in args.seen],
        "tracks": tracks,
        "flows": [
            [*where[id(a)], when, *where[id(b)], then]
            for (_, a, when), (_, b, then) in made.flows
            if id(a) in where and id(b) in where
        ],
    }


class _Once:
    """Numbers texts in the order first seen."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.seen.setdefault(text, len(self.seen))


def _dump(args: dict) -> str:
    try:
        return json.dumps(args, default=str, allow_nan=False)
    except ValueError:  # NaN is no JSON: show it as text
        return json.dumps({str(k): str(v) for k, v in args.items()})


def _json(data: dict) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=str).encode()


def _pack(data: bytes) -> str:
    # mtime=0: the same trace gives the same html
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
