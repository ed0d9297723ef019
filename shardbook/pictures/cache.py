"""A picture of chapter 32: what lies where in a cache."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..tracing.palette import GREY
from . import plot


def draw_cache(rows: Mapping[str, Sequence[tuple[str, int]]], max_len: int) -> Figure:
    """A line of cells for each row of the batch: its parts (name, tokens) in order, then room.

    Parts of one name have one colour; "stale" ones are hatched.
    """
    fig, (ax,) = plot.figure(8.5, 0.5 * len(rows) + 1.3)
    names = list(dict.fromkeys(name for parts in rows.values() for name, _ in parts))
    looks = {
        name: {
            "facecolor": plot.COLOURS[i],
            "edgecolor": "white",
            "hatch": "////" if name == "stale" else None,
        }
        for i, name in enumerate(names)
    }
    looks["room"] = {"facecolor": "white", "edgecolor": GREY}
    for i, parts in enumerate(rows.values()):
        used = sum(count for _, count in parts)
        at = 0
        for name, count in [*parts, ("room", max_len - used)]:
            for cell in range(at, at + count):
                ax.add_patch(Rectangle((cell, i + 0.1), 1, 0.8, **looks[name]))
            at += count
    ax.set(xlim=(-0.05, max_len + 0.05), ylim=(len(rows), 0), xlabel="position")
    ax.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
    ax.set_xticks(range(0, max_len + 1, 4))
    keys = [Rectangle((0, 0), 1, 1, label=name, **look) for name, look in looks.items()]
    fig.legend(handles=keys, loc="outside upper center", ncols=len(keys))
    held = "; ".join(
        f"{row}: {', '.join(f'{count} {name}' for name, count in parts)}"
        for row, parts in rows.items()
    )
    fig.set_label(f"A line of {max_len} places per row of the batch. {held}; the rest is room.")
    return fig
