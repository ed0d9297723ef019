"""The inline view without a browser: rows, arrows, counters, the reduced picture, the html."""

import base64
import gzip
import html as escape
import io
import itertools
import json
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from shardbook.tracing import kinds, palette, picture, view
from shardbook.tracing.layout import ROOM, content_height, layout


def X(ts, dur, name="x", pid=0, tid=0, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}


def laid(*events, most=None):
    return layout({"traceEvents": list(events)}, most)


def rows(made, track=0):
    return {s.name: s.row for s in made.tracks[track].slices}


def many(count, ranks=4):
    """About `count` slices: layers with four modules and a collective each, on `ranks` ranks."""
    events = []
    for rank in range(ranks):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        for i in range(count // ranks // 6):
            t = 100.0 * i + rank
            kinds = ("RMSNorm", "ColumnParallelLinear", "SiLU", "RowParallelLinear")
            events.append(X(t, 90, f"layers.{i}", rank, 0, type="Block", inputs="float32[2, 8]"))
            for j, kind in enumerate(kinds):
                length = 13 + (i * 7 + j * 3) % 6 + 0.125
                shape = f"float32[{2 + j}, 128, 512]"
                at = t + 1 + 20 * j
                events.append(X(at, length, f"layers.{i}.m{j}", rank, 0, type=kind, inputs=shape))
            where = {"bytes": 262144, "group": [0, 1, 2, 3], "number": i, "where": "cell line 12"}
            call = X(t + 62, 20, "all_reduce", rank, 1, **where) | {"cat": "collective"}
            events.append(call)
    return {"traceEvents": events}


def payload(html):
    """What viewer/data.js unpacks."""
    page = escape.unescape(re.search(r'srcdoc="([^"]*)"', html).group(1))
    script, data = re.findall(r"unzip\('([^']+)'\)", page)
    assert gzip.decompress(base64.b64decode(script)).startswith(b"function view(data)")
    return json.loads(gzip.decompress(base64.b64decode(data)))


def image(html):
    image = pytest.importorskip("PIL.Image")
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html).group(1)
    return image.open(io.BytesIO(base64.b64decode(data)))


# rows


def test_nested_slices_go_below_and_neighbours_beside():
    made = laid(X(0, 10, "a"), X(1, 3, "b"), X(4, 5, "c"), X(4, 1, "d"), X(10, 2, "e"))
    assert rows(made) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 0}
    own = {s.name: s.own for s in made.tracks[0].slices}
    assert own == {"a": 2000, "b": 3000, "c": 4000, "d": 1000, "e": 2000}


def test_slices_that_overlap_never_share_a_row():
    made = laid(X(0, 10, "a"), X(5, 10, "b"), X(12, 10, "c"), X(13, 1, "d"), X(16, 1, "e"))
    for a in made.tracks[0].slices:
        for b in made.tracks[0].slices:
            if a is not b and a.row == b.row:
                assert a.ts + a.dur <= b.ts or b.ts + b.dur <= a.ts, (a, b)


def test_times_that_touch_only_after_rounding_do_not_overlap():
    # 1.35 + 156.23589 and 157.586 round apart; ends are rounded as ends
    made = laid(X(1.35, 156.23589, "a"), X(157.586, 1, "b"))
    assert rows(made) == {"a": 0, "b": 0}


def test_begin_and_end_pair_up_and_an_end_may_be_missing():
    made = laid(
        {"ph": "B", "pid": 0, "tid": 0, "ts": 0, "name": "open"},
        {"ph": "B", "pid": 0, "tid": 0, "ts": 1, "name": "inner", "args": {"a": 1}},
        {"ph": "E", "pid": 0, "tid": 0, "ts": 3, "args": {"b": 2}},
        {"ph": "E", "pid": 0, "tid": 9, "ts": 3},  # of nothing
        X(4, 5, "later"),
    )
    found = {s.name: s for s in made.tracks[0].slices}
    inner = found["inner"]
    assert (inner.ts, inner.dur, inner.args) == (1000, 2000, {"a": 1, "b": 2})
    assert found["open"].dur == 9000 and "end" in found["open"].args
    assert rows(made) == {"open": 0, "inner": 1, "later": 1}


def test_async_pairs_have_a_lane_and_may_overlap():
    def at(ph, ts, id):
        return {"ph": ph, "pid": 1, "tid": 0, "cat": "comm", "id": id, "ts": ts, "name": f"n{id}"}

    made = laid(at("b", 0, 1), at("b", 1, 2), at("e", 5, 1), at("e", 9, "2"))
    assert [(s.name, s.dur, s.row) for s in made.tracks[0].slices] == [
        ("n1", 5000, 0),
        ("n2", 8000, 1),
    ]
    assert made.tracks[0].name == "comm"


