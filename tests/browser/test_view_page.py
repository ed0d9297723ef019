"""The inline view alone in a page, from a file: mounting time, odd traces, what Perfetto gets."""

import pytest
import torch

import shardbook as sb
from shardbook.tracing import view
from shardbook.tracing.validate import validate

from ..test_trace_models import dit, gradients, mixtral
from ..test_view import X, many, memory, pipelined

MOUNT = """async html => {
  document.body.innerHTML = '';
  await new Promise(done => setTimeout(done, 100));
  const began = performance.now();
  document.body.innerHTML = html;
  while (!document.querySelector('iframe').contentWindow.trace) {
    await new Promise(done => setTimeout(done, 2));
  }
  return performance.now() - began;
}"""


@pytest.fixture(scope="module")
def page(chromium):
    page = chromium.new_page(viewport={"width": 1000, "height": 800})
    page.errors = []
    page.on("pageerror", lambda e: page.errors.append(str(e)))
    page.goto("about:blank")
    yield page
    page.close()


def mount(page, chrome, **options):
    """Put the view into the page: the frame, and milliseconds until it was drawn."""
    took = page.evaluate(MOUNT, view.html(chrome, **options))
    return page.query_selector("iframe").content_frame(), took


@pytest.mark.parametrize(
    ("slices", "limit"),
    [(2_000, 200), (100_000, 1500)],
)
def test_it_mounts_quickly(page, slices, limit):
    chrome = many(slices)
    html = view.html(chrome)
    # the best of five: other programs run on this machine too
    assert min(page.evaluate(MOUNT, html) for _ in range(5)) <= limit


def test_a_large_trace_keeps_every_slice_for_search_legend_save_and_perfetto(page):
    frame, _ = mount(page, many(20_000))
    assert frame.evaluate("trace.slices.length") == frame.evaluate("trace.data.total") == 19992
    frame.fill("input", "layers.17.m")
    assert frame.inner_text(".found") == "16 found"  # four modules on four ranks
    frame.press("input", "Escape")
    chips = frame.evaluate("[...document.querySelectorAll('.chip')].map(c => c.textContent)")
    assert "all_reduce" in chips and not any("short" in c for c in chips)
    events = frame.evaluate("trace.chrome()")
    assert sum(e["ph"] == "X" for e in events) == 19992
    assert "µs" in frame.evaluate("trace.pick(trace.slices[1]), document.body.innerText")


def test_a_reduced_view_says_so(page):
    frame, _ = mount(page, many(12_000), most=view.MOST)
    words = frame.inner_text(".foot")
    assert "too many bytes" in words and "t.save" in words
    assert "12,0" in frame.inner_text(".facts")  # the whole count
    frame, _ = mount(page, many(1200))
    assert "too many bytes" not in frame.inner_text(".foot")


def test_set_times_wear_a_label(page):
    frame, _ = mount(page, {"traceEvents": [X(0, 5, "kernel (paced)") | {"cat": "paced"}]})
    assert frame.inner_text(".label") == "paced"
    frame, _ = mount(page, {"traceEvents": [X(0, 5)]})
    assert frame.query_selector(".label") is None


FONT = "* { font-family: Helvetica, Arial, sans-serif; font-size: 12px }"  # as JupyterLab's tables

ODD = {
    "overlapping": [X(0, 10, "a"), X(5, 10, "b"), X(12, 10, "c"), X(13, 1, "d")],
    "async": [
        {"ph": ph, "pid": 1, "tid": 0, "cat": "comm", "id": i, "ts": t, "name": f"n{i}"}
        for ph, t, i in (("b", 0, 1), ("b", 1, 2), ("e", 5, 1), ("e", 9, 2))
    ],
    "words for ids": [X(0, 3.001, pid="Spans", tid="stream 7"), X(0, 1, pid=3, tid="x")],
    "arrows at the edges": [
        X(0, 10, "send"),
        X(10, 5, "recv", pid=1),
        {"ph": "s", "pid": 0, "tid": 0, "ts": 10, "id": 1, "name": "f", "cat": "f"},
        {"ph": "f", "pid": 1, "tid": 0, "ts": 10, "id": 1, "name": "f", "cat": "f", "bp": "e"},
    ],
    "instants and counters": [
        X(0, 9.999),
        {"ph": "i", "pid": 0, "tid": 0, "ts": 4, "name": "now"},
        {"ph": "C", "pid": 0, "ts": 1, "name": "memory (MB)", "args": {"memory": 3.5}},
    ],
    "nothing": [],
    "large": many(12_000)["traceEvents"],
    "a pipeline": pipelined(4),
    "fractions": [X(t * 1.357, 1.357, f"n{t}") for t in range(500)],
}


