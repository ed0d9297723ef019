"""Chrome traces that others wrote, and the validator that says what Perfetto would drop."""

import copy
import gzip
import json

import pytest
import torch

import shardbook as sb
from shardbook.tracing import validate
from shardbook.tracing.events import us


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
