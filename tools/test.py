"""Run the tests part by part: ``python tools/test.py [part …]``; all parts if none is named.

Every part runs, also after one failed; the exit code is 0 only if all passed. The last lines say
for each part how long it took and how its pytest run ended.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-q"]
TWO = ["-n", "2"]
NBVAL = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "--timeout", "600"]
NPU = {  # tests/standin/README.md
    "SHARDBOOK_DEVICE_PLUGIN": "tests.standin",
    "SHARDBOOK_STANDIN": "4",
    "SHARDBOOK_STANDIN_OPS_DIR": ".cache/standin-ops",
}
ON_NPU = "not browser and not alone and not slow and not wrong_answer"
NO_DEVICE = [  # what never makes a tensor on a device is tested once, in "library"
    f"--ignore=tests/{t}"
    for t in (
        "port", "test_book.py", "test_setup.py", "test_check_cli.py", "test_style.py",
        "test_framework.py", "test_trace_foreign.py", "test_view.py",
    )
]  # fmt: skip

PARTS = {
    "style": [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."]],
    "book": [["book/build.py", "--check"]],
    # what measures time or starts 50 ranks runs alone, the rest two at a time
    "library": [
        [*PYTEST, *TWO, "-m", "not npu and not browser and not alone", "--durations", "15"],
        [*PYTEST, "-m", "alone and not npu and not browser", "--durations", "5"],
    ],
    "notebooks": [[*PYTEST, *TWO, *NBVAL, "notebooks", "solutions"]],
    "browser": [[*PYTEST, "-m", "browser", "tests/browser"]],
    # on a stand-in npu: the library, each notebook, then the operators the notebooks used
    "npu": [
        [*PYTEST, *TWO, "-m", ON_NPU, *NO_DEVICE, "tests", "--durations", "10"],
        [*PYTEST, *TWO, *NBVAL, "notebooks", "solutions"],
        ["-m", "tests.standin.coverage"],
    ],
    # the solutions on a single device, where runs of several ranks use the cpu
    "npu-one": [[*PYTEST, *TWO, *NBVAL, "solutions"]],
    "fast": [[*PYTEST, *TWO, "-m", "not npu and not browser and not alone and not slow"]],
}
ALL = ["style", "book", "library", "notebooks", "browser", "npu", "npu-one"]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel of this environment
    "SHARDBOOK_PROGRESS": "",  # nobody's progress
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
}


def missing(part: str) -> str:
    """What a part needs and this machine lacks, said so that one can install it; "" if nothing."""
    browsers = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if part == "browser" and not any(map(shutil.which, browsers)):
        return "the browser tests need Chromium: apt install chromium"
    if part in ("npu", "npu-one") and not (shutil.which("g++") or shutil.which("c++")):
        return "the stand-in npu is compiled, which needs a C++ compiler: apt install g++"
    return ""


def run(part: str) -> tuple[bool, str]:
    """(passed, how it ended) of one part; its output is shown as it comes."""
    lack = missing(part)
    if lack:
        print(lack, flush=True)
        return False, lack
    env = os.environ | SETTINGS
    if part in ("npu", "npu-one"):
        env |= NPU if part == "npu" else NPU | {"SHARDBOOK_STANDIN": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    passed, ends = True, []
    for command in PARTS[part]:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        nothing_selected = process.wait() == 5 and "pytest" in command
        ok = process.returncode == 0 or nothing_selected
        passed &= ok
        ends.append(last.strip("= ") if "pytest" in command else ("ok" if ok else last))
    return passed, "; ".join(ends)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default: {', '.join(ALL)}")
    parts = parser.parse_args().part or ALL
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        print(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    lines, passed = [], True
    for part in parts:
        print(f"\n──── {part} ────", flush=True)
        start = time.monotonic()
        ok, end = run(part)
        passed &= ok
        took = time.monotonic() - start
        lines.append(f"{'✓' if ok else '✗'} {part:<10} {took:6.0f} s   {end}")
    print("\n" + "\n".join(lines))
    print("all passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
