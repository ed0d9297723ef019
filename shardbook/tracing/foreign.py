"""Read Chrome traces that others wrote: torch.profiler, torch_npu.profiler, VizTracer, Perfetto."""

import bisect
import gzip
import json
import math
import os
import zlib
from collections import defaultdict

from .events import names_of, place, us
from .merge import Trace


def show(trace: str | os.PathLike | dict | list | Trace, title: str = "") -> Trace:
    """Any Chrome trace as a `Trace` that displays inline: a path (also gzipped), a dict or list.

    Slices that overlap on one thread, negative times and begin/end pairs are put in an order that
    every viewer reads; nothing is dropped.
    """
    if isinstance(trace, Trace):
        return trace
    name = "this"
    if isinstance(trace, (str, os.PathLike)):
        title = title or os.path.basename(trace)
        name, trace = str(trace), read(trace)
    result = Trace(title=title)
    events = listed(trace, name)
    try:
        result.foreign = normalise(events, name)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(_malformed(events, name, error)) from error
    return result


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
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is no Chrome trace: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if text.startswith("["):  # the format allows a file that was cut off
            try:
                return json.loads(text.rstrip(", \n") + "]")
            except json.JSONDecodeError:
                pass
        raise ValueError(
            f"{path} is no Chrome trace: not json ({error.msg} at {error.pos})"
        ) from None


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
    timed = [e | {"ts": nanoseconds(e.get("ts")), "began": e.get("ts")} for e in events]
    timed = [e for e in timed if e["ph"] != "M"]
    last = max((e["ts"] for e in timed), default=0)
    for e in sorted(timed, key=lambda e: e["ts"]):
        thread = (e.get("pid"), e.get("tid"))
        if e["ph"] == "X":
            slices.append({**e, "dur": max(0, _end(e) - e["ts"])})
        elif e["ph"] == "B":
            open_[thread].append(e)
        elif e["ph"] == "E":
            if open_[thread]:
                begin = open_[thread].pop()
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
    """The same trace as Perfetto reads it without loss: see `show`."""
    slices, others = complete(listed(trace, name))
    timed = [e for e in slices + others if e["ph"] != "M"]
    zero = min((e["ts"] for e in timed), default=0)
    named = names(others)
    pids: dict = {}
    for e in timed:
        pids.setdefault(e.get("pid", 0), set()).add(e.get("tid", 0))
    numbers = _numbers(pids)
    meta, out = [], []
    moved: dict[tuple, int] = {}
    for pid, tids in pids.items():
        threads, next_tid = {}, 1
        for tid in sorted(tids, key=str):
            mine = [e for e in slices if (e.get("pid", 0), e.get("tid", 0)) == (pid, tid)]
            lanes = place([(e["ts"], e["ts"] + e["dur"]) for e in mine])
            title = named.get(("thread_name", pid, tid), str(tid))
            moved[pid, tid] = next_tid
            for lane in range(max(lanes, default=0) + 1):
                threads[next_tid + lane] = title if lane == 0 else f"{title} ({lane + 1})"
            for e, lane in zip(mine, lanes, strict=True):
                out.append({**e, "pid": numbers[pid], "tid": next_tid + lane})
            next_tid += max(lanes, default=0) + 1
        meta += names_of(numbers[pid], named.get(("process_name", pid, None), str(pid)), threads)
    flows = _flows(out, [_moved(e, numbers, moved) for e in others if e["ph"] in "sf"])
    out += flows + [_moved(e, numbers, moved) for e in others if e["ph"] in "Cibne" and "name" in e]
    out.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    for e in out:
        e["ts"] = us(e["ts"] - zero)
        if "dur" in e:
            e["dur"] = us(e["dur"])
        e["name"] = str(e.get("name", ""))
        if "args" in e:
            e["args"] = _finite(e["args"])
        e.pop("began", None)
    return {"traceEvents": meta + out, "displayTimeUnit": "ms"}


def _finite(value: object) -> object:
    """NaN and infinity as text: json has no such numbers, and viewers refuse the file."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _moved(event: dict, pids: dict, tids: dict) -> dict:
    pid, tid = event.get("pid", 0), event.get("tid", 0)
    return {**event, "pid": pids[pid], "tid": tids[pid, tid]}


def _flows(slices: list[dict], ends: list[dict]) -> list[dict]:
    """Flows whose two ends lie in slices, moved by a nanosecond where they lie on an edge."""
    threads = defaultdict(list)
    for e in slices:
        threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    starts = {}
    for key, spans in threads.items():
        spans.sort()
        starts[key] = [start for start, _ in spans]
    found = defaultdict(dict)
    for e in ends:
        key, at = (e["pid"], e["tid"]), e["ts"]
        spans = threads[key]
        last = bisect.bisect_right(starts.get(key, []), at)
        if e["ph"] == "f" and e.get("bp") != "e" and last < len(spans):
            at = spans[last][0]  # without bp an arrow ends at the next slice
            last += 1
        for start, end in reversed(spans[max(0, last - 64) : last]):
            if start <= at <= end and end - start >= 2:
                found[e.get("id")][e["ph"]] = {
                    **{"name": "flow", **e, "ts": min(max(at, start + 1), end - 1)},
                    **({"bp": "e"} if e["ph"] == "f" else {}),
                }
                break
    whole = [f for f in found.values() if len(f) == 2 and f["s"]["ts"] <= f["f"]["ts"]]
    return [{**f[ph], "id": number} for number, f in enumerate(whole, 1) for ph in ("s", "f")]


def names(events: list[dict]) -> dict[tuple, str]:
    """Names of processes and threads from the metadata events."""
    found = {}
    for e in events:
        if e["ph"] == "M" and e.get("name") in ("process_name", "thread_name"):
            tid = e.get("tid", 0) if e["name"] == "thread_name" else None
            found[e["name"], e.get("pid", 0), tid] = str((e.get("args") or {}).get("name", ""))
    return found


def _numbers(pids: dict) -> dict:
    """Whole numbers for pids; some writers use words."""
    taken = {p for p in pids if isinstance(p, int)}
    numbers = {p: p for p in taken}
    free = (n for n in range(1_000_000) if n not in taken)
    return numbers | {p: next(free) for p in pids if p not in numbers}
