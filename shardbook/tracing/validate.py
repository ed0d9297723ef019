"""The rules a Chrome trace must hold for Perfetto to read all of it."""

import json
from collections import defaultdict


def validate(trace: dict) -> list[str]:
    """What Perfetto would drop or refuse, a sentence each; an empty list is a good trace.

    Slices of a thread are disjoint or nested, to the nanosecond and whether times are rounded or
    cut; no time is negative; flows, known by category, name and id together, start and end strictly
    inside a slice, once each.
    """
    problems: list[str] = []
    try:
        json.dumps(trace, allow_nan=False)
    except (TypeError, ValueError) as error:
        problems.append(f"it can't be written as json: {error}")
    threads: dict[tuple, list] = defaultdict(list)
    flows: dict = defaultdict(list)
    for e in trace["traceEvents"]:
        missing = [k for k in ("ph", "pid", "name") if k not in e]
        if missing:
            problems.append(f"{e} lacks {missing}")
            continue
        if e["ph"] == "M":
            continue
        before = len(problems)
        if not isinstance(e["pid"], int) or not isinstance(e.get("tid", 0), int):
            problems.append(f"{e['name']!r}: pid and tid must be whole numbers")
        for key in ("ts", "dur") if e["ph"] == "X" else ("ts",):
            value = e.get(key)
            if not isinstance(value, (int, float)) or value < 0:
                problems.append(f"{e['name']!r}: {key} is {value}")
            elif int(value * 1000) != round(value * 1000):
                problems.append(f"{e['name']!r}: {key} {value!r} is not a whole nanosecond")
        if len(problems) > before:
            continue
        if e["ph"] == "X":
            start, length = int(e["ts"] * 1000), int(e["dur"] * 1000)
            threads[e["pid"], e["tid"]].append((start, start + length, e["name"]))
        elif e["ph"] in ("s", "f"):
            flows[e.get("cat"), e["name"], e.get("id")].append(e)
    for (pid, tid), slices in threads.items():
        stack: list = []
        for start, end, name in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1][1] <= start:
                stack.pop()
            if stack and end > stack[-1][1]:
                problems.append(f"{name!r} overlaps {stack[-1][2]!r} on pid {pid}, tid {tid}")
            stack.append((start, end, name))
    for (_, _, number), ends in flows.items():
        if sorted(e["ph"] for e in ends) != ["f", "s"]:
            problems.append(f"flow {number} has {[e['ph'] for e in ends]}, expected one s, one f")
            continue
        start, end = sorted(ends, key=lambda e: e["ph"] == "f")
        if end.get("bp") != "e":
            problems.append(f"flow {number}: its end lacks bp 'e'")
        if start["ts"] > end["ts"]:
            problems.append(f"flow {number} ends before it starts")
        for e in (start, end):
            at = int(e["ts"] * 1000)
            if not any(a < at < b for a, b, _ in threads[e["pid"], e["tid"]]):
                problems.append(f"flow {number}: its {e['ph']} lies in no slice")
    return problems