def test_instants_ids_of_text_and_times_from_the_clock_are_exact():
    clock = 1_764_000_000_000_000.25  # µs since 1970
    made = laid(
        X(clock, 2.5, "a", pid="Spans", tid="stream 7"),
        {"ph": "i", "pid": "Spans", "tid": "stream 7", "ts": clock + 1, "name": "now", "s": "t"},
    )
    assert [(s.name, s.ts, s.dur, s.row) for s in made.tracks[0].slices] == [
        ("a", 0, 2500, 0),
        ("now", 1000, 0, 1),
    ]
    assert made.processes == {"Spans": "process Spans"}


def test_lanes_are_in_the_order_of_ranks_and_counters_come_last():
    events = [
        {"ph": "C", "pid": 2, "ts": 1, "name": "memory (MB)", "args": {"memory": 5, "bad": "x"}},
        *(X(0, 1, pid=pid, tid=tid) for pid in (10, 2) for tid in (3, 1)),
        {"ph": "M", "name": "process_name", "pid": 10, "args": {"name": "rank 10"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 3, "args": {"name": "modules"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 2, "tid": 3, "args": {"sort_index": 0}},
    ]
    made = laid(*events)
    assert [(t.pid, t.name) for t in made.tracks] == [
        (2, "modules"),
        (2, "thread 1"),
        (2, "memory (MB)"),
        (10, "thread 1"),
        (10, "thread 3"),
    ]
    assert made.tracks[2].points == {"memory": [(1000, 5)]}
    assert list(made.processes.values()) == ["process 2", "rank 10"]


def test_arrows_join_the_innermost_slices():
    made = laid(
        X(0, 10, "out"),
        X(2, 3, "send"),
        X(0, 20, "block", pid=1),
        X(6, 3, "recv", pid=1),
        {"ph": "s", "pid": 0, "tid": 0, "ts": 3, "id": 1, "name": "p2p", "cat": "f"},
        {"ph": "f", "pid": 1, "tid": 0, "ts": 8, "id": 1, "name": "p2p", "cat": "f", "bp": "e"},
        {"ph": "s", "pid": 0, "tid": 0, "ts": 3, "id": 2, "name": "p2p", "cat": "f"},  # no end
        {"ph": "f", "pid": 7, "tid": 0, "ts": 8, "id": 2, "name": "p2p", "cat": "f", "bp": "e"},
    )
    ((_, a, t0), (_, b, t1)) = made.flows[0]
    assert (a.name, t0, b.name, t1, len(made.flows)) == ("send", 3000, "recv", 8000, 1)


def test_numbered_lanes_of_flat_slices_become_thin_rows_of_one_track():
    def lane(tid, name):
        return {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}

    made = laid(
        *(lane(i, "async collectives" if i == 1 else f"async collectives {i}") for i in (1, 2, 3)),
        *(X(i, 10, f"n{i}", tid=i) for i in (1, 2, 3)),
        lane(8, "stream 8"),
        X(0, 1, "other", tid=8),
    )
    assert [(t.name, t.rows, len(t.slices)) for t in made.tracks] == [
        ("async collectives", 3, 3),
        ("stream 8", 1, 1),
    ]
    assert sorted(rows(made).values()) == [0, 1, 2]
    assert made.tracks[0].row < made.tracks[1].row


def test_an_arrow_follows_its_slice_into_the_stacked_track():
    def lane(tid, name):
        return {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}

    arrow = {"pid": 0, "id": 1, "name": "p", "cat": "f"}
    made = laid(
        lane(1, "p2p"),
        lane(2, "p2p 2"),
        X(0, 10, "send", tid=1),
        X(0, 9, "recv", tid=2),
        arrow | {"ph": "s", "tid": 1, "ts": 4},
        arrow | {"ph": "f", "tid": 2, "ts": 5, "bp": "e"},
    )
    (((a, sent, _), (b, received, _)),) = made.flows
    assert a is b is made.tracks[0]
    assert (sent.name, received.name) == ("send", "recv")


def test_what_works_is_bright_and_what_holds_others_is_pale():
    made = layout(many(600))
    colours = dict(made.kinds)
    assert colours["Block"] in palette.KINDS[7:]
    assert colours["all_reduce"] in palette.KINDS[:7]
    assert len({colours[k] for k in colours}) == len(colours)


@pytest.mark.parametrize("label", ["paced", "simulated"])
def test_set_times_are_labelled(label):
    paced = X(0, 5, "kernel (paced)") | {"cat": "paced"}
    rank = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0 (simulated)"}}
    events = [paced] if label == "paced" else [rank, X(0, 5)]
    html = view.html({"traceEvents": events})
    assert payload(html)["label"] == label
    assert f"{label} time" in re.search(r'<img alt="([^"]*)"', html).group(1)
    assert payload(view.html({"traceEvents": [X(0, 5)]}))["label"] == ""


# the reduced picture


def test_a_large_trace_keeps_every_slice():
    chrome = many(30_000)
    whole = sum(e["ph"] == "X" for e in chrome["traceEvents"])
    html = view.html(chrome)
    data = payload(html)
    assert (data["total"], data["below"]) == (whole, 0) and whole > 29_000
    assert sum(len(t["dur"]) for t in data["tracks"]) == whole
    assert len(html) < view.LIMIT


def test_past_the_bytes_a_notebook_holds_a_trace_is_reduced_and_says_so(monkeypatch):
    chrome = many(30_000)
    whole = sum(e["ph"] == "X" for e in chrome["traceEvents"])
    made = layout(chrome, view.MOST)
    drawn = [s for t in made.tracks for s in t.slices]
    assert made.total == whole and len(drawn) <= view.MOST and made.below > 0
    # nothing is lost: every slice is kept or counted in one that is
    assert sum(s.args.get("slices", 1) for s in drawn) == whole
    everything = layout(chrome)
    assert everything.below == 0
    for before, after in zip(everything.tracks, made.tracks, strict=True):
        kept = {(s.ts, s.dur, s.name) for s in after.slices}
        for s in before.slices:
            inside = any(k.ts <= s.ts and s.ts + s.dur <= k.ts + k.dur for k in after.slices)
            assert s.dur < made.below or (s.ts, s.dur, s.name) in kept
            if s.ts < made.duration // 50:  # looked at closely, at the start
                assert inside
    monkeypatch.setattr(view, "LIMIT", 50_000)
    html = view.html(chrome)
    data = payload(html)
    assert (data["total"], data["below"]) == (whole, made.below)
    assert len(html) < 120_000


def test_peaks_of_a_counter_survive_thinning():
    points = [
        {"ph": "C", "pid": 0, "ts": i, "name": "m", "args": {"m": 900 if i == 4321 else i % 7}}
        for i in range(50_000)
    ]
    (track,) = laid(*points).tracks
    values = [v for _, v in track.points["m"]]
    assert len(values) <= 2000 and max(values) == 900
    assert [t for t, _ in track.points["m"]] == sorted(t for t, _ in track.points["m"])


# what it opens with


def pipelined(ranks=2, warm_up=1000):
    """Two micro-batches through `ranks` stages with set times, after `warm_up` µs of set-up."""
    events = []
    for r in range(ranks):
        name = {"name": f"rank {r}"}
        events.append({"ph": "M", "name": "process_name", "pid": r, "args": name})
        for tid, lane in ((1, "modules"), (2, "modules 2"), (3, "collectives")):
            lane = {"name": lane}
            events.append({"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": lane})
        events.append(X(0, warm_up, "Block", r, 1))
        for i, (op, at) in enumerate((("F0", 0), ("F1", 10), ("B0", 20), ("B1 chunk 1", 40))):
            ts = warm_up + at + 10 * r
            paced = X(ts, 10 if op[0] == "F" else 20, f"{op} (paced)", r, 2) | {"cat": "paced"}
            events += [paced, X(ts + 2, 3, f"block.{i}", r, 1, type="Block")]
        sent = {"cat": "p2p", "name": f"send to {1 - r}"}
        for i in range(5):
            name = "async collectives" if i == 0 else f"async collectives {i + 1}"
            lane = {"ph": "M", "name": "thread_name", "pid": r, "tid": 10 + i}
            events.append(lane | {"args": {"name": name}})
            events.append(X(warm_up + 5 * i, 90 - 5 * i, pid=r, tid=10 + i, bytes=4096) | sent)
    return events


def test_a_pipelines_operations_are_coloured_and_named_as_in_the_charts():
    from shardbook.pictures.pipeline import KINDS

    made = laid(*pipelined())
    assert {k: (colour, name) for k, (name, colour) in kinds.PIPELINE.items()} == KINDS
    colours = dict(made.kinds)
    assert colours["forward"] == KINDS["F"][0] and colours["backward"] == KINDS["B"][0]
    assert colours["backward (chunk 1)"] not in (KINDS["B"][0], KINDS["F"][0])
    assert len(set(colours.values())) == len(colours)


def test_kernels_with_set_times_have_their_own_lane_and_no_other_lane_is_numbered():
    made = laid(*pipelined())
    lanes = [(t.name, len(t.slices)) for t in made.tracks if t.pid == 0]
    assert lanes == [("paced kernels", 4), ("modules", 5), ("async collectives", 5)]


def test_sends_under_way_are_marks_at_their_start_with_all_they_are():
    made = laid(*pipelined())
    track = next(t for t in made.tracks if t.name == "async collectives")
    assert track.rows == 1 and all(s.mark and s.end == s.ts for s in track.slices)
    assert track.slices[0].dur == 90_000  # until it was waited for
    data = payload(view.html({"traceEvents": pipelined()}))
    packed = next(t for t in data["tracks"] if t["name"] == "async collectives")
    assert packed["marks"] == [0, 1, 2, 3, 4] and packed["dur"][0] == 90_000


def test_slices_under_way_side_by_side_open_as_one_row():
    def call(i):
        return X(i, 50, "all_gather", tid=i, bytes=1) | {"cat": "collective"}

    def lane(i):
        name = "async collectives" + (f" {i}" if i > 1 else "")
        return {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}

    (track,) = laid(*(e for i in (1, 2, 3, 4) for e in (lane(i), call(i)))).tracks
    assert (track.rows, track.fold, track.height) == (4, True, 18)
    (track,) = laid(*(e for i in (1, 2) for e in (lane(i), call(i)))).tracks
    assert not track.fold


def test_a_schedule_opens_with_one_row_a_rank_at_its_first_kernel():
    made = laid(*pipelined(ranks=4))
    assert made.shut == {0, 1, 2, 3} and content_height(made) == 4 * 22
    assert 0.98e6 < made.window[0] < 1e6 and made.window[1] > made.duration
    assert laid(*pipelined(warm_up=1)).window[0] < 0  # hardly anything before it
    # a mark says so too
    marked = laid(X(0, 900, "set-up"), X(900, 90, "training step") | {"cat": "mark"})
    assert marked.window[0] > 0.89e6


def test_many_ranks_open_with_one_row_each_and_few_with_all_their_lanes():
    assert layout(many(480, ranks=4)).shut == set()
    eight = layout(many(480, ranks=12))
    assert eight.shut == set(range(1, 12)) and content_height(eight) <= ROOM
    assert layout(many(4800, ranks=48)).shut == set(range(48))


def memory(name, *values):
    return [
        {"ph": "C", "pid": 0, "ts": i, "name": name, "args": {"MB": v}}
        for i, v in enumerate(values)
    ]


def test_the_memory_of_the_process_is_left_out_until_asked_for_but_kept():
    made = laid(X(0, 9), *memory("resident memory (MB)", 500, 501, 620))
    alone = laid(X(0, 9))
    assert content_height(made) == content_height(alone)
    data = payload(view.html({"traceEvents": memory("resident memory (MB)", 500, 620)}))
    assert data["tracks"][0]["memory"] and data["tracks"][0]["series"][0]["value"] == [500, 620]
    device = laid(X(0, 9), *memory("device memory (MB)", 500, 501, 620))
    assert content_height(device) > content_height(alone)


# colours


def deuteranopia(colour):
    """CIELAB of a colour as a deuteranope sees it (Machado, Oliveira, Fernandes 2009)."""
    return lab(np.clip(linear(colour) @ DEUTERANOPIA.T, 0, 1))


DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175],
     [0.0193339, 0.119192, 0.9503041]]
)  # fmt: skip


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = rgb @ XYZ.T / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("which", ["view", "pictures"])
def test_any_two_colours_differ_for_a_deuteranope_too(which):
    from shardbook.pictures import plot

    colours = [*palette.KINDS, palette.OTHER] if which == "view" else plot.COLOURS
    assert len(colours) >= 8
    for sight in (deuteranopia, lambda c: lab(linear(c))):
        for a, b in itertools.combinations(colours, 2):
            assert np.linalg.norm(sight(a) - sight(b)) >= 12, (a, b)


