"""Pictures shared by the chapters: one palette, one style, legible on light and dark pages."""

from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common colour blindness.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]

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
    mpl.rcParams.update(STYLE)
    fig, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    return fig, [axes] if columns == 1 else list(axes)


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
        ax.bar_label(drawn, fmt="%.3g", fontsize=9)
    ax.set_xticks(range(len(labels)), labels)
    ax.set(ylabel=ylabel, title=title)
    if len(groups) > 1:
        ax.legend()
    return fig
