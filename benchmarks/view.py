"""The inline view: bytes it adds to a notebook and time to mount it, for 2k, 20k, 100k slices.

    python benchmarks/view.py [--repeat 5]

Mounting is from putting the html into a page until the lanes are drawn, in headless Chromium; the
best and the median of the repeats. Beside it, in the same run, VizTracer's report of the same
events: the bytes of its html (which embeds the events as json beside catapult's viewer).
"""

import argparse
import io
import statistics
import sys
import time
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print(f"{'slices':>8} {'drawn':>8} {'cell KB':>8} {'viztracer KB':>13} {'python s':>9}"
          f" {'mount ms: best':>15} {'median':>7}")  # fmt: skip
    with chromium_browser() as chromium:
        page = chromium.new_page(viewport={"width": 1000, "height": 800})
        page.goto("about:blank")
        for slices in (2_000, 20_000, 100_000):
            chrome = many(slices)
            for most in (view.MOST, 10**9) if slices > view.MOST else (view.MOST,):
                start = time.perf_counter()
                html = view.html(chrome, most=most)
                python = time.perf_counter() - start
                times = [page.evaluate(MOUNT, html) for _ in range(repeat)]
                frame = page.query_selector("iframe").content_frame()
                drawn = frame.evaluate("trace.slices.length")
                peer = viztracer_bytes(chrome) / 1000
                print(f"{slices:8} {drawn:8} {len(html) / 1000:8.0f} {peer:13.0f} {python:9.2f}"
                      f" {min(times):15.0f} {statistics.median(times):7.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
