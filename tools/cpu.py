"""CPU seconds of a command and of everything it starts, ranks of a fork server included.

A control group counts all of them, whoever their parent is. Where none may be made, what the whole
machine used meanwhile is the best there is, and the figure says so.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class Meter:
    """``start(command)`` a process in a group of its own; ``seconds()`` what all used so far."""

    def __init__(self):
        self.group = _group()
        self.remark = "" if self.group else "of the whole machine: no control group may be made"
        self._before = 0.0 if self.group else _machine()

    def start(self, command: list[str], **kwargs) -> subprocess.Popen:
        """Popen, in the group before the command runs."""
        into = self.group and os.fspath(self.group / "cgroup.procs")

        def join() -> None:
            with open(into, "w") as file:
                file.write("0")

        return subprocess.Popen(command, preexec_fn=join if into else None, **kwargs)

    def seconds(self) -> float:
        """CPU seconds since the meter was made."""
        if not self.group:
            return _machine() - self._before
        if (usage := self.group / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        first = (self.group / "cpu.stat").read_text().split()
        return int(first[first.index("usage_usec") + 1]) / 1e6

    def close(self) -> int:
        """Remove the group; how many processes were left behind in it."""
        if not self.group:
            return 0
        for _ in range(50):  # what was just killed may still be ending
            left = (self.group / "cgroup.procs").read_text().split()
            if not left:
                break
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            self.group.rmdir()
        return len(left)


def _group() -> Path | None:
    """A new control group that counts CPU time (version 1 or 2), or None."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mine = {kinds: path.lstrip("/") for _, kinds, path in (x.split(":", 2) for x in lines)}
        for kinds, path in mine.items():
            if "cpuacct" not in kinds.split(",") and kinds:
                continue
            bases = [CGROUPS / kinds] if kinds else [CGROUPS, CGROUPS / "unified"]
            for parent in [base / p for base in bases for p in (path, "")]:
                group = parent / f"shardbook-test-{os.getpid()}"
                with contextlib.suppress(OSError):
                    group.mkdir()
                    if any((group / f).exists() for f in ("cpuacct.usage", "cpu.stat")) and (
                        os.access(group / "cgroup.procs", os.W_OK)
                    ):
                        return group
                    group.rmdir()
    return None


def _machine() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        idle = int(fields[3]) + int(fields[4])
        guests = sum(map(int, fields[8:10]))  # counted in user already
        return (sum(map(int, fields)) - idle - guests) / os.sysconf("SC_CLK_TCK")
    except OSError:  # no Linux: ours, and what has ended and was waited for
        return sum(os.times()[:4])