@pytest.mark.parametrize("name", ODD)
def test_what_perfetto_is_handed_obeys_its_rules(page, name):
    frame, _ = mount(page, {"traceEvents": ODD[name]})
    events = frame.evaluate("trace.chrome()")
    assert validate({"traceEvents": events}) == []
    drawn = frame.evaluate("trace.slices.length")
    assert sum(e["ph"] == "X" for e in events) == drawn
    assert page.errors == []


def test_a_table_of_modules_fits_a_cell_and_unfolds(page):
    torch.manual_seed(0)
    for make in (mixtral, dit):
        model, inputs = make()
        with sb.trace(model) as t:
            gradients(model, inputs)
        body = t.table()._repr_html_()
        page.evaluate("b => { document.body.innerHTML = b }", f"<style>{FONT}</style>{body}")
        wide, there = page.evaluate(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('div'))"
        )
        assert wide <= there <= 1000
        assert not page.is_visible("details div")
        page.click("details summary")
        assert page.inner_text("details div").startswith("weight float32[")


def at(page, frame, index):
    """Where slice `index` is on the page."""
    place = frame.evaluate("i => trace.place(trace.slices[i])", index)
    box = frame.frame_element().bounding_box()
    return box["x"] + place["x"], box["y"] + place["y"]


def test_ranks_and_lanes_fold_by_mouse_and_by_key(page):
    frame, _ = mount(page, many(120))
    total = "trace.total()"
    before = frame.evaluate(total)
    frame.click(".rank >> nth=0")
    one_row = frame.evaluate(total)
    assert one_row < before - 30
    page.mouse.click(*at(page, frame, 2))  # a folded rank's row still tells of its slices
    assert "layers.0.m1" in frame.inner_text(".details h1")
    frame.press(".rank >> nth=0", "Enter")
    assert frame.evaluate(total) == before
    frame.press("button.lane >> nth=0", "Enter")  # two rows become one
    assert before - 30 < frame.evaluate(total) < before
    lane = frame.locator("button.lane").nth(0)
    assert lane.get_attribute("aria-expanded") == "false"
    assert lane.get_attribute("aria-label") == "rank 0, thread 0: 25 slices in 2 rows"


def test_everything_is_reached_by_tab_and_shows_that_it_is(page):
    frame, _ = mount(page, many(120))
    frame.focus("input")
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(
            frame.evaluate(
                """(e => [e.className || e.textContent, getComputedStyle(e).outlineStyle,
                  e.getAttribute('aria-label') || e.textContent])(document.activeElement)"""
            )
        )
    kinds = [r[0] for r in reached]
    assert {"chip", "lanes", "rank", "lane", "fit", "?"} <= set(kinds), kinds
    inside = reached[: kinds.index("perfetto") + 1]
    assert all(outline == "solid" and label for _, outline, label in inside), inside


def test_the_legend_filters_by_key_and_esc_clears_filter_search_and_selection(page):
    frame, _ = mount(page, many(120))
    chip = frame.locator(".chip", has_text="all_reduce")
    chip.press("Enter")
    assert frame.inner_text(".found") == "20 found" and chip.get_attribute("aria-pressed") == "true"
    page.mouse.click(*at(page, frame, 1))
    assert frame.is_visible(".details")
    page.keyboard.press("Escape")
    assert frame.evaluate("trace.hits()") is None and not frame.is_visible(".details")
    assert chip.get_attribute("aria-pressed") == "false" and not frame.is_visible(".found")


