"""Who computes what, and when, in attention over a sequence that is cut over ranks."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from ..parallel.ring import Plan, causal_plan, full_plan, zigzag_plan
from ..tracing.palette import LINE
from . import plot


def draw_rings(ranks: int = 4) -> Figure:
    """Scores of the whole sequence: colour is the rank that computes, number the ring's step.

    Drawn from the plans that ring attention runs, in half shards. White is never computed.
    """
    fig, axes = _panels(3)
    panels = [("every key", full_plan, False), ("causal, contiguous", causal_plan, False)]
    panels.append(("causal, zigzag", zigzag_plan, True))
    for ax, (title, plan, zigzag) in zip(axes, panels, strict=True):
        work = [_rank(ax, rank, ranks, plan, zigzag) for rank in range(ranks)]
        n = 2 * ranks
        ax.add_patch(Rectangle((0, 0), n, n, fill=False, ec=LINE, lw=0.8))
        ax.set(xlim=(-0.1, n + 0.1), ylim=(n + 0.1, -0.1), aspect="equal")
        ax.set_xlabel("keys, by position")
        ax.set_ylabel("queries, by position")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(f"{title}\nwork of ranks {', '.join(f'{w / 4:g}' for w in work)}", fontsize=10)
    handles = [Rectangle((0, 0), 1, 1, color=plot.COLOURS[r]) for r in range(ranks)]
    fig.legend(
        handles, [f"rank {r}" for r in range(ranks)], loc="outside lower center", ncols=ranks
    )
    fig.set_label(
        "Three squares of scores, queries down and keys across, coloured by which of "
        f"{ranks} ranks computes them, numbered by the ring's step. "
        + "; ".join(ax.get_title().replace("\n", ", ") for ax in axes)
    )
    return fig


def _panels(columns: int) -> tuple[Figure, list[Axes]]:
    """A row of square panels without frames."""
    fig, axes = plot.figure(3.4 * columns, 4.1, columns)
    for ax in axes:
        ax.spines[:].set_visible(False)
    return fig, axes


def _rank(ax: Axes, rank: int, ranks: int, plan: Plan, zigzag: bool) -> float:
    """Draw what one rank computes; the work in squares of a half shard, a triangle being half."""
    chunks = [
        (r, 2 * ranks - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(ranks)
    ]  # the two halves of each rank's shard
    work = 0.0
    for step in range(ranks):
        owner = (rank - step) % ranks
        for rows, cols, causal in plan(rank, owner, 2):
            queries, keys = chunks[rank][rows], chunks[owner][cols]
            ahead = len(keys) - len(queries)  # causal is bottom-right aligned
            for i, y in enumerate(queries):
                for j, x in enumerate(keys):
                    if causal and j > i + ahead:
                        continue
                    half = causal and j == i + ahead
                    _square(ax, x, y, half, plot.COLOURS[rank], step)
                    work += 0.5 if half else 1
    return work


def _square(ax: Axes, x: float, y: float, half: bool, colour: str, step: int) -> None:
    if half:
        shape = Polygon([(x, y), (x, y + 1), (x + 1, y + 1)], closed=True)
    else:
        shape = Rectangle((x, y), 1, 1)
    shape.set(facecolor=colour, edgecolor="white", linewidth=0.8)
    ax.add_patch(shape)
    at = (x + 0.3, y + 0.72) if half else (x + 0.5, y + 0.52)
    ax.text(*at, str(step), ha="center", va="center", fontsize=7, color=_ink(colour))


def _ink(colour: str) -> str:
    """Black on all but the dark blue of the palette."""
    return "white" if colour == plot.COLOURS[0] else "black"


def draw_ulysses(ranks: int = 4, heads: int = 8) -> Figure:
    """Two pictures of one tensor, positions down and heads across, before and after all-to-all."""
    fig, (left, right) = _panels(2)
    fig.set_size_inches(7, 3.2)
    for r in range(ranks):
        colour = plot.COLOURS[r]
        left.add_patch(Rectangle((0, r / ranks), 1, 1 / ranks, color=colour, lw=0))
        right.add_patch(Rectangle((r / ranks, 0), 1 / ranks, 1, color=colour, lw=0))
        style = {"ha": "center", "va": "center", "color": _ink(colour)}
        left.text(0.5, (r + 0.5) / ranks, f"rank {r}", **style)
        right.text((r + 0.5) / ranks, 0.62, f"rank {r}", **style)
    for ax, title in (
        (left, "everywhere else: a part of the\nsequence, all heads"),
        (right, "inside attention: the whole\nsequence, some heads"),
    ):
        for i in range(heads + 1):
            ax.plot([i / heads] * 2, [0, 1], color="white", lw=0.6)
        for i in range(ranks + 1):
            ax.plot([0, 1], [i / ranks] * 2, color="white", lw=0.6)
        ax.set(xlim=(-0.02, 1.02), ylim=(1.02, -0.02), xticks=[], yticks=[])
        ax.set_xlabel(f"{heads} heads")
        ax.set_title(title, fontsize=10)
    left.set_ylabel("positions")
    fig.get_layout_engine().set(wspace=0.3)
    fig.text(0.52, 0.45, "all-to-all\n→\n←", ha="center", va="center", fontsize=10)
    fig.set_label(
        f"Positions down, {heads} heads across, before and after an all-to-all: each of {ranks} "
        "ranks first has rows, a part of the positions with all heads, then columns, all positions "
        "of some heads."
    )
    return fig
