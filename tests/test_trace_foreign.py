"""Chrome traces that others wrote, and the validator that says what Perfetto would drop."""

import copy
import gzip
import json

import pytest
import torch

import shardbook as sb
from shardbook.tracing import validate
from shardbook.tracing.events import us
from shardbook.tracing.layout import layout


def write(path, trace):
    path.write_text(json.dumps(trace))
    return path


def names(trace):
    return [e["name"] for e in trace.chrome()["traceEvents"] if e["ph"] == "X"]


def test_a_trace_of_torch_profiler(tmp_path):
    path = tmp_path / "profile.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    profile.export_chrome_trace(str(path))
    shown = sb.show(path)
    assert validate(shown.chrome()) == [] and "aten::linear" in names(shown)
    raw = json.loads(path.read_text())["traceEvents"]
    for kind in "Xsf":
        kept = sum(e["ph"] == kind for e in shown.chrome()["traceEvents"])
        assert kept == sum(e["ph"] == kind for e in raw) > 0, "nothing is dropped"
    (tmp_path / "profile.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert names(sb.show(tmp_path / "profile.json.gz")) == names(shown)
    assert "profile.json" in shown.title
    with pytest.raises(ValueError, match="read from a file"):
        shown.table()


def test_a_trace_of_viztracer(tmp_path):
    import viztracer

    def inner():
        return sum(range(10))

    with viztracer.VizTracer(output_file=str(tmp_path / "viz.json"), verbose=0):
        inner()
    shown = sb.show(tmp_path / "viz.json")
    assert validate(shown.chrome()) == []
    assert any("inner" in name for name in names(shown))


def test_a_trace_as_torch_npu_writes_it(tmp_path):
    # a plain list, times as text, slices that overlap, words for pids
    trace = [
        {"ph": "M", "name": "process_name", "pid": "dev", "args": {"name": "Ascend Hardware"}},
        {"ph": "X", "name": "MatMul", "pid": "dev", "tid": 2, "ts": "100.001", "dur": "1.000"},
        {"ph": "X", "name": "Add", "pid": "dev", "tid": 2, "ts": "100.500", "dur": "1.000"},
        {"ph": "X", "name": "before", "pid": 7, "tid": "main", "ts": "-3.5", "dur": 2},
        {"ph": "B", "name": "begin", "pid": 7, "tid": "main", "ts": 1},
        {"ph": "E", "pid": 7, "tid": "main", "ts": 4},
        {"ph": "B", "name": "never ends", "pid": 7, "tid": "main", "ts": 5},
        {"ph": "C", "name": "memory", "pid": 7, "ts": 5, "args": {"MB": 3}},
    ]
    shown = sb.show(write(tmp_path / "trace_view.json", trace))
    chrome = shown.chrome()
    assert validate(chrome) == []
    assert sorted(names(shown)) == ["Add", "MatMul", "before", "begin", "never ends"]
    by_name = {e["name"]: e for e in chrome["traceEvents"]}
    assert by_name["before"]["ts"] == 0
    assert by_name["MatMul"]["ts"] == 103.501 and by_name["MatMul"]["dur"] == 1
    assert by_name["Add"]["tid"] != by_name["MatMul"]["tid"], "an overlap gets its own lane"
    assert by_name["begin"]["dur"] == 3
    titles = [e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "process_name"]
    assert "Ascend Hardware" in titles


def test_what_is_no_trace_is_said_so(tmp_path):
    (tmp_path / "a.json").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.json is no Chrome trace"):
        sb.show(tmp_path / "a.json")
    with pytest.raises(ValueError, match="traceEvents"):
        sb.show({"rows": []})
    (tmp_path / "cut.json").write_text('[{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0},')
    assert names(sb.show(tmp_path / "cut.json")) == ["a"]
    assert names(sb.show([])) == []
    whole = gzip.compress(json.dumps(GOOD).encode())
    (tmp_path / "torn.json.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.json").touch()
    (tmp_path / "rows.json").write_text('{"rows": [1, 2]}')
    (tmp_path / "numbers.json").write_text("[1, 2]")
    (tmp_path / "word.json").write_text('"traceEvents"')
    for error, file, says in [
        (FileNotFoundError, "none.json", "there is no such file"),
        (IsADirectoryError, "", "it is a folder"),
        (ValueError, "torn.json.gz", "no whole gzip file"),
        (ValueError, "empty.json", "is empty"),
        (ValueError, "rows.json", "no Chrome trace.*traceEvents"),
        (ValueError, "numbers.json", "no Chrome trace.*'ph'"),
        (ValueError, "word.json", "no Chrome trace"),
    ]:
        with pytest.raises(error, match=says) as caught:
            sb.show(tmp_path / file)
        assert str(tmp_path / file) in str(caught.value) and "\n" not in str(caught.value)


GOOD = {
    "traceEvents": [
        {"ph": "X", "pid": 0, "tid": 1, "name": "outer", "ts": 0, "dur": 10},
        {"ph": "X", "pid": 0, "tid": 1, "name": "inner", "ts": 2, "dur": 8},
        {"ph": "s", "pid": 0, "tid": 1, "name": "f", "id": 1, "ts": 1},
        {"ph": "f", "bp": "e", "pid": 0, "tid": 1, "name": "f", "id": 1, "ts": 9},
    ]
}


@pytest.mark.parametrize(
    ("at", "key", "value", "says"),
    [
        (1, "dur", us(8001), "overlaps"),
        (1, "dur", 8.0005, "whole nanosecond"),
        (0, "ts", -1, "ts is -1"),
        (2, "ts", 0, "no slice"),
        (2, "ts", 12, "no slice"),
        (3, "bp", None, "bp"),
        (3, "id", 2, "expected one s"),
        (2, "ts", 9.5, "before it starts"),
        (0, "pid", "0", "whole numbers"),
        (0, "dur", None, "dur is None"),
    ],
)
def test_the_validator_sees(at, key, value, says):
    assert validate(GOOD) == []
    bad = copy.deepcopy(GOOD)
    bad["traceEvents"][at][key] = value
    assert any(says in problem for problem in validate(bad)), validate(bad)


def test_numbers_that_json_has_not_become_text(tmp_path):
    slice_ = {"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "name": "a"}
    trace = sb.show([{**slice_, "args": {"v": float("nan"), "w": [float("inf"), 1]}}])
    trace.save(tmp_path / "t.json")
    saved = json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    assert validate(saved) == []
    args = [e["args"] for e in saved["traceEvents"] if e["ph"] == "X"]
    assert args == [{"v": "nan", "w": ["inf", 1]}]
    assert "as json" in validate({"traceEvents": [{"x": float("nan")}]})[0]


@pytest.mark.parametrize(
    "change",
    [{"ph": 5}, {"ts": float("nan")}, {"ts": "abc"}, {"ts": [1]}, {"pid": [1]}, {"dur": "x"}],
)
def test_an_event_that_cannot_be_read_is_named(change):
    good = {"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "name": "a"}
    with pytest.raises(ValueError, match="event 1 can't be read"):
        sb.show([good, {**good, **change}])


def test_save_takes_a_path_only():
    with pytest.raises(TypeError, match="takes a path, not 3"):
        sb.show([]).save(3)


def slice_(name, tid=1, ts=0, dur=5, pid=1, **more):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


@pytest.mark.parametrize(
    "phase", ["i", "I", "C", "b", "n", "e", "s", "t", "f", "S", "N", "Ci", "zz"]
)
@pytest.mark.parametrize("length", [0.25, 1.5, 1e300, "x", None])
def test_a_length_on_what_is_no_slice_means_nothing(phase, length, tmp_path):
    odd = {"ph": phase, "name": "mark", "pid": 1, "tid": 1, "ts": 2, "id": 1, "dur": length}
    shown = sb.show([slice_("op"), odd])
    assert validate(shown.chrome()) == [] and names(shown) == ["op"]
    assert all("dur" not in e for e in shown.chrome()["traceEvents"] if e["ph"] != "X")
    shown.save(tmp_path / "t.json")
    again = sb.show(tmp_path / "t.json").chrome()
    assert again["traceEvents"] == shown.chrome()["traceEvents"]


def arrows(trace):
    """(category, the slice it leaves, the slice it reaches) of every flow."""
    found, slices = {}, [e for e in trace.chrome()["traceEvents"] if e["ph"] == "X"]
    for e in trace.chrome()["traceEvents"]:
        if e["ph"] in ("s", "f"):
            inside = [s for s in slices if s["tid"] == e["tid"]]
            inside = [s["name"] for s in inside if s["ts"] < e["ts"] < s["ts"] + s["dur"]]
            found.setdefault(e["id"], [e.get("cat")]).append(inside[-1])
    return sorted(tuple(ends) for ends in found.values())


def flow(ph, tid, ts, cat="a", name="a", id=1):
    return {"ph": ph, "bp": "e", "cat": cat, "name": name, "id": id, "pid": 1, "tid": tid, "ts": ts}


def test_flows_are_told_apart_by_category_name_and_id():
    slices = [slice_("forward", 1, 0, 100), slice_("enqueue", 1, 200, 50)]
    slices += [slice_("dequeue", 2, 300, 50), slice_("backward", 3, 400, 100)]
    flows = [flow("s", 1, 10, "fwdbwd"), flow("f", 3, 410, "fwdbwd")]
    flows += [flow("s", 1, 210, "queue"), flow("f", 2, 310, "queue")]
    shown = sb.show(slices + flows)
    assert arrows(shown) == [("fwdbwd", "forward", "backward"), ("queue", "enqueue", "dequeue")]
    for e in flows:  # names alone tell them apart, too
        e["cat"], e["name"] = "async", e["cat"]
    assert len(arrows(sb.show(slices + flows))) == 2
    assert validate(shown.chrome()) == [] and "left out" not in shown.title


def test_a_flow_id_may_come_again():
    slices = [slice_(f"a{i}", 1, 10 * i) for i in range(4)]
    slices += [slice_(f"b{i}", 2, 10 * i + 5) for i in range(4)]
    flows = [flow("s", 1, 10 * i + 1) for i in range(4)]
    flows += [flow("f", 2, 10 * i + 6) for i in range(4)]
    shown = sb.show(slices + flows)
    assert arrows(shown) == [("a", f"a{i}", f"b{i}") for i in range(4)]
    assert validate(shown.chrome()) == []
    # all four under way at once: the first to start ends first
    early = [flow("s", 1, 10 * i + 1) for i in range(4)]
    late = [flow("f", 2, 50 + 10 * i) for i in range(4)]
    later = [{**e, "ts": e["ts"] + 40} if e["tid"] == 2 else e for e in slices]
    shown = sb.show(later + early + [{**e, "ts": e["ts"] - 4} for e in late])
    assert arrows(shown) == [("a", f"a{i}", f"b{i}") for i in range(4)]
    # steps between start and end are hops of their own, and the title says what is left out
    steps = [flow("s", 1, 1), flow("t", 2, 6), flow("t", 1, 11), flow("f", 2, 16), flow("f", 2, 17)]
    shown = sb.show(slices + steps, title="mine")
    assert arrows(shown) == [("a", "a0", "b0"), ("a", "a1", "b1"), ("a", "b0", "a1")]
    assert shown.title == "mine (left out: 1 × end of an arrow that joins no two slices)"


def test_labels_and_order_of_processes_are_handed_on():
    events = []
    for pid, label, place in [(0, "GPU 0", 5_000_000), (1, "GPU 1", 5_000_001), (4242, "CPU", -1)]:
        for name, args in [
            ("process_name", {"name": "python"}),
            ("process_labels", {"labels": label}),
            ("process_sort_index", {"sort_index": place}),
        ]:
            events.append({"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 0, "args": args})
        events.append(slice_("op", 7, 10, pid=pid))
    where = {"ph": "M", "name": "thread_sort_index", "pid": 4242, "tid": 9}
    events += [slice_("first", 9, pid=4242), {**where, "args": {"sort_index": -1}}]
    events.append(
        {"ph": "M", "name": "thread_name", "pid": 4242, "tid": 9, "args": {"name": "top"}}
    )
    shown = sb.show(events)
    lanes = layout(shown.chrome())
    assert list(lanes.processes.values()) == ["python CPU", "python GPU 0", "python GPU 1"]
    assert [t.name for t in lanes.tracks if t.pid == 4242] == ["top", "7"]
    assert validate(shown.chrome()) == []


def test_a_process_in_which_nothing_happened_is_kept():
    idle = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}}
    shown = sb.show([slice_("op", pid=0), idle])
    assert any(e["args"].get("name") == "rank 1" for e in shown.chrome()["traceEvents"][:6])
    assert repr(shown) == "<Trace: 1 slices of 1 process>" and validate(shown.chrome()) == []


def test_older_phases_become_those_of_today():
    at = {"pid": 1, "tid": 1, "cat": "io", "id": 7}
    old = [{"ph": "I", "name": "old instant", "ts": 1, "pid": 1, "tid": 1}]
    old += [{"ph": p, "name": "read", "ts": t, **at} for p, t in [("S", 1), ("T", 2), ("F", 4)]]
    shown = sb.show([slice_("op"), *old])
    assert [e["ph"] for e in shown.chrome()["traceEvents"] if e["ph"] not in "MX"] == list("ibne")
    tracks = {t.name: t for t in layout(shown.chrome()).tracks}
    spans = [(s.name, s.ts, s.dur) for s in tracks["io"].slices]
    assert spans == [("read", 1000, 3000), ("read", 2000, 0)]
    assert shown.title == "" and "old instant" in [s.name for s in tracks["1"].slices]


def test_what_is_left_out_is_said():
    rest = [{"ph": p, "name": "o", "pid": 1, "tid": 1, "ts": 1, "id": "0x1"} for p in "NODPvEx"]
    rest += [{"ph": "C", "name": "c", "pid": 1, "ts": 1, "args": [1]}]
    shown = sb.show([slice_("op"), *rest], title="mine")
    assert shown.title == (
        "mine (left out: 1 × counter without values, 1 × end without a begin, 1 × event of phase "
        "'x', 1 × memory dump, 3 × object, 1 × sample)"
    )
    assert "3 × object" in shown._repr_mimebundle_()["text/html"]


def test_raw_control_characters_are_read(tmp_path):
    name = "void kernel<int>\t(float*)\n\x01"
    text = json.dumps([slice_("NAME")]).replace("NAME", name)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    (tmp_path / "raw.json").write_text(text)
    shown = sb.show(tmp_path / "raw.json")
    assert names(shown) == [name]
    shown.save(tmp_path / "clean.json")
    assert names(sb.show(json.loads((tmp_path / "clean.json").read_text()))) == [name]
