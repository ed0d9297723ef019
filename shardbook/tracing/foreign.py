"""Read Chrome traces that others wrote: torch.profiler, torch_npu.profiler, VizTracer, Perfetto."""

import gzip
import json
import math
import os
import zlib
from collections import defaultdict

from . import rare
from .events import names_of, place, us


def load(trace: str | os.PathLike | dict | list) -> tuple[dict, str]:
    """(the trace as Perfetto reads it without loss, what it had to leave out in words)."""
    name = "this"
    if isinstance(trace, (str, os.PathLike)):
        name, trace = str(trace), read(trace)
    events = listed(trace, name)
    try:
        chrome = normalise(events, name)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(_malformed(events, name, error)) from error
    return chrome, chrome.get("otherData", {}).get("left out", "")


def _malformed(events: list[dict], name: str, error: Exception) -> str:
    """Which event could not be read: the first that can't be read alone."""
    for i, e in enumerate(events):
        try:
            normalise([e])
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as alone:
            text = repr(e)
            text = text if len(text) < 200 else text[:200] + "…"
            return f"{name} is no Chrome trace: event {i} can't be read ({alone}): {text}"
    return f"{name} is no Chrome trace: its events can't be read together ({error})"


def read(path: str | os.PathLike) -> dict | list:
    """The json of a trace file, gzipped or not; an array may lack its closing bracket."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        why = "it is a folder" if os.path.isdir(path) else error.strerror or str(error)
        why = "there is no such file" if isinstance(error, FileNotFoundError) else why
        raise type(error)(
            f"{path} can't be shown: {why}; expected a Chrome trace, as t.save(path) writes it "
            f"(looked in {os.getcwd()})"
        ) from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path} is no whole gzip file ({error}): was it copied before it was finished?"
            ) from None
    if not data.strip():
        raise ValueError(f"{path} is empty: expected a Chrome trace, as t.save(path) writes it")
    text = data.decode("utf-8-sig", errors="replace").strip()
    try:
        return _json(text)
    except RecursionError:
        raise ValueError(f"{path} is no Chrome trace: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if text.startswith("["):  # the format allows a file that was cut off
            try:
                return _json(text.rstrip(", \n") + "]")
            except json.JSONDecodeError:
                pass
        raise ValueError(
            f"{path} is no Chrome trace: not json ({error.msg} at {error.pos})"
        ) from None


def _json(text: str) -> object:
    """Also where a name holds a raw tab or line end, as kernels' names do: what is meant is clear.

    `t.save` writes them escaped, so that every reader takes them.
    """
    return json.loads(text, strict=False)


def listed(trace: dict | list, name: str = "this") -> list[dict]:
    """The events of a trace, which is a list or a dict with traceEvents."""
    found = trace.get("traceEvents") if isinstance(trace, dict) else trace
    whole = isinstance(found, list)
    events = [e for e in found if isinstance(e, dict) and "ph" in e] if whole else []
    if not whole or (found and not events):
        raise ValueError(
            f"{name} is no Chrome trace: it holds no list of events; expected a list, or a dict "
            "with 'traceEvents', of dicts with 'ph'"
        )
    return events


def nanoseconds(value: float | str | None) -> int:
    """A time in microseconds, as a number or as text, in whole nanoseconds, exactly."""
    if isinstance(value, str):  # torch_npu writes text, to keep the digits
        whole, _, part = value.strip().partition(".")
        sign = -1 if whole.startswith("-") else 1
        return int(whole or 0) * 1000 + sign * int((part + "000")[:3])
    return round((value or 0) * 1000)


def complete(events: list[dict]) -> tuple[list[dict], list[dict]]:
    """(complete slices, all other events), times in ns; a B and its E become one X."""
    slices, others, open_ = [], [], defaultdict(list)
    timed = [
        e | {"ts": nanoseconds(e.get("ts")), "began": e.get("ts")} for e in events if e["ph"] != "M"
    ]
    timed.sort(key=lambda e: e["ts"])
    last = timed[-1]["ts"] if timed else 0
    for e in timed:
        if e["ph"] == "X":
            e["dur"] = max(0, _end(e) - e["ts"])
            slices.append(e)
        elif e["ph"] == "B":
            open_[e.get("pid"), e.get("tid")].append(e)
        elif e["ph"] == "E" and open_[e.get("pid"), e.get("tid")]:
            begin = open_[e.get("pid"), e.get("tid")].pop()
            args = {**(begin.get("args") or {}), **(e.get("args") or {})}
            end = {"ph": "X", "dur": e["ts"] - begin["ts"], "args": args}
            slices.append({**begin, **end})
        else:
            others.append(e)
    for begin in (b for stack in open_.values() for b in stack):
        slices.append({**begin, "ph": "X", "dur": last - begin["ts"]})
    return slices, others + [e for e in events if e["ph"] == "M"]


def _end(event: dict) -> int:
    """Where a slice ends: rounded as a whole, so that nested slices stay nested."""
    start, length = event["began"] or 0, event.get("dur") or 0
    if isinstance(start, str) or isinstance(length, str):
        return event["ts"] + nanoseconds(length)
    return nanoseconds(start + length)


def normalise(trace: dict | list, name: str = "this") -> dict:
    """The same trace as Perfetto reads it without loss: see `shown.show`.

    otherData's "left out" says what this format has no place for.
    """
    slices, others = complete(listed(trace, name))
    timed = [e for e in slices + others if e["ph"] != "M"]
    zero = min((e["ts"] for e in timed), default=0)
    named, order = names(others), _order(others)
    pids: dict = {}
    for e in timed:
        pids.setdefault(e.get("pid", 0), set()).add(e.get("tid", 0))
    for kind, pid, _ in named:
        if kind == "process_name":  # also of one where nothing happened: an idle rank
            pids.setdefault(pid, set())
    numbers = _numbers(pids)
    threads: dict[tuple, list[dict]] = defaultdict(list)
    for e in slices:
        threads[e.get("pid", 0), e.get("tid", 0)].append(e)
    meta, out = [], []
    moved: dict[tuple, int] = {}
    for pid, tids in pids.items():
        lanes_named, next_tid = {}, 1
        for tid in sorted(tids, key=lambda tid, pid=pid: (order.get((pid, tid), 0), str(tid))):
            mine = threads[pid, tid]
            lanes = place([(e["ts"], e["ts"] + e["dur"]) for e in mine])
            title = named.get(("thread_name", pid, tid), str(tid))
            moved[pid, tid] = next_tid
            for lane in range(max(lanes, default=0) + 1):
                lanes_named[next_tid + lane] = title if lane == 0 else f"{title} ({lane + 1})"
            for e, lane in zip(mine, lanes, strict=True):
                out.append({**e, "pid": numbers[pid], "tid": next_tid + lane})
            next_tid += max(lanes, default=0) + 1
        title = named.get(("process_name", pid, None), str(pid))
        meta += names_of(numbers[pid], title, lanes_named)
        if any(key[1] is None for key in order):  # a place for one is a place for all
            meta[-1 - 2 * len(lanes_named)]["args"]["sort_index"] = order.get((pid, None), 0)
        if label := named.get(("process_labels", pid, None)):
            at = {"ph": "M", "name": "process_labels", "pid": numbers[pid]}
            meta.append(at | {"args": {"labels": label}})
    more, left_out = rare.events([_moved(e, numbers, moved) for e in others if e["ph"] != "M"], out)
    out += more
    out.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    for e in out:
        e["ts"] = us(e["ts"] - zero)
        if "dur" in e:
            e["dur"] = us(e["dur"])
        e["name"] = str(e.get("name", ""))
        if "args" in e:
            e["args"] = _finite(e["args"])
        e.pop("began", None)
    result = {"traceEvents": meta + out, "displayTimeUnit": "ms"}
    return result | ({"otherData": {"left out": left_out}} if left_out else {})


def _finite(value: object) -> object:
    """NaN and infinity as text: json has no such numbers, and viewers refuse the file."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _moved(event: dict, pids: dict, tids: dict) -> dict:
    """An event that is no slice at its new place; a length means nothing there."""
    pid, tid = event.get("pid", 0), event.get("tid", 0)
    moved = {**event, "pid": pids[pid], "tid": tids[pid, tid]}
    moved.pop("dur", None)
    return moved


