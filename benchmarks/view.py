"""The inline view: bytes it adds to a notebook and time to mount it, for 2k, 20k, 100k slices.

    python benchmarks/view.py [--repeat 5] [--against FOLDER]

Mounting is from putting the html into a page until the lanes are drawn, in headless Chromium; the
best and the median of the repeats. Beside it, in the same run, VizTracer's report of the same
events: the bytes of its html (which embeds the events as json beside catapult's viewer). Where not
all slices are kept, a trace is reduced as it is past what a notebook should hold. --against mounts
the views of another checkout, made by its .venv, in turn with these.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardbook.tracing import view
from tests.browser.conftest import chromium_browser
from tests.browser.test_view_page import MOUNT
from tests.test_view import many


def viztracer_bytes(chrome: dict) -> int:
    """Size of VizTracer's html report, which holds the events as json and catapult's viewer."""
    from viztracer.report_builder import ReportBuilder

    data = {"viztracer_metadata": {"version": "1"}, "file_info": {"files": {}, "functions": {}}}
    out = io.StringIO()
    ReportBuilder(data | chrome, verbose=0).generate_report(out, "html")
    return len(out.getvalue().encode())


OTHER = """
import json, sys, time
try:
    from shardbook.tracing import view
except ImportError:  # its name before
    from shardbook.trace import view
chrome, most = json.load(sys.stdin)
view.html({"traceEvents": chrome["traceEvents"][:5]})  # imports and fonts
start = time.perf_counter()
html = view.html(chrome, most=most)
print(json.dumps([html, time.perf_counter() - start]))
"""


def made_by(folder: Path, chrome: dict, most: int) -> tuple[str, float]:
    """The html and the seconds it took, by the checkout in `folder`."""
    python = folder / ".venv" / "bin" / "python"
    env = os.environ | {"PYTHONPATH": str(folder)}
    command = [str(python if python.exists() else sys.executable), "-c", OTHER]
    text = json.dumps([chrome, most])
    done = subprocess.run(
        command, input=text, cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    folders = {"here": here} | ({"there": args.against.resolve()} if args.against else {})
    print(f"{'':6}{'slices':>8} {'drawn':>8} {'cell KB':>8} {'viztracer KB':>13} {'python s':>9}"
          f" {'mount ms: best':>15} {'median':>7}")  # fmt: skip
    with chromium_browser() as chromium:
        page = chromium.new_page(viewport={"width": 1000, "height": 800})
        page.goto("about:blank")
        for slices in (2_000, 20_000, 100_000):
            chrome = many(slices)
            peer = viztracer_bytes(chrome) / 1000
            for most in (view.MOST, 10**9) if slices > view.MOST else (10**9,):
                views = {name: made_by(f, chrome, most) for name, f in folders.items()}
                times: dict[str, list[float]] = {name: [] for name in views}
                for _ in range(args.repeat):
                    for name, (html, _) in views.items():
                        times[name].append(page.evaluate(MOUNT, html))
                        frame = page.query_selector("iframe").content_frame()
                        drawn = frame.evaluate("trace.slices.length")
                for name, (html, python) in views.items():
                    took = times[name]
                    print(f"{name:6}{slices:8} {drawn:8} {len(html) / 1000:8.0f} {peer:13.0f}"
                          f" {python:9.2f} {min(took):15.0f} {statistics.median(took):7.0f}",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