def test_kinds_past_the_palette_share_one_colour_and_are_named_in_the_legend():
    made = laid(*(X(10 * i, 9, f"n{i}", type=f"Kind{i:02}") for i in range(20)))
    shared = [k for k, c in made.kinds if c == palette.OTHER]
    assert len(shared) == 20 - len(palette.KINDS)
    assert payload(view.html({"traceEvents": []}))["other"] == palette.OTHER


# the html


def test_two_thousand_slices_take_less_than_100_kb():
    html = view.html(many(2000), "step")
    assert 30_000 < len(html.encode()) <= 100_000


def test_the_same_trace_gives_the_same_html():
    assert view.html(many(500), "t") == view.html(many(500), "t")


def test_the_payload_holds_every_slice_exactly():
    chrome = many(600)
    data = payload(view.html(chrome, "a title"))
    found = set()
    for track in data["tracks"]:
        ts = 0
        for i, step in enumerate(track["ts"]):
            ts += step
            args = json.dumps(data["args"][track["args"][i]])
            name = data["texts"][track["text"][i]]
            found.add((track["pid"], track["tid"], name, ts, track["dur"][i], args))
    expected = {
        (e["pid"], e["tid"], e["name"], round(e["ts"] * 1000),
         round((e["ts"] + e["dur"]) * 1000) - round(e["ts"] * 1000), json.dumps(e["args"]))
        for e in chrome["traceEvents"] if e["ph"] == "X"
    }  # fmt: skip
    assert found == expected and data["title"] == "a title"


