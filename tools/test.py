"""Run the tests part by part: ``python tools/test.py [part …]``.

Without a part: style, book, library, notebooks (`make test`). ``rest`` names the others, ``all``
both. Every part runs, also after one failed; the exit code is 0 only if all passed. The last lines
say for each part how long it took, what CPU time that was, with every rank and kernel, and how its
pytest run ended; ``--table`` prints them as a table for DEVELOPING.md too.

A test that passed and of which nothing has changed since is left out, and the number is said;
``--all`` runs everything, as does CI (the variable CI is set). See tests/unchanged.py.
"""

import argparse
import datetime
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path

from cpu import Meter

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-q"]
TWO = ["-n", "2"]
NBVAL = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "--timeout", "600"]
NPU = {  # tests/standin/README.md
    "SHARDBOOK_DEVICE_PLUGIN": "tests.standin",
    "SHARDBOOK_STANDIN": "4",
    "SHARDBOOK_STANDIN_OPS_DIR": ".cache/standin-ops",
}
LIBRARY = "not npu and not browser and not installation"
ON_NPU = "not browser and not slow and not wrong_answer and not installation and not cpu"
NO_DEVICE = [  # what never makes a tensor on a device is tested once, in "library"
    f"--ignore=tests/{t}"
    for t in (
        "port/test_cli.py", "port/test_rules.py", "test_book.py", "test_setup.py",
        "test_check_cli.py", "test_style.py", "test_rooms.py", "test_framework.py",
        "test_trace_foreign.py", "test_view.py",
    )
]  # fmt: skip
ONE_DEVICE = [  # what differs with one device are runs of several ranks, which use the cpu
    "solutions/13_communication.ipynb",
    "solutions/22_tensor_parallel.ipynb",
    "solutions/24_context_parallel.ipynb",
]

PARTS = {
    "style": [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."]],
    "book": [["book/build.py", "--check"]],
    "library": [[*PYTEST, *TWO, "-m", LIBRARY, "--durations", "15"]],
    "notebooks": [[*PYTEST, *TWO, *NBVAL, "notebooks", "solutions"]],
    "browser": [[*PYTEST, "-m", "browser", "tests/browser"]],
    # on a stand-in npu: the library, each notebook, then the operators the notebooks used
    "npu": [
        [*PYTEST, *TWO, "-m", ON_NPU, *NO_DEVICE, "tests", "--durations", "10"],
        [*PYTEST, *TWO, *NBVAL, "notebooks", "solutions"],
        ["-m", "tests.standin.coverage"],
    ],
    "npu-one": [[*PYTEST, *TWO, *NBVAL, *ONE_DEVICE]],
    "installation": [[*PYTEST, "-m", "installation", "tests"]],
    "fast": [[*PYTEST, *TWO, "-m", f"{LIBRARY} and not slow"]],
}
GROUPS = {
    "test": ["style", "book", "library", "notebooks"],
    "rest": ["browser", "npu", "npu-one", "installation"],
}
GROUPS["all"] = GROUPS["test"] + GROUPS["rest"]
REMEMBERED = ("library", "notebooks", "fast")  # parts that leave out what passed and did not change
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel of this environment
    "SHARDBOOK_PROGRESS": "",  # nobody's progress
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
}
CPU_LOG = ROOT / ".cache" / "notebook-cpu"


def missing(part: str) -> str:
    """What a part needs and this machine lacks, said so that one can install it; "" if nothing."""
    browsers = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if part == "browser" and not any(map(shutil.which, browsers)):
        return "the browser tests need Chromium: apt install chromium"
    if part in ("npu", "npu-one") and not (shutil.which("g++") or shutil.which("c++")):
        return "the stand-in npu is compiled, which needs a C++ compiler: apt install g++"
    return ""


def run(part: str, everything: bool, meter: Meter) -> tuple[bool, str]:
    """(passed, how it ended) of one part; its output is shown as it comes."""
    lack = missing(part)
    if lack:
        print(lack, flush=True)
        return False, lack
    env = os.environ | SETTINGS | {"SHARDBOOK_CPU_LOG": str(CPU_LOG)}
    if part in ("npu", "npu-one"):
        env |= NPU if part == "npu" else NPU | {"SHARDBOOK_STANDIN": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    CPU_LOG.parent.mkdir(exist_ok=True)
    CPU_LOG.unlink(missing_ok=True)
    passed, ends = True, []
    for command in PARTS[part]:
        plugin = part in REMEMBERED and not everything
        process = meter.start(
            [sys.executable, *command, *(["-p", "tests.unchanged"] if plugin else [])],
            cwd=ROOT, env=env, stdout=-1, stderr=-2, text=True, errors="replace",
        )  # fmt: skip
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"skipped \d+ tests: nothing they import changed", line):
                ends.append(found[0])
            last = line.strip() or last
        nothing_selected = process.wait() == 5 and "pytest" in command
        ok = process.returncode == 0 or nothing_selected
        passed &= ok
        ends.append(last.strip("= ") if "pytest" in command else ("ok" if ok else last))
    if CPU_LOG.exists():
        rows = sorted(CPU_LOG.read_text().splitlines(), key=lambda r: -float(r.split("\t")[0]))
        print("\nCPU seconds of each notebook, with its ranks:")
        print("\n".join(f"{float(r.split()[0]):8.1f}  {r.split()[1]}" for r in rows))
    return passed, "; ".join(ends)


def machine() -> str:
    """This machine in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        named = re.search(r"model name\s*: (.*)", info.read_text())
        model = named[1] if named else model
    return f"{cores} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="*", help=f"of {', '.join([*GROUPS, *PARTS])}")
    parser.add_argument("--all", action="store_true", help="also what passed and did not change")
    parser.add_argument("--table", action="store_true", help="print the durations as a table")
    parser.add_argument("--list", action="store_true", help="name the parts of `all`, run none")
    args = parser.parse_args()
    if args.list:
        print("\n".join(GROUPS["all"]))
        return 0
    parts = [p for named in args.part or ["test"] for p in GROUPS.get(named, [named])]
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        there = ", ".join([*GROUPS, *PARTS])
        print(f"no part {', '.join(unknown)}; there are {there}", file=sys.stderr)
        return 2
    lines, rows, passed, walls, cpus = [], [], True, 0.0, 0.0
    for part in parts:
        print(f"\n──── {part} ────", flush=True)
        start, meter = time.monotonic(), Meter()
        ok, end = run(part, args.all or bool(os.environ.get("CI")), meter)
        wall, cpu = time.monotonic() - start, meter.seconds()
        if left := meter.close():
            ok, end = False, f"{left} processes were left behind; {end}"
        passed &= ok
        walls, cpus = walls + wall, cpus + cpu
        lines.append(f"{'✓' if ok else '✗'} {part:<12} {wall:6.0f} s {cpu:6.0f} s CPU   {end}")
        rows.append(f"| {part} | {wall:.0f} | {cpu:.0f} |")
    lines.append(f"  {'together':<12} {walls:6.0f} s {cpus:6.0f} s CPU   {meter.remark}".rstrip())
    print("\n" + "\n".join(lines))
    if args.table:
        print(f"\nMeasured {datetime.date.today()} on {machine()}.\n")
        print("| part | seconds | CPU seconds |\n|---|---|---|")
        print("\n".join([*rows, f"| together | {walls:.0f} | {cpus:.0f} |"]))
    print("all passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
