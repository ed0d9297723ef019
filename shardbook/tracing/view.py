"""The inline view: one text/html that needs no server and no network.

An `<iframe srcdoc>` holds viewer.js and the events, both gzipped. Beside it, in the same html,
stands a picture of the trace: Jupyter drops the iframe of a notebook it does not trust, and the
picture stays; where the view runs, it hides the picture.
"""

import base64
import gzip
import html as escape
import json
from pathlib import Path

from . import picture
from .layout import AXIS, COUNTER, GAP, HEADER, NAMES, ROW, Layout, content_height, describe, layout

MOST = 5000  # slices drawn one by one; a notebook should stay small and quick
BARS = 94  # tool bar, legend, bottom bar
LOWEST, HIGHEST = 200, 844

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


def html(chrome: dict, title: str = "", height: int | None = None, most: int = MOST) -> str:
    """The trace `{"traceEvents": [...]}` (ts and dur in µs) as html for one notebook cell.

    height: pixels, else as high as the trace needs, up to a screen. most: past so many slices the
    short ones are drawn together, and the view says so.
    """
    made = layout(chrome, most)
    if height is None:
        height = min(max(content_height(made) + AXIS + BARS, LOWEST), HIGHEST)
    script = Path(__file__).with_name("viewer.js").read_bytes()
    page = PAGE % (_pack(script), _pack(_json(pack(made, title))))
    png = base64.b64encode(picture.png(made, title)).decode()
    words = escape.escape(describe(made, title))
    # escape only what ends an attribute: the page is long
    srcdoc = page.replace("&", "&amp;").replace('"', "&quot;")
    return (
        '<div class="shardbook-trace"><div>'
        f'<img alt="{words}" src="data:image/png;base64,{png}" style="max-width:100%">'
        "<br><small>A picture of the trace: run the cell, or trust the notebook, to zoom and click."
        f'</small></div><iframe srcdoc="{srcdoc}" title="{words}" style="width:100%;border:0;'
        f'height:{height}px" onload="this.previousElementSibling.hidden=true"></iframe></div>'
    )


def pack(made: Layout, title: str = "") -> dict:
    """The layout as viewer.js reads it: columns of integers, each text and each args dict once."""
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
        "label": made.label,
        "duration": made.duration,
        "total": made.total,
        "below": made.below,
        "sizes": {
            "row": ROW,
            "header": HEADER,
            "counter": COUNTER,
            "gap": GAP,
            "axis": AXIS,
            "names": NAMES,
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
