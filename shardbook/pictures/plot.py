"""Pictures shared by the chapters: one palette, one style, legible on light and dark pages."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..tracing.palette import COLOURS as COLOURS
from ..tracing.palette import LINE, NOTE

STYLE = {
    # A white card: labels stay legible on a dark JupyterLab page too.
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=COLOURS[:6]),
    "axes.grid": False,
    "legend.frameon": False,
}


def figure(width: float = 7.0, height: float = 3.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in the book's style and its axes, always as a list. Sizes in inches."""
    return grid(width, height, 1, columns)


def grid(
    width: float, height: float, rows: int, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns axes, row by row in one list; options are plt.subplots'."""
    mpl.rcParams.update(STYLE)
    size = (width, height)
    fig, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )
    _with_words()
    return fig, list(axes.flat)


def show(words: str) -> None:
    """Show the current figure; `words` say what it shows, for those who cannot see it.

    They are the picture's alternative text in what nbconvert writes. Without them `plt.show()`
    takes what `read` finds in the figure.
    """
    plt.gcf().set_label(words)
    _with_words()
    plt.show()


def read(fig: Figure) -> str:
    """What a figure shows, in words: its label, else its titles, axes, lines, bars and texts."""
    return fig.get_label() or "; ".join(filter(None, map(_read_axes, fig.axes))) or "a picture"


def _read_axes(ax: Axes) -> str:
    said = [ax.get_title(), ax.get_title("left"), ax.get_title("right")]
    names = [ax.get_ylabel(), ax.get_xlabel()]
    said.append(" over ".join(filter(None, names)))
    for line in ax.lines:
        ys = [y for y in line.get_ydata() if y == y]
        if ys and not str(line.get_label()).startswith("_"):
            ends = f"{ys[0]:.3g} to {ys[-1]:.3g}" if len(ys) > 1 else f"{ys[0]:.3g}"
            said.append(f"{line.get_label()}: {ends}")
    ticks = [tick.get_text() for tick in ax.get_xticklabels()]
    for bars in ax.containers:
        heights = [f"{getattr(bar, 'get_height', float)():.3g}" for bar in bars]
        told = zip(ticks, heights, strict=False) if any(ticks) else enumerate(heights)
        name = f"{bars.get_label()}: " if not str(bars.get_label()).startswith("_") else ""
        said.append(name + ", ".join(f"{tick} {height}" for tick, height in told))
    if not ax.containers:
        texts = " ".join(" ".join(text.get_text().split()) for text in ax.texts)
        said.append(texts if len(texts) < 300 else texts[:300].rsplit(" ", 1)[0] + " …")
    return ", ".join(filter(None, said))


def _with_words() -> None:
    """In IPython, pictures of figures carry their words."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        png = shell.display_formatter.formatters["image/png"]
        png.for_type(Figure, _png)  # over matplotlib's own, which is set when a figure is made


def _png(fig: Figure) -> tuple[str, dict]:
    from IPython.core.pylabtools import print_figure

    return print_figure(fig, "png", base64=True), {"alt": read(fig)}


def curves(series: dict[str, Sequence[float]], xlabel: str, ylabel: str, title: str = "") -> Figure:
    """One line a series over its index; the first is drawn wide and pale, so overlaps show."""
    fig, (ax,) = figure()
    for i, (name, values) in enumerate(series.items()):
        style = {"linewidth": 6, "alpha": 0.35} if i == 0 else {"linewidth": 1.6}
        ax.plot(range(len(values)), values, label=name, color=COLOURS[i], **style)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.legend()
    return fig


def bars(groups: dict[str, dict[str, float]], ylabel: str, title: str = "") -> Figure:
    """Bars side by side: {series: {label: value}}, values written above."""
    fig, (ax,) = figure()
    labels = list(next(iter(groups.values())))
    width = 0.8 / len(groups)
    for i, (name, values) in enumerate(groups.items()):
        at = [j + (i - (len(groups) - 1) / 2) * width for j in range(len(labels))]
        drawn = ax.bar(at, [values[label] for label in labels], width, label=name, color=COLOURS[i])
        names = [f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}" for v in map(values.get, labels)]
        ax.bar_label(drawn, names, fontsize=9 if len(groups) < 3 else 8)
    ax.set_xticks(range(len(labels)), labels)
    ax.set(ylabel=ylabel, title=title)
    if len(groups) > 1:
        ax.legend()
    return fig


def storage(tensors: dict[str, Tensor], width: float = 9.0) -> Figure:
    """One row a tensor: its elements as they are indexed, beside the memory they lie in.

    Colour is the first index. A cell of memory that several first indices reach has several
    colours, one that none reaches is white. Small numbers count the storage. 1 to 3 dimensions.
    """
    heights = [max(2, t.shape[-2] if t.dim() > 1 else 1) + 1.6 for t in tensors.values()]
    ratios = {"width_ratios": (2, 3), "height_ratios": heights}
    fig, axes = grid(width, 0.3 * sum(heights), len(tensors), 2, **ratios)
    known, first = next(iter(tensors.items()))
    pairs = zip(axes[::2], axes[1::2], strict=True)
    for (left, right), (name, x) in zip(pairs, tensors.items(), strict=True):
        _indexed(left, x)
        left.set_title(f"{name}   {tuple(x.shape)}", fontsize=10, loc="left")
        _memory(right, x)
        shared = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        place = "" if x is first else (f", memory of {known}" if shared else ", new memory")
        right.set_title(
            f"strides {x.stride()}, offset {x.storage_offset()}{place}", fontsize=10, loc="left"
        )
    return fig


def _indexed(ax: Axes, x: Tensor) -> None:
    grid = x.reshape((1,) * (3 - x.dim()) + tuple(x.shape)).tolist()
    across = 0.0
    for i, matrix in enumerate(grid):
        for j, row in enumerate(matrix):
            for k, value in enumerate(row):
                colour = (k, j, i)[x.dim() - 1]  # the first index
                _cell(ax, across + k, -j, [colour], value)
        across += len(matrix[0]) + 0.6 if matrix else 0
    _bare(ax, across, len(grid[0]) if grid else 1)


def _memory(ax: Axes, x: Tensor) -> None:
    length = x.untyped_storage().nbytes() // x.element_size()
    readers: list[set[int]] = [set() for _ in range(length)]
    for index in itertools.product(*map(range, x.shape)):
        at = x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True))
        readers[at].add(index[0])
    for at, value in enumerate(x.as_strided((length,), (1,), 0).tolist()):
        _cell(ax, at, 0, sorted(readers[at]), value)
        ax.text(at + 0.5, 1.08, str(at), ha="center", va="bottom", fontsize=7, color=NOTE)
    _bare(ax, length, 1)


def _cell(ax: Axes, x: float, y: float, colours: list[int], value: float) -> None:
    for i, colour in enumerate(colours):
        at, wide = x + i / len(colours), 1 / len(colours)
        face = COLOURS[colour % len(COLOURS)]
        ax.add_patch(plt.Rectangle((at, y), wide, 1, facecolor=face, alpha=0.5, linewidth=0))
    ax.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, edgecolor=LINE, linewidth=0.8))
    ax.text(x + 0.5, y + 0.5, f"{value:g}", ha="center", va="center", fontsize=9)


def _bare(ax: Axes, across: float, down: int) -> None:
    ax.set(xlim=(-0.1, max(across, 6) + 0.1), ylim=(0.9 - down, 1.6), aspect="equal", anchor="NW")
    ax.axis("off")
