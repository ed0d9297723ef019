"""The trace in a real JupyterLab: run, look, zoom, click, reopen, trust, export, Perfetto."""

import collections
import json
import os
from pathlib import Path

import nbformat
import pytest
import torch

import shardbook as sb
from shardbook.tracing import view

from ..test_trace_models import dit, gradients, mixtral
from ..test_trace_ranks import _all_kinds
from .conftest import idle, notebook

TimeoutError = pytest.importorskip("playwright.sync_api").TimeoutError

RANKS = """
import shardbook as sb

def step():
    import torch
    import torch.distributed as dist
    from torch import nn
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    with sb.mark("training step"):
        y = block(torch.randn(8, 64)).square().mean()
        y.backward()
        for p in block.parameters():
            dist.all_reduce(p.grad)
    rank, size = dist.get_rank(), dist.get_world_size()
    there, back = torch.full((5,), float(rank)), torch.empty(5)
    ops = [dist.P2POp(dist.isend, there, (rank + 1) % size),
           dist.P2POp(dist.irecv, back, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return back.tolist()

result = sb.run(step, world_size=4, trace=True)
result.trace
"""
SAVE = "result.trace.save('step.json'); print([v[0] for v in result.values])"
HOSTILE = """
from IPython.display import HTML
from shardbook.tracing import view
bad = '<img src=x onerror="window.hacked=true;try{parent.hacked=true}catch(e){}">'
close = '</script><script>window.hacked=true;parent.hacked=true</script>'
HTML(view.html({"traceEvents": [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": bad}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": close}},
    {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 9.5, "name": bad + close, "cat": bad,
     "args": {"type": bad, bad: close, "inputs": close}},
    {"ph": "C", "pid": 0, "name": bad, "ts": 1, "args": {bad: 3}},
]}, title=bad + close))
"""
FILLER = "# " + "\n# ".join(["a line to scroll by"] * 60)
SHOTS = os.environ.get("SHARDBOOK_SCREENSHOTS")  # a folder: keep pictures of what the tests saw


def shot(page, name):
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def run_command(page, command, **args):
    # not awaited: a command may wait for a dialog or for the kernel
    page.evaluate("([id, args]) => { jupyterapp.commands.execute(id, args) }", [command, args])


def open_notebook(page, lab, name):
    page.goto(lab.url(f"lab/tree/{name}?reset"))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function("window.jupyterapp")


def views(page, count=1):
    """The frames of `count` inline views, once they are drawn."""
    page.wait_for_function(
        "n => document.querySelectorAll('.shardbook-trace iframe').length >= n", arg=count
    )
    frames = [e.content_frame() for e in page.query_selector_all(".shardbook-trace iframe")]
    for frame in frames:
        frame.wait_for_function("window.trace")
    return frames


def point(page, frame, index):
    """Where on the page slice `index` of the view is, scrolled into sight."""
    for _ in range(2):
        place = frame.evaluate(
            """i => { const lanes = document.querySelector('.lanes'), s = trace.slices[i];
              const box = lanes.getBoundingClientRect(), y = trace.place(s).y;
              if (y > box.bottom - 12 || y < box.top + 34) lanes.scrollTop += y - box.top - 60;
              return trace.place(s); }""",
            index,
        )
        box = frame.frame_element().bounding_box()
        x, y = box["x"] + place["x"], box["y"] + place["y"]
        page.evaluate(
            """y => { const s = document.querySelector('.jp-Notebook .jp-WindowedPanel-outer')
                 || document.scrollingElement;
               if (y < 150 || y > innerHeight - 150) s.scrollBy(0, y - innerHeight / 2); }""",
            y,
        )
    return x, y


def settled(page, frame, index):
    """The point of slice `index` once it stays where it is."""
    before = None
    while before != (before := point(page, frame, index)):
        frame.wait_for_timeout(100)
    return before


def until(page, frame, index, act, seen, tries=6):
    """Act on slice `index` until `seen`: a page that still settles may move it away meanwhile."""
    for attempt in range(tries):
        act(*settled(page, frame, index))
        try:
            return frame.wait_for_function(seen, arg=index, timeout=2000 * (attempt + 1))
        except TimeoutError:
            shot(page, f"missed-{attempt}")
            page.mouse.move(1, 1)
    pytest.fail(f"{tries} tries at {frame.evaluate('i => trace.slices[i].name', index)!r}: {seen}")


