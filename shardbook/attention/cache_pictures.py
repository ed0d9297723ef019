"""A picture of chapter 32: what lies where in a cache."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .. import plot


def draw_cache(parts: Sequence[Sequence[tuple[str, int]]], max_len: int) -> Figure:
    """A line of cells for each row of the batch: its parts (name, tokens) in order, then room.

    Parts of one name have one colour; "stale" ones are hatched.
    """
    fig, (ax,) = plot.figure(8.5, 0.5 * len(parts) + 1.3)
    names = list(dict.fromkeys(name for row in parts for name, _ in row))
    for i, row in enumerate(parts):
        at = 0
        for name, count in row:
            colour = plot.COLOURS[names.index(name)]
            for cell in range(at, at + count):
                style = {"hatch": "////"} if name == "stale" else {}
                patch = Rectangle(
                    (cell, i + 0.1), 1, 0.8, facecolor=colour, edgecolor="white", **style
                )
                ax.add_patch(patch)
            at += count
        for cell in range(at, max_len):
            ax.add_patch(Rectangle((cell, i + 0.1), 1, 0.8, fill=False, edgecolor="#bbbbbb"))
    for name in names:
        hatch = "////" if name == "stale" else None
        ax.bar(
            0, 0, color=plot.COLOURS[names.index(name)], label=name, hatch=hatch, edgecolor="white"
        )
    ax.bar(0, 0, color="white", edgecolor="#bbbbbb", label="room")
    ax.set(xlim=(0, max_len), ylim=(len(parts), 0), xlabel="position")
    ax.set_yticks([i + 0.5 for i in range(len(parts))], [f"row {i}" for i in range(len(parts))])
    ax.set_xticks(range(0, max_len + 1, 4))
    fig.legend(loc="outside upper center", ncols=len(names) + 1)
    return fig
