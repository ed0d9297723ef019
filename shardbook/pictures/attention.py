"""Pictures of chapter 31: the tiles that are visited, and where a workload meets the roofline."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ..tracing.palette import LINE
from . import plot

# Dense bf16 peak in TFLOP/s and memory bandwidth in TB/s, from the makers' data sheets:
# NVIDIA A100 80GB SXM, H100 SXM, H200 SXM product briefs; Ascend 910B as published by Huawei for
# the Atlas 800T A2 (fp16 376 TFLOPS, 64 GB at 1.6 TB/s).
DEVICES = {
    "A100 80GB": (312, 2.04),
    "H100 SXM": (989, 3.35),
    "H200 SXM": (989, 4.8),
    "Ascend 910B": (376, 1.6),
}


def draw_tiles(tiles: Iterable[tuple[slice, slice, bool]], rows: int, cols: int) -> Figure:
    """The visited tiles, numbered in order; hatched where the mask cuts through."""
    fig, (ax,) = plot.figure(5.2, 5.2 * rows / cols + 0.6)
    tiles = list(tiles)
    for number, (r, c, masked) in enumerate(tiles):
        size = c.stop - c.start, r.stop - r.start
        style = {"hatch": "///", "alpha": 0.55} if masked else {"alpha": 0.9}
        patch = Rectangle((c.start, r.start), *size, facecolor=plot.COLOURS[4], edgecolor="white")
        patch.set(**style)
        ax.add_patch(patch)
        if len(tiles) <= 60:
            x, y = c.start + size[0] / 2, r.start + size[1] / 2
            ax.text(x, y, str(number), ha="center", va="center", fontsize=9, color="black")
    ax.set(xlim=(0, cols), ylim=(rows, 0), xlabel="key", ylabel="query", aspect="equal")
    ax.set_title(f"{len(tiles)} tiles visited", fontsize=11)
    fig.set_label(
        f"Queries down, keys across, {rows} x {cols} scores. Tiles visited, numbered in order: "
        f"{len(tiles)}; cut by the mask: {sum(masked for _, _, masked in tiles)}."
    )
    return fig


def draw_block_kinds(masks: dict[str, Tensor]) -> Figure:
    """`block_kinds` of some masks beside each other: skipped white, cut hatched, whole filled."""
    fig, axes = plot.figure(3.0 * len(masks), 3.3, columns=len(masks))
    for ax, (name, kinds) in zip(axes, masks.items(), strict=True):
        for r, row in enumerate(kinds.tolist()):
            for c, kind in enumerate(row):
                look = {1: {"hatch": "////", "alpha": 0.5}, 2: {"alpha": 0.9}}.get(kind)
                if look:
                    colour = {"facecolor": plot.COLOURS[4], "edgecolor": "white"}
                    ax.add_patch(Rectangle((c, r), 1, 1, **colour, **look))
        used = int((kinds > 0).sum())
        ax.set(xlim=(0, kinds.shape[1]), ylim=(kinds.shape[0], 0), aspect="equal")
        ax.set(xlabel="tile of keys", ylabel="tile of queries")
        ax.set_title(f"{name}\n{used} of {kinds.numel()} tiles", fontsize=10)
    fig.set_label(
        "Tiles of queries down, tiles of keys across; visited: "
        + ", ".join(f"{name} {int((k > 0).sum())} of {k.numel()}" for name, k in masks.items())
    )
    return fig


def draw_roofline(workloads: dict[str, float]) -> Figure:
    """Attainable TFLOP/s over FLOPs per byte for DEVICES, and where each workload stands."""
    fig, (ax,) = plot.figure(7.5, 4.2)
    intensity = np.logspace(-1, 4, 200)
    for colour, (name, (peak, bandwidth)) in zip(plot.COLOURS, DEVICES.items(), strict=False):
        reached = np.minimum(peak, intensity * bandwidth)
        ax.loglog(
            intensity, reached, color=colour, label=f"{name}: {peak} TFLOP/s, {bandwidth} TB/s"
        )
    for name, at in workloads.items():
        ax.axvline(at, color=LINE, linestyle=":", linewidth=1.2)
        ax.text(
            at * 1.08, 0.13, name, rotation=90, va="bottom", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )  # fmt: skip
    ax.set(xlabel="FLOPs per byte", ylabel="attainable TFLOP/s (bf16)", ylim=(0.1, 2_000))
    ax.legend(fontsize=8, loc="upper left", framealpha=1.0, frameon=True)
    corners = [f"{name} {peak / width:.0f}" for name, (peak, width) in DEVICES.items()]
    fig.set_label(
        "Attainable TFLOP/s over FLOPs per byte rise to a corner and stay flat; the corners lie at "
        f"{', '.join(corners)}. Lines: "
        + "; ".join(f"{name}, at {at:,.0f}" for name, at in workloads.items())
    )
    return fig