def test_a_narrow_legend_says_what_it_leaves_out(page):
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        events = [X(10 * i, 9, f"n{i}", type=f"A rather long kind {i}") for i in range(13)]
        frame, _ = mount(page, {"traceEvents": events})
        more = frame.locator(".legend .more")
        hidden = frame.evaluate(
            "[...document.querySelectorAll('.chip')].filter(c => c.hidden).length"
        )
        assert more.inner_text() == f"{hidden} more" and hidden > 3
        more.click()
        assert frame.locator(".chip:visible").count() == 13
        # bars that wrap leave the lanes their room
        assert frame.evaluate("document.querySelector('.lanes').clientHeight >= trace.total()")
        cut = frame.evaluate(
            "[...document.querySelectorAll('.bar *, .legend *')].filter(e => !e.hidden &&"
            " e.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert cut == 0
        wide = frame.evaluate(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('input'))"
        )
        assert wide[0] <= wide[1]
    finally:
        page.set_viewport_size({"width": 1000, "height": 800})


def drag(page, a, b, keys=()):
    for key in keys:
        page.keyboard.down(key)
    page.mouse.move(*a)
    page.mouse.down()
    page.mouse.move(*b, steps=4)
    page.mouse.up()
    for key in keys:
        page.keyboard.up(key)


def test_shift_drag_moves_and_a_drag_sums_a_stretch_that_stays(page):
    frame, _ = mount(page, many(600))
    _, y = at(page, frame, 5)
    start, end = frame.evaluate("trace.range()")
    drag(page, (600, y), (500, y), ["Shift"])
    moved = frame.evaluate("trace.range()")
    assert moved[0] > start and abs((moved[1] - moved[0]) - (end - start)) < 1
    assert not frame.is_visible(".details")  # to move is no click
    frame.click("text=fit")

    # over one lane: whole lengths of what it touches, by name
    drag(page, at(page, frame, 0), at(page, frame, 10))
    a, b, lanes = frame.evaluate("(r => [r.from, r.to, r.inside.length])(trace.selected())")
    expected = frame.evaluate(
        """([a, b]) => { const by = {};
          for (const s of trace.slices.filter(s => s.track === trace.tracks[0]))
            if (s.ts <= b && s.ts + s.dur > a) (by[s.name] = by[s.name] || []).push(s.dur);
          return by; }""",
        [a, b],
    )
    rows = frame.evaluate(
        """[...document.querySelectorAll('.sums tr')].slice(1)
           .map(r => [...r.cells].map(c => c.textContent))"""
    )
    assert lanes == 1 and len(expected) > 5
    assert {r[0]: int(r[1]) for r in rows} == {n: len(d) for n, d in expected.items()}
    head = frame.evaluate("[...document.querySelectorAll('.sums th')].map(c => c.textContent)")
    assert head == ["name", "count", "total", "mean", "maximum"]
    sums = frame.evaluate("trace.sums(trace.selected())")
    for one in sums:
        lengths = expected[one["name"]]
        assert (one["total"], one["most"]) == (sum(lengths), max(lengths))

    # it stays while the view moves, and until Esc
    page.keyboard.press("d")
    assert frame.evaluate("trace.selected().from") == a and frame.is_visible(".details")
    page.keyboard.press("f")
    assert frame.evaluate("trace.range()") == pytest.approx([a, b], rel=1e-6)
    page.keyboard.press("Escape")
    assert frame.evaluate("trace.selected()") is None and not frame.is_visible(".details")

    # in the axis: of all lanes, with the bytes of the calls
    frame.click("text=fit")
    top = frame.locator(".lanes").bounding_box()["y"]
    drag(page, (300, top + 8), (400, top + 8))
    assert frame.evaluate("trace.selected().inside.length") == 8
    assert "262 kB" in frame.inner_text(".sums") or " MB" in frame.inner_text(".sums")


