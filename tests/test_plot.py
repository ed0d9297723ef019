"""Pictures: what a figure says in words, and that a notebook's picture carries it."""

import matplotlib.pyplot as plt
import nbformat
import torch

from book import build
from shardbook import plot
from shardbook.pictures.attention import draw_roofline, draw_tiles
from shardbook.pictures.cache import draw_cache
from shardbook.pictures.context import draw_rings, draw_ulysses
from shardbook.pictures.pipeline import draw_schedules, draw_stages
from shardbook.pictures.tensor import draw_half_block


def test_words_are_read_off_a_figure():
    drawn = plot.curves({"a": [3, 2.5, 1], "b": [2, 2]}, "step", "loss", "two curves")
    assert plot.read(drawn) == "two curves, loss over step, a: 3 to 1, b: 2 to 2"
    drawn = plot.bars({"ms": {"x": 1, "y": 2.5}, "MB": {"x": 0, "y": 4}}, "per rank")
    assert plot.read(drawn) == "per rank, ms: x 1, y 2.5, MB: x 0, y 4"
    said = plot.read(plot.storage({"x": torch.arange(6).view(2, 3)}))
    assert said.startswith("x   (2, 3)") and "strides (3, 1), offset 0" in said
    assert "decode" in plot.read(draw_roofline({"decode": 2.0}))
    assert "qkv or up (columns), " in plot.read(draw_half_block())
    tiles = plot.read(draw_tiles([(slice(0, 4), slice(0, 4), True)], 4, 8))
    assert tiles.endswith("numbered in order: 1; cut by the mask: 1.")
    stages = plot.read(draw_stages([["embed", "0"], ["1", "head"]]))
    assert "rank 0: embed, 0; rank 1: 1, head" in stages
    played = plot.read(draw_schedules({"two": [(0, "F", 0, 0, 0, 1), (1, "F", 0, 1, 1, 2)]}))
    assert played.endswith("two: 2 operations end at 2, 50% idle.")
    assert "row 0: 3 prompt, 2 new; " in plot.read(
        draw_cache({"row 0": [("prompt", 3), ("new", 2)]}, 8)
    )
    assert "causal, zigzag, work of ranks 2, 2, 2, 2" in plot.read(draw_rings())
    assert "8 heads across" in plot.read(draw_ulysses())
    drawn, _ = plot.figure()
    assert plot.read(drawn) == "a picture"
    drawn.set_label("what I say of it")
    assert plot.read(drawn) == "what I say of it"
    plt.close("all")


def test_a_notebooks_pictures_carry_their_words():
    sources = [
        "import matplotlib.pyplot as plt\nfrom shardbook import plot",
        "plot.curves({'a': [1, 2]}, 'x', 'y')\nplt.show()",
        "plot.curves({'a': [1, 2]}, 'x', 'y')\nplot.show('a line that rises')",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    book = nbformat.v4.new_notebook(cells=cells)
    build.execute(book, 60, "notebooks/x")
    found = [cell.outputs[0].metadata["image/png"]["alt"] for cell in book.cells[1:]]
    assert found == ["y over x, a: 1 to 2", "a line that rises"]
    assert all(len(cell.outputs) == 1 for cell in book.cells[1:])
