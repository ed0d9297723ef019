"""The grid of operations: what each rank holds before and after, coloured by whose it was."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ..tracing.palette import LINE
from . import plot

COLOURS = [plot.COLOURS[i] for i in (0, 1, 2, 4)]  # of four ranks


def draw_operations(
    titles: Sequence[str], seen: Sequence[Sequence[tuple[Tensor, Tensor, int]]]
) -> Figure:
    """A panel per operation, titled so, from what `before_and_after` saw on each of four ranks."""
    fig, axes = plot.grid(10.5, 9.0, rows=5, columns=2)
    words = []
    for number, (title, ax) in enumerate(zip(titles, axes, strict=True)):
        for rank, found in enumerate(seen):
            before, after, _ = found[number]
            ax.text(-0.3, -rank - 0.5, f"rank {rank}", ha="right", va="center", fontsize=8)
            _pieces(ax, 0, -rank, before)
            _pieces(ax, 6, -rank, after)
        ax.annotate("", (5.6, -2), (4.4, -2), arrowprops={"arrowstyle": "-|>", "color": LINE})
        ax.set(xlim=(-1.6, 10.2), ylim=(-4.1, 0.1), aspect="equal")
        ax.axis("off")
        ax.set_title(title, fontsize=9.5, loc="left")
        words.append(f"{title}: {_told([found[number][1] for found in seen])}")
    fig.set_label("Before and after on ranks 0 to 3. " + " ".join(words))
    return fig


def _pieces(ax: Axes, x: float, y: float, rows: Tensor) -> None:
    """One square per row, striped by the ranks whose data are in it, with the piece's number."""
    for column, row in enumerate(rows):
        owners = row.nonzero().flatten().tolist()
        for stripe, owner in enumerate(owners):
            height = 0.9 / len(owners)
            corner = (x + column, y - 0.95 + stripe * height)
            ax.add_patch(Rectangle(corner, 0.9, height, facecolor=COLOURS[owner], linewidth=0))
        piece = int(row.max()) - 1
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
        ax.text(
            x + column + 0.45, y - 0.5, str(piece), ha="center", va="center", fontsize=8, bbox=box
        )


def _told(after: Sequence[Tensor]) -> str:
    said = []
    for rank, rows in enumerate(after):
        owners = len(rows.any(0).nonzero())
        said.append(f"rank {rank} has pieces: {len(rows)}, of ranks: {owners}")
    return ", ".join(said) + "."