def test_the_wheel_is_the_notebooks_but_with_ctrl_or_after_a_click(page):
    html = view.html(many(600))
    page.evaluate(MOUNT, html)
    page.evaluate("document.body.style.paddingBottom = '2000px'")
    frame = page.query_selector("iframe").content_frame()
    whole = frame.evaluate("trace.range()")

    def wheel(up):
        page.mouse.wheel(0, up)
        page.wait_for_timeout(150)

    page.mouse.move(*at(page, frame, 0))
    wheel(30)
    page.wait_for_function("scrollY > 20")
    assert frame.evaluate("trace.range()") == whole
    page.evaluate("scrollTo(0, 0)")
    page.mouse.click(*at(page, frame, 0))
    assert "wheel zooms" in frame.inner_text(".foot .hint")
    page.wait_for_timeout(200)
    wheel(-100)
    frame.wait_for_function("w => trace.range()[1] - trace.range()[0] < w", arg=whole[1])
    assert page.evaluate("scrollY") == 0
    page.keyboard.press("Escape")  # gives it back
    near = frame.evaluate("trace.range()")
    wheel(30)
    page.wait_for_function("scrollY > 20")
    assert frame.evaluate("trace.range()") == near
    page.mouse.click(*at(page, frame, 0))
    page.mouse.move(500, 790)  # and so does the mouse when it leaves
    page.mouse.move(*at(page, frame, 0))
    frame.wait_for_function("!trace.active()")
    # what the note says is what it does
    page.keyboard.press("?")
    words = frame.inner_text(".message")
    assert "click" in words and "from then on the wheel zooms" in words and "Ctrl" in words
    page.keyboard.press("Escape")
    assert not frame.query_selector(".message")
    page.evaluate("document.body.style.paddingBottom = ''; scrollTo(0, 0)")


@pytest.mark.parametrize("size", [(1400, 900), (1280, 720), (1120, 720), (1024, 576), (390, 844)])
def test_details_and_notes_are_in_sight_wherever_the_page_is_scrolled(chromium, size):
    # 1120 x 720 and 1024 x 576 are what 1400 x 900 and 1280 x 720 leave at 125 %
    width, height = size
    page = chromium.new_page(viewport={"width": width, "height": height})
    page.goto("about:blank")
    frame, _ = mount(page, many(480, ranks=6))
    assert frame.frame_element().bounding_box()["height"] <= height
    page.evaluate("document.body.style.padding = '900px 0'")
    for scroll in (900, 900 - height + 260, 1000):  # all, its head, its foot in sight
        page.evaluate("y => scrollTo(0, y)", scroll)
        page.wait_for_timeout(100)
        index = frame.evaluate(
            """h => { const top = frameElement.getBoundingClientRect().top;
              return trace.slices.findIndex(s => { const p = trace.place(s), y = p.y + top;
                return y > 60 && y < h - 20 && p.y > 110 && p.y < innerHeight - 60; }); }""",
            height,
        )
        page.mouse.click(*at(page, frame, index))
        page.wait_for_timeout(300)
        box = frame.locator(".details").bounding_box()
        assert box["y"] >= -1 and box["y"] + box["height"] <= height + 1, (scroll, box)
        assert not box["y"] < at(page, frame, index)[1] < box["y"] + box["height"], scroll
        frame.evaluate("dispatchEvent(new Event('blur'))")
        page.keyboard.press("?")
        page.wait_for_timeout(200)
        note = frame.locator(".message").bounding_box()
        assert note["y"] >= -1 and note["y"] + note["height"] <= height + 1, (scroll, note)
        page.keyboard.press("Escape")
    page.close()


def test_a_schedule_opens_as_its_chart_and_unfolds(page):
    frame, _ = mount(page, {"traceEvents": pipelined(4)})
    assert frame.evaluate("trace.folded.size") == 4 and frame.evaluate("trace.range()[0]") > 0.9e6
    assert "opens at the step" in frame.inner_text(".foot")
    chips = frame.evaluate("[...document.querySelectorAll('.chip')].map(c => c.textContent)")
    assert {"forward", "backward", "send"} <= set(chips)
    assert frame.frame_element().bounding_box()["height"] < 330
    index = frame.evaluate("trace.slices.findIndex(s => s.name === 'F1 (paced)')")
    x, y = at(page, frame, index)
    page.mouse.click(x, y)
    assert frame.inner_text(".details h1") == "F1 (paced)"
    frame.click(".rank >> nth=1")
    marks = frame.evaluate("trace.slices.filter(s => s.mark && s.track.pid === 1).length")
    named = frame.locator(".lane:visible > span:first-child").all_inner_texts()
    assert marks == 5 and named == ["paced kernels", "modules", "async collectives"]
    send = frame.evaluate("trace.slices.findIndex(s => s.mark && s.track.pid === 1)")
    page.mouse.click(*at(page, frame, send))
    assert "until it was waited for" in frame.inner_text(".details")
    frame.click("text=fit")
    assert frame.evaluate("trace.range()[0]") < 0