def names(events: list[dict]) -> dict[tuple, str]:
    """Names of processes and threads, and labels of processes, from the metadata events."""
    found = {}
    kinds = {"process_name": "name", "thread_name": "name", "process_labels": "labels"}
    for e in events:
        if e["ph"] == "M" and e.get("name") in kinds:
            tid = e.get("tid", 0) if e["name"] == "thread_name" else None
            value = (e.get("args") or {}).get(kinds[e["name"]], "")
            found[e["name"], e.get("pid", 0), tid] = str(value)
    return found


def _order(events: list[dict]) -> dict[tuple, float]:
    """The places that a trace gives its processes (pid, None) and threads (pid, tid)."""
    found = {}
    for e in events:
        if e["ph"] == "M" and e.get("name") in ("process_sort_index", "thread_sort_index"):
            tid = e.get("tid", 0) if e["name"] == "thread_sort_index" else None
            place = (e.get("args") or {}).get("sort_index")
            if isinstance(place, (int, float)) and math.isfinite(place):
                found[e.get("pid", 0), tid] = place
    return found


def _numbers(pids: dict) -> dict:
    """Whole numbers for pids; some writers use words."""
    taken = {p for p in pids if isinstance(p, int)}
    numbers = {p: p for p in taken}
    free = (n for n in range(1_000_000) if n not in taken)
    return numbers | {p: next(free) for p in pids if p not in numbers}
