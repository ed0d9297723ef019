"""Which processes hang below this one, to see that a run leaves none behind."""

import os
import time


def descendants(of: int) -> set[int]:
    """Process ids below `of`, from /proc."""
    parent = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as f:
                    stat = f.read().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parent[int(name)] = int(stat[1])
    found = {of}
    while new := {p for p, q in parent.items() if q in found} - found:
        found |= new
    return found - {of}


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def slowness() -> float:
    """How many times longer work takes now than on a quiet machine, for limits in seconds."""
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        sum(range(1000))
    return max(1.0, (time.monotonic() - began) / (time.process_time() - used))


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
