"""Which tensor is cut and which collective pays: half a transformer block, drawn."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..tracing.palette import EMPTY, INK, LINE, NOTE
from . import plot

SIZES = {"tokens": 1.3, "D": 0.8, "hidden": 1.7}  # of the drawn sides


def draw_half_block(sequence_parallel: bool = False, ranks: int = 4) -> Figure:
    """norm, a column-parallel and a row-parallel product; a colour is a rank, grey is whole.

    Activations are drawn [S, features], weights [in, out], so that x @ W reads from left to right.
    """
    around = "rows" if sequence_parallel else "whole"
    enter, leave = (
        ("all-gather", "reduce-scatter") if sequence_parallel else ("f: identity", "g: all-reduce")
    )
    back = ("reduce-scatter", "all-gather") if sequence_parallel else ("all-reduce", "g")
    parts = [  # label, rows, columns, how it is cut, what leads to the next (forward, backward)
        ("x", "tokens", "D", around, ("norm", "")),
        ("norm(x)", "tokens", "D", around, (enter, back[0])),
        ("input", "tokens", "D", "whole", ("@", "")),
        ("qkv or up", "D", "hidden", "columns", ("=", "")),
        ("attention(heads)\nor gelu(hidden)", "tokens", "hidden", "columns", ("@", "")),
        ("out or down", "hidden", "D", "rows", ("=", "")),
        ("partial sums", "tokens", "D", "partial", (leave, back[1])),
        ("y", "tokens", "D", around, None),
    ]
    fig, (ax,) = plot.figure(12, 3.3)
    x = 0.0
    for label, rows, columns, cut, link in parts:
        height, width = SIZES[rows], SIZES[columns]
        _matrix(ax, x, width, height, cut, ranks)
        weight = label in ("qkv or up", "out or down")
        style = {"fontweight": "bold"} if weight else {}
        ax.text(x + width / 2, -1.05, label, ha="center", va="top", fontsize=9, **style)
        x += width
        if link:
            x = _link(ax, x, *link)
    names = [*(f"rank {r}" for r in range(ranks)), "whole on every rank"]
    colours = [*plot.COLOURS[:ranks], EMPTY]
    keys = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in colours]
    ax.legend(keys, names, loc="lower center", ncols=ranks + 1, bbox_to_anchor=(0.5, 0.98))
    ax.set(xlim=(-0.1, x + 0.1), ylim=(-1.6, 1.2), aspect="equal")
    ax.axis("off")
    flow = ", ".join(f"{part[0]} ({part[3]})".replace("\n", " ") for part in parts)
    fig.set_label(
        f"Matrices from left to right, each whole, cut by rows or columns over {ranks} ranks, or "
        f"partial sums: {flow}. Forward {enter} before the first product and {leave} at the end."
    )
    return fig


def _matrix(ax: Axes, x: float, width: float, height: float, cut: str, ranks: int) -> None:
    bottom = -height / 2
    if cut == "whole":
        ax.add_patch(Rectangle((x, bottom), width, height, facecolor=EMPTY))
    for r in range(ranks if cut != "whole" else 0):
        colour = plot.COLOURS[r]
        if cut == "columns":
            box = Rectangle((x + r * width / ranks, bottom), width / ranks, height)
        elif cut == "rows":
            at = bottom + height - (r + 1) * height / ranks
            box = Rectangle((x, at), width, height / ranks)
        else:  # partial sums: every rank has the full shape, one sheet behind the other
            shift = 0.09 * (ranks - 1 - r)
            box = Rectangle((x + shift, bottom + shift), width, height, ec="white", lw=0.8)
        box.set_facecolor(colour)
        ax.add_patch(box)
    if cut != "partial":
        ax.add_patch(Rectangle((x, bottom), width, height, fill=False, ec=LINE, lw=0.8))


def _link(ax: Axes, x: float, forward: str, backward: str) -> float:
    if forward in ("@", "="):
        gap = 0.36 if forward == "@" else 0.42
        ax.text(x + gap / 2, 0, forward, ha="center", va="center", fontsize=12)
        return x + gap
    gap = 0.75 if forward == "norm" else 1.62
    start = x + (0.33 if forward.endswith(("all-reduce", "scatter")) else 0.06)
    arrow = {"arrowstyle": "-|>", "mutation_scale": 11, "color": INK}
    ax.add_patch(FancyArrowPatch((start, 0.12), (x + gap - 0.06, 0.12), **arrow))
    ax.text((start + x + gap) / 2, 0.2, forward, ha="center", va="bottom", fontsize=9)
    if backward:
        ax.add_patch(FancyArrowPatch((x + gap - 0.06, -0.16), (start, -0.16), **arrow, ls=":"))
        text = {"g": "identity"}.get(backward, backward)
        ax.text((start + x + gap) / 2, -0.24, text, ha="center", va="top", fontsize=9, color=NOTE)
    return x + gap