def test_names_cannot_leave_their_place():
    bad = '"><img src=x onerror=alert(1)></iframe></script><script>alert(2)</script>'
    name = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": bad}}
    html = view.html({"traceEvents": [name, X(0, 1, bad, type=bad)]}, title=bad)
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, sorted(dict(attrs))))
    parser.feed(html)
    assert [tag for tag, _ in tags] == ["div", "div", "img", "br", "small", "iframe"]
    assert tags[2][1] == ["alt", "src", "style"]
    assert tags[-1][1] == ["onload", "srcdoc", "style", "title"]
    page = escape.unescape(re.search(r'srcdoc="([^"]*)"', html).group(1))
    assert "onerror" not in page  # only inside the packed data
    data = payload(html)
    assert bad in data["texts"] and data["title"] == bad and data["kinds"][0][0] == bad


def test_odd_traces_are_shown_too():
    for events in (
        [],
        [X(0, 0)],
        [X(0, 1, nan=float("nan"), inf=float("inf"), obj=object())],
        [{"ph": "X", "ts": 1}, {"ph": "X"}, {"ph": "X", "ts": "soon"}, {"ph": "q", "ts": 1}, 7],
        [{"ph": "C", "ts": 0, "name": "c", "args": {"c": 0}}],
        [{"ph": "X", "ts": 5, "dur": -3, "name": None, "args": "text"}],
    ):
        html = view.html({"traceEvents": events})
        payload(html)
        assert image(html).size[0] > 500


