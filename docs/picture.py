"""Remake docs/trace.png: a cell run on four ranks in a real JupyterLab, and its trace.

    python -m docs.picture [--dark]

Needs Chromium and the test extra, as the browser tests do, whose set-up this borrows.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import conftest as browser
from tests.browser.test_lab import find, open_notebook, point, run_command, views

CELL = """\
import shardbook as sb
from shardbook.basics.tiny import counting_batch, tiny_lm
from shardbook.parallel.tensor_lm import tensor_parallel_
from shardbook.parallel.vocab import vocab_parallel_cross_entropy

def step():
    model = tensor_parallel_(tiny_lm(dim=256))   # each rank keeps a quarter of every layer
    tokens, targets = counting_batch(step=0, seq=512)
    loss = vocab_parallel_cross_entropy(model(tokens), targets).mean()
    loss.backward()

sb.run(step, world_size=4, trace=True).trace"""


def main() -> None:
    """Write docs/trace.png."""
    out = Path(__file__).with_name("trace-dark.png" if "--dark" in sys.argv else "trace.png")
    with (
        tempfile.TemporaryDirectory() as folder,
        browser.chromium_browser() as chromium,
        browser.jupyterlab(Path(folder)) as lab,
    ):
        size = {"width": 1200, "height": 1400}
        page = chromium.new_page(viewport=size, device_scale_factor=1.25)
        page.goto(lab.url(f"lab?token={browser.TOKEN}"))
        path = browser.notebook(lab.root / "tensor_parallel.ipynb", "import shardbook", CELL)
        open_notebook(page, lab, path.name)
        if "--dark" in sys.argv:
            run_command(page, "apputils:change-theme", theme="JupyterLab Dark")
        run_command(page, "application:toggle-left-area")
        browser.idle(page)
        for _ in range(2):  # the second time the fork server is warm
            run_command(page, "notebook:run-all-cells")
            page.wait_for_timeout(1000)
            browser.idle(page)
        frame = views(page)[0]
        page.mouse.click(*point(page, frame, find(frame, "blocks.0.attn")))
        page.mouse.move(5, 300)
        page.wait_for_timeout(500)
        page.screenshot(path=out)
    Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
