"""Pipeline schedules drawn: one row per rank, one box per operation."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..tracing.palette import INK
from . import plot

KINDS = {  # colour and name of an operation
    "F": (plot.COLOURS[4], "forward"),
    "B": (plot.COLOURS[1], "backward"),
    "I": (plot.COLOURS[3], "input gradient"),
    "W": (plot.COLOURS[2], "weight gradient"),
}


def draw_stages(blocks: list[list[str]]) -> Figure:
    """The layers each rank holds, and what crosses the boundaries. blocks: names by rank."""
    fig, (ax,) = plot.figure(10, 1.9)
    x = 0.0
    for rank, names in enumerate(blocks):
        left = x
        for name in names:
            box = Rectangle(
                (x, 0), 1, 1, facecolor=plot.COLOURS[rank], alpha=0.6, edgecolor="white"
            )
            ax.add_patch(box)
            ax.text(x + 0.5, 0.5, name, ha="center", va="center", fontsize=9)
            x += 1
        ax.text((left + x) / 2, 1.12, f"rank {rank}", ha="center", fontsize=10)
        if rank < len(blocks) - 1:
            style = {"arrowstyle": "->", "color": INK}
            ax.annotate("", (x + 1.35, 0.72), (x + 0.05, 0.72), arrowprops=style)
            ax.annotate("", (x + 0.05, 0.28), (x + 1.35, 0.28), arrowprops=style | {"ls": ":"})
            ax.text(x + 0.7, 0.79, "[B, S, D]", ha="center", fontsize=8)
            ax.text(x + 0.7, 0.04, "its gradient", ha="center", fontsize=8)
            x += 1.4
    ax.set(xlim=(-0.1, x + 0.1), ylim=(-0.1, 1.4), aspect="equal")
    ax.axis("off")
    held = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(blocks))
    fig.set_label(f"Blocks in a row, by rank: {held}. Activations go right, gradients left.")
    return fig


def draw_schedules(timelines: dict[str, list[tuple]], width: float = 10.0) -> Figure:
    """{title: timeline}, drawn below each other on one time axis.

    A timeline holds (rank, kind, microbatch, part, start, end); a part is a chunk or a block, and
    all but the lowest part of a rank are drawn pale. White is the bubble.
    """
    ranks = [1 + max(op[0] for op in t) for t in timelines.values()]
    height = 0.28 * sum(ranks) + 0.62 * len(timelines)
    fig, axes = plot.grid(width, height, len(timelines), height_ratios=ranks, sharex=True)
    kinds: set[str] = set()
    for ax, (title, timeline) in zip(axes, timelines.items(), strict=True):
        _gantt(ax, timeline)
        ax.set_title(title, loc="left", fontsize=10)
        kinds |= {op[1] for op in timeline}
    handles = [Patch(facecolor=c, label=n) for k, (c, n) in KINDS.items() if k in kinds]
    axes[-1].set_xlabel("time")
    fig.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=9)
    fig.set_label(
        "Bars of operations in time, a row per rank. " + " ".join(map(_said, timelines.items()))
    )
    return fig


def _said(item: tuple[str, list[tuple]]) -> str:
    title, timeline = item
    end, busy = max(op[5] for op in timeline), sum(op[5] - op[4] for op in timeline)
    ranks = 1 + max(op[0] for op in timeline)
    return (
        f"{title}: {len(timeline)} operations end at {end:.4g}, {1 - busy / end / ranks:.0%} idle."
    )


def _gantt(ax: Axes, timeline: list[tuple]) -> None:
    lowest = {}
    for rank, _, _, part, _, _ in timeline:
        lowest[rank] = min(part, lowest.get(rank, part))
    span = max(op[5] for op in timeline)
    for rank, kind, i, part, start, end in timeline:
        colour = KINDS[kind][0]
        ax.broken_barh(
            [(start, end - start)],
            (-rank - 0.45, 0.9),
            facecolor=colour,
            alpha=1.0 if part == lowest[rank] else 0.45,
            edgecolor="white",
            linewidth=0.6,
        )
        if end - start > span / 120:
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": "black"}
            ax.text((start + end) / 2, -rank, str(i), **style)
    ranks = sorted(lowest)
    ax.set_yticks([-r for r in ranks], [f"rank {r}" for r in ranks], fontsize=8)
    ax.set_ylim(-len(ranks) + 0.45, 0.55)
    ax.tick_params(axis="x", labelsize=8)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