def test_height_follows_the_lanes_within_a_screen():
    def height(*args, **kwargs):
        html = view.html(*args, **kwargs)
        return int(re.search(r"style\.height='(?:min\()?(\d+)px", html).group(1))

    one, four, many_ranks = (height(many(480, ranks=r)) for r in (1, 4, 48))
    assert one < four < view.HIGHEST >= many_ranks > one
    assert height(many(96), height=333) == 333


# the picture


def test_the_picture_shows_the_slices_where_they_are():
    made = laid(X(0, 50, "first", type="A"), X(50, 50, "second", type="B"))
    colours, bars = dict(made.kinds), {}
    for kind, colour in colours.items():
        xs, ys = pixels(made, colour)
        below = xs[ys > 66]  # of the legend
        bars[kind] = (below.min(), below.max())
    assert bars["A"][1] <= bars["B"][0] + 1
    lengths = [b - a for a, b in bars.values()]
    assert abs(lengths[0] - lengths[1]) < 8 and lengths[0] > picture.WIDTH * 0.4


def test_the_picture_is_small():
    assert len(picture.png(layout(many(2000)))) < 30_000


@pytest.mark.parametrize(
    ("span", "expected"),
    [(9, range(10)), (100, range(0, 101, 10)), (4_500_000, range(0, 4_500_001, 500_000))],
)
def test_ticks_are_round(span, expected):
    assert picture.ticks(span) == list(expected)


def test_text_on_a_bar_has_contrast():
    assert picture.dark("#0072B2") and picture.dark("#000000")
    assert not picture.dark("#F0E442") and not picture.dark("#FFFFFF")