def test_memory_shows_when_asked_for_with_its_scale(page):
    events = [X(0, 9, pid=0), *memory("resident memory (MB)", 500, 620, 610)]
    frame, _ = mount(page, {"traceEvents": events})
    assert frame.locator(".scale:visible").count() == 0
    frame.click("text=memory")
    assert frame.locator(".scale:visible").all_inner_texts() == ["620 MB", "500 MB"]
    assert "memory" in frame.inner_text(".lane >> nth=1")
    frame.click("text=memory")
    assert frame.locator(".scale:visible").count() == 0


def test_names_of_thousands_of_letters_are_drawn_at_once(page):
    events = [X(10 * i, 9, f"{i} " + "a long name " * 2000) for i in range(100)]
    frame, took = mount(page, {"traceEvents": events})
    assert took < 2000
    page.mouse.click(*at(page, frame, 3))
    assert frame.is_visible(".details")


def test_without_a_known_theme_the_systems_is_followed(chromium):
    for scheme in ("dark", "light"):
        context = chromium.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto("about:blank")
        frame, _ = mount(page, many(60))
        assert frame.evaluate("trace.dark()") is (scheme == "dark")
        page.evaluate("document.body.style.background = '#101010'; document.body.className = 'x'")
        frame.wait_for_function("trace.dark()")  # the page's own colour comes first
        context.close()


def test_a_browser_that_cannot_unpack_shows_the_picture(chromium):
    page = chromium.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto("about:blank")
    page.evaluate("html => { document.body.innerHTML = html }", view.html(many(60)))
    page.wait_for_selector("img[alt*='slices']", state="visible")
    page.close()


def test_a_box_of_the_figure_leads_to_its_slice_and_back(page):
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(16, 2, 24, batch_first=True)
    text = "masked: attention\ncross: cross-attention\nfeed forward: mlp\nscan: ssm"
    found = sb.match(layer, text, torch.randn(2, 3, 16), torch.randn(2, 5, 16))
    page.evaluate("html => { document.body.innerHTML = html; }", found.draw()._repr_html_())
    page.wait_for_function("document.querySelector('iframe').contentWindow.trace")
    frame = page.query_selector("iframe").content_frame()
    assert page.is_hidden("img")  # the still pictures
    clickable = frame.query_selector_all("[data-box][role=button]")
    assert [b.get_attribute("data-box") for b in clickable] == ["0", "1", "2"]
    clickable[2].click()  # two modules: the first is told, both are in sight
    assert frame.inner_text(".details h1") == "linear1"
    start, end = frame.evaluate("trace.range()")
    spans = "trace.slices.filter(s => /^linear/.test(s.name)).map(s => [s.ts, s.end])"
    assert all(start <= a and b <= end for a, b in frame.evaluate(spans))
    assert [b.get_attribute("aria-pressed") for b in clickable] == ["false", "false", "true"]
    clickable[1].focus()
    page.keyboard.press("Enter")
    assert frame.inner_text(".details h1") == "multihead_attn"
    frame.evaluate("trace.pick(trace.slices.find(s => s.name === 'self_attn'))")
    assert [b.get_attribute("aria-pressed") for b in clickable] == ["true", "false", "false"]
    held = "e => { const b = e.getBoundingClientRect(); return [b.top, b.bottom]; }"
    top, bottom = frame.eval_on_selector(".figure", held)
    for box in clickable[:2]:  # the picked one is in sight, however little room the figure has
        box.focus()
        page.keyboard.press("Enter")
        assert all(top - 1 <= y <= bottom + 1 for y in box.evaluate(held))
    page.keyboard.press("Escape")
    assert "true" not in [b.get_attribute("aria-pressed") for b in clickable]
    assert not page.errors