def click(page, frame, index):
    """Click on slice `index`: its details show. Those of another one, which may lie over it, go."""
    if frame.is_visible(".details .close"):
        frame.click(".details .close")
    seen = """i => { const box = document.querySelector('.details'), h1 = box.querySelector('h1');
      return !box.hidden && h1 !== null && h1.textContent === trace.slices[i].name; }"""
    until(page, frame, index, page.mouse.click, seen)


def hover(page, frame, index):
    """Point at slice `index`: what it is shows beside the mouse."""
    until(page, frame, index, page.mouse.move, "i => !document.querySelector('.tip').hidden")


def find(frame, name):
    """The number of the longest slice with this name: the easiest to hit."""
    index = frame.evaluate(
        """name => trace.slices.reduce((best, s, i) =>
             s.name === name && (best < 0 || s.dur > trace.slices[best].dur) ? i : best, -1)""",
        name,
    )
    assert index >= 0, (name, frame.evaluate("trace.slices.map(s => s.name)"))
    return index


@pytest.fixture(scope="module")
def page(context):
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda e: page.errors.append(str(e)))
    yield page
    page.close()


@pytest.fixture(scope="module")
def ran(page, lab):
    """The notebook after its cells ran in JupyterLab, saved."""
    path = notebook(lab.root / "ranks.ipynb", RANKS, SAVE, HOSTILE, FILLER)
    open_notebook(page, lab, path.name)
    idle(page)
    run_command(page, "notebook:run-all-cells")
    page.wait_for_selector(".shardbook-trace iframe", timeout=150_000)
    frames = views(page, 2)
    run_command(page, "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    return path, frames


def test_the_ranks_have_lanes_and_their_calls_are_in_them(page, ran):
    _, (frame, _) = ran
    facts = frame.evaluate(
        """({ names: trace.data.processes.map(p => p[1]),
              lanes: trace.tracks.map(t => [t.pid, t.name, t.slices.length, t.series.length]),
              flows: trace.flows.length })"""
    )
    assert facts["names"] == [f"rank {r}" for r in range(4)]
    assert "4 ranks" in frame.inner_text(".facts")
    for rank in range(4):
        modules = [n for pid, name, n, _ in facts["lanes"] if pid == rank and name == "modules"]
        assert modules and modules[0] >= 9  # mark, block and three layers, forward and backward
        assert any(series for pid, _, _, series in facts["lanes"] if pid == rank)  # memory
    assert facts["flows"] == 4  # each rank sends to the next
    assert frame.evaluate("trace.slices.filter(s => s.name === 'all_reduce').length") == 16
    shot(page, "light")


def test_the_lanes_are_painted(ran):
    _, (frame, _) = ran
    # the canvas at the middle of a slice has the colour of its kind
    index = find(frame, "training step")
    painted, expected = frame.evaluate(
        """i => { const s = trace.slices[i], p = trace.place(s);
          const canvas = document.querySelector('canvas:not(.axis)');
          const box = canvas.getBoundingClientRect();
          const r = canvas.width / box.width, x = (p.x - box.left) * r, y = (p.y - box.top - 7) * r;
          const d = canvas.getContext('2d').getImageData(x, y, 1, 1).data;
          const hex = '#' + [...d].slice(0, 3).map(v => v.toString(16).padStart(2, '0')).join('');
          return [hex, trace.data.kinds[s.kind][1].toLowerCase()]; }""",
        index,
    )
    assert painted == expected


def test_wheel_scrolls_the_notebook_and_ctrl_wheel_zooms(page, ran):
    _, (frame, _) = ran
    scroll = "document.querySelector('.jp-Notebook .jp-WindowedPanel-outer').scrollTop"
    frame.click("text=fit")
    page.mouse.move(*settled(page, frame, find(frame, "training step")))
    whole, before = frame.evaluate("trace.range()"), page.evaluate(scroll)
    page.mouse.wheel(0, 240)
    page.wait_for_function(f"{scroll} > {before + 100}")
    assert frame.evaluate("trace.range()") == whole

    page.mouse.move(*settled(page, frame, find(frame, "training step")))
    before = page.evaluate(scroll)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    frame.wait_for_function("w => trace.range()[1] - trace.range()[0] < w * 0.8", arg=whole[1])
    assert page.evaluate(scroll) == before
    frame.click("text=fit")
    assert frame.evaluate("trace.range()") == whole


def test_a_click_shows_the_arguments_as_text(page, ran):
    _, (frame, _) = ran
    click(page, frame, find(frame, "all_reduce"))
    words = frame.inner_text(".details")
    assert "all_reduce" in words and "float32" in words and "bytes" in words
    click(page, frame, find(frame, "0"))
    words = frame.inner_text(".details")
    assert "Linear" in words and "float32[8, 64]" in words and "float32[96, 64]" in words
    shot(page, "clicked")


def test_keys_move_and_search_finds(page, ran):
    _, (frame, _) = ran
    click(page, frame, find(frame, "1"))
    page.keyboard.press("f")
    a, b = frame.evaluate("trace.range()")
    assert b - a < frame.evaluate("trace.data.duration") / 2
    page.keyboard.press("s")
    c, d = frame.evaluate("trace.range()")
    assert c < a and d > b
    page.keyboard.press("0")
    frame.fill("input", "gelu")
    assert frame.inner_text(".found") == "8 found"  # forward and backward on four ranks
    frame.press("input", "Enter")
    assert frame.inner_text(".found") == "1 of 8"
    assert "GELU" in frame.inner_text(".details")
    shot(page, "search")
    frame.press("input", "Escape")
    page.keyboard.press("Escape")
    assert not frame.is_visible(".details")


def test_dark_theme_is_followed_and_legible(page, ran):
    _, (frame, _) = ran
    run_command(page, "apputils:change-theme", theme="JupyterLab Dark")
    frame.wait_for_function("trace.dark()")
    click(page, frame, find(frame, "2"))
    ratios = frame.evaluate(
        """() => {
          const light = c => { const v = c.match(/[\\d.]+/g).map(Number).slice(0, 3)
            .map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
            return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
          const back = n => { for (; n; n = n.parentElement) { const c = getComputedStyle(n)
            .backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255,255,255)'; };
          return ['.facts', '.bar button', 'input', '.legend .chip', '.details td:first-child',
            '.details td:last-child', '.details h1', '.foot .hint'].map(q => {
              const n = document.querySelector(q), a = light(getComputedStyle(n).color) + 0.05;
              const b = light(back(n)) + 0.05; return [q, Math.max(a, b) / Math.min(a, b)]; }); }"""
    )
    assert all(ratio >= 4.5 for _, ratio in ratios), ratios  # WCAG 2 AA
    # and on the canvas: the band of a rank is dark, and its name over it is light
    band, ink = frame.evaluate(
        """() => { const c = document.querySelector('canvas:not(.axis)');
          const r = c.width / c.clientWidth;
          const d = c.getContext('2d').getImageData(100 * r, 34 * r, 1, 1).data;
          const n = getComputedStyle(document.querySelector('.rank')).color.match(/\\d+/g);
          return [d[1], +n[1]]; }"""
    )
    assert band < 60 and ink > 200, (band, ink)
    shot(page, "dark")
    page.keyboard.press("Escape")
    run_command(page, "apputils:change-theme", theme="JupyterLab Light")
    frame.wait_for_function("!trace.dark()")


def test_hostile_names_stay_text(page, ran):
    _, (_, frame) = ran
    hover(page, frame, 0)
    assert "<img src=x onerror" in frame.inner_text(".tip")
    click(page, frame, 0)
    assert frame.inner_text(".details h1").startswith("<img src=x onerror")
    assert "</script><script>" in frame.inner_text(".details table")
    shot(page, "hostile")
    for where in (page, frame):
        assert where.evaluate("window.hacked") is None
        assert where.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    assert page.errors == []


def test_a_reopened_notebook_shows_the_picture_and_trust_makes_it_live(context, lab, ran):
    path, _ = ran
    book = nbformat.read(path, as_version=4)
    book.metadata["from"] = "someone else"  # another content, so another signature
    nbformat.write(book, lab.root / "foreign.ipynb")
    page = context.new_page()
    open_notebook(page, lab, "foreign.ipynb")
    picture = page.wait_for_selector(".jp-OutputArea img[alt*='slices']")
    assert picture.evaluate("e => e.complete && e.naturalWidth") > 500
    assert picture.is_visible() and picture.bounding_box()["height"] > 100
    assert page.query_selector(".jp-OutputArea iframe") is None
    assert page.evaluate("window.hacked") is None
    shot(page, "untrusted")

    run_command(page, "notebook:trust")
    page.click(".jp-Dialog button:has-text('Trust')")
    page.wait_for_selector(".shardbook-trace iframe")
    frame = views(page)[0]
    assert page.query_selector(".shardbook-trace img").is_visible() is False
    click(page, frame, find(frame, "all_reduce"))
    assert "float32" in frame.inner_text(".details")
    page.close()


def test_an_html_export_works_from_a_file(chromium, tmp_path, ran):
    nbconvert = pytest.importorskip("nbconvert")
    path, _ = ran
    out = tmp_path / "export.html"
    out.write_text(nbconvert.HTMLExporter().from_filename(str(path))[0])
    page = chromium.new_page(viewport={"width": 1100, "height": 900})
    page.goto(out.as_uri())
    frame = views(page)[0]
    click(page, frame, find(frame, "all_reduce"))
    assert "float32" in frame.inner_text(".details")
    frame.click(".perfetto")  # no Jupyter server here: it says how to open the file instead
    assert "vizviewer" in frame.inner_text(".message")
    with page.expect_download() as download:
        frame.click("text=Save as file")
    saved = json.loads(Path(download.value.path()).read_text())
    assert sum(e["ph"] == "X" for e in saved["traceEvents"]) == frame.evaluate("trace.data.total")
    shot(page, "export")
    page.close()


STATS = "select name, severity, value from stats where value > 0 and severity != 'info'"


def perfetto(page, sql):
    """Ask the engine of the Perfetto page: rows as lists."""
    return page.evaluate(
        """async sql => { const result = await app.trace.engine.query(sql), rows = [];
          const names = result.columns();
          for (const it = result.iter({}); it.valid(); it.next())
            rows.push(names.map(n => { const v = it.get(n);
              return typeof v === 'bigint' ? Number(v) : v; }));
          return rows; }""",
        sql,
    )


def loaded(page):
    page.wait_for_function("window.app && app.trace && app.trace.engine", timeout=150_000)


def test_open_in_perfetto_shows_every_slice(context, page, ran):
    _, (frame, _) = ran
    with context.expect_page() as opened:
        frame.click(".perfetto")
    ui = opened.value
    asked, refused = [], []
    ui.on("request", lambda r: asked.append(r.url))
    ui.on("requestfailed", lambda r: refused.append((r.url, r.failure)))
    loaded(ui)
    assert "/hub/user/x/shardbook/perfetto/" in ui.url
    assert perfetto(ui, STATS) == []
    slices = frame.evaluate("trace.data.total")
    assert perfetto(ui, "select count(*) from slice") == [[slices]]
    assert perfetto(ui, "select count(*) from flow") == [[4]]
    names = perfetto(ui, "select name from process where name like 'rank%' order by name")
    assert names == [[f"rank {r}"] for r in range(4)]
    ui.wait_for_selector("text=rank 3")
    shot(ui, "perfetto")
    # offline: what the UI asks elsewhere never leaves the browser, by our policy
    outside = [u for u in asked if not u.startswith(("blob:", "data:", ui.url.split("/hub")[0]))]
    assert all((u, "csp") in refused for u in outside), (outside, refused)
    ui.close()


def test_perfetto_opens_with_the_ranks_in_order_and_unfolded(context, lab):
    events = []
    for rank, count in enumerate((3, 9, 30, 6)):  # Perfetto puts the busiest process first
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        events += [
            {"ph": "X", "pid": rank, "tid": 1, "ts": 10 * i, "dur": 9, "name": f"n{i}"}
            for i in range(count)
        ]
        memory = {"ph": "C", "pid": rank, "name": "resident memory (MB)", "args": {"MB": 5}}
        events += [memory | {"ts": t} for t in (1, 20)]
    page = context.new_page()
    page.goto(lab.url("lab"))
    # until it has settled it may go on to a workspace of its own, which is another page
    page.wait_for_function("window.jupyterapp && jupyterapp.restored.then(() => true)")
    page.evaluate(
        """html => { const div = document.createElement('div');
          div.style = 'position: fixed; inset: 0; z-index: 9999; background: white';
          div.innerHTML = html; document.body.append(div); }""",
        view.html({"traceEvents": events}),
    )
    (frame,) = views(page)
    with context.expect_page() as opened:
        frame.click(".perfetto")
    ui = opened.value
    loaded(ui)
    ranks = """() => app.trace.workspace.children.filter(n => n.name.startsWith('rank'))
      .map(n => [n.name.slice(0, 6), n.expanded])"""
    ui.wait_for_function(f"({ranks})().some(r => r[1])")
    assert ui.evaluate(ranks) == [[f"rank {r}", True] for r in range(4)]
    counters = perfetto(ui, "select distinct name from counter_track")
    assert counters == [["resident memory MB"]]
    ui.wait_for_selector("text=rank 0")
    shot(ui, "perfetto-order")
    ui.close()
    page.close()


def foreign_model(make):
    torch.manual_seed(0)
    model, inputs = make()
    with sb.trace(model) as t:
        gradients(model, inputs)
    return t


SAVED = {
    "four ranks, from the notebook": None,
    "transformers: Mixtral": lambda: foreign_model(mixtral),
    "diffusers: DiT": lambda: foreign_model(dit),
    "async collectives and arrows": lambda: sb.run(_all_kinds, world_size=3, trace=True).trace,
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_file_loads_in_perfetto_without_loss(context, lab, ran, tmp_path, name):
    file = ran[0].parent / "step.json"
    if SAVED[name] is not None:
        file = tmp_path / "trace.json"
        SAVED[name]().save(file)
    saved = json.loads(file.read_text())
    kinds = collections.Counter(e["ph"] for e in saved["traceEvents"])
    categories = {e.get("cat") for e in saved["traceEvents"] if e["ph"] == "X"}
    tracks = {e["args"]["name"] for e in saved["traceEvents"] if e["name"] == "thread_name"}
    if "async" in name:
        assert kinds["f"] == 11 and "async collectives" in tracks
    else:
        assert {"forward", "backward"} <= categories
    ui = context.new_page()
    ui.goto(lab.url("shardbook/perfetto/index.html#!/viewer"))
    ui.wait_for_function("window.app")
    ui.evaluate(
        """text => { const buffer = new TextEncoder().encode(text).buffer;
          window.postMessage({ perfetto: { buffer, title: 'trace.json' } }, location.origin); }""",
        json.dumps(saved),
    )
    loaded(ui)
    assert perfetto(ui, STATS) == []
    assert perfetto(ui, "select count(*) from slice") == [[kinds["X"]]]
    assert perfetto(ui, "select count(*) from flow") == [[kinds["s"]]]
    assert perfetto(ui, "select count(*) from counter") == [[kinds["C"]]]
    # and what Perfetto nests is what we nested, to the nanosecond
    longest = max((e for e in saved["traceEvents"] if e["ph"] == "X"), key=lambda e: e["dur"])
    assert [round(longest["dur"] * 1000)] in perfetto(ui, "select max(dur) from slice")
    ui.close()


def test_perfetto_is_behind_the_login(chromium, lab):
    stranger = chromium.new_context()
    for path in ("index.html", "service_worker.js"):
        reply = stranger.request.get(lab.url(f"shardbook/perfetto/{path}"), max_redirects=0)
        assert reply.status == 302 and "/login" in reply.headers["location"]
        assert "access-control-allow-origin" not in reply.headers
    stranger.close()