def test_names_of_thousands_of_letters_cost_no_more_than_short_ones():
    def seconds(letters):
        began = time.perf_counter()
        picture.png(laid(*(X(100 * i, 90, f"{i} {'n' * letters}") for i in range(40))))
        return time.perf_counter() - began

    seconds(10)
    # letter by letter this took minutes
    assert min(seconds(50_000) for _ in range(3)) < 10 * min(seconds(10) for _ in range(3)) + 0.5


def pixels(made, colour):
    """Where the picture of a layout has a colour: (x, y) in CSS pixels."""
    png = pytest.importorskip("PIL.Image").open(io.BytesIO(picture.png(made))).convert("RGB")
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    ys, xs = np.nonzero((np.abs(np.asarray(png).astype(int) - rgb) < 6).all(2))
    return xs / picture.SCALE, ys / picture.SCALE


def test_the_picture_has_a_legend_and_says_which_ranks_it_lacks():
    made = layout(many(96))
    _, ys = pixels(made, dict(made.kinds)["all_reduce"])
    assert ys.min() < 26 + picture.LEGEND  # the chip of the legend, above the axis
    tall = layout(many(4800, ranks=48))
    assert content_height(tall) > picture.TALLEST
    png = pytest.importorskip("PIL.Image").open(io.BytesIO(picture.png(tall)))
    assert png.size[1] == round(picture.TALLEST * picture.SCALE)


def test_the_pictures_last_lane_is_whole():
    made = laid(X(0, 9, type="A"), X(0, 9, type="B", pid=1))
    _, ys = pixels(made, dict(made.kinds)["B"])
    png = pytest.importorskip("PIL.Image").open(io.BytesIO(picture.png(made)))
    assert ys.max() < png.size[1] / picture.SCALE - 2
    assert (ys > 60).sum() and ys.max() - ys[ys > 60].min() > 13


def test_arrows_have_heads():
    made = laid(*pipelined(), *(
        {"ph": ph, "pid": p, "tid": 10, "ts": t, "id": 1, "name": "f", "cat": "f", "bp": "e"}
        for ph, p, t in (("s", 0, 1001), ("f", 1, 1050))
    ))  # fmt: skip
    made.shut = set()
    xs, ys = pixels(made, picture.ARROW)
    end = xs > xs.max() - 4
    assert len(made.flows) == 1 and ys[end].max() - ys[end].min() > 3


def test_calls_say_their_bytes_and_kernels_their_operation():
    call = laid(X(0, 9, "all_reduce", bytes=4_200_000) | {"cat": "collective"}).tracks[0].slices[0]
    assert picture.caption(call, 200) == "all_reduce 4.2 MB"
    assert picture.caption(call, 60) == "all_reduce"
    kernel = laid(X(0, 9, "F12 (paced)") | {"cat": "paced"}).tracks[0].slices[0]
    assert picture.caption(kernel, 25) == "F12"


def test_the_words_of_the_still_are_true_wherever_it_stands():
    html = view.html({"traceEvents": [X(0, 1)]})
    words = re.search(r"<small>(.*?)</small>", html).group(1)
    assert "GitHub" in words and "exported page" in words and "trusted" in words
    # with scripts off the frame takes no room
    assert "border:0;height:0" in html


# the server extension


def test_the_extension_needs_no_torch_and_says_what_is_missing(monkeypatch):
    import logging
    import subprocess
    import sys
    from types import SimpleNamespace

    code = "import shardbook_jupyter, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

    import shardbook_jupyter as extension

    assert (extension.folder() / "index.html").is_file()
    monkeypatch.setattr(extension, "folder", lambda: None)
    said = []
    app = SimpleNamespace(log=logging.getLogger("test"), web_app=None)
    monkeypatch.setattr(app.log, "warning", said.append)
    extension._load_jupyter_server_extension(app)
    assert "viztracer" in said[0]


def test_a_shown_foreign_trace_keeps_its_async_slices():
    import shardbook as sb

    def at(ph, ts, id):
        return {"ph": ph, "pid": 1, "tid": 0, "cat": "comm", "id": id, "ts": ts, "name": f"n{id}"}

    shown = sb.show({"traceEvents": [at("b", 0, 1), at("b", 1, 2), at("e", 5, 1), at("e", 9, 2)]})
    made = layout(shown.chrome())
    assert [(s.name, s.dur) for s in made.tracks[0].slices] == [("n1", 5000), ("n2", 8000)]
    assert payload(shown._repr_mimebundle_()["text/html"])["total"] == 2
