"""A video DiT for the moving shapes, trained on data-parallel ranks and judged by a classifier."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..devices import device
from ..models.diffusion import euler_sample, flow_matching_loss
from ..models.dit import DiT
from .digits import Classifier, judge, train_classifier
from .shapes import DIRECTIONS, moving_shapes
from .train import seeded, train

GRID = (6, 12, 12)
"""Frames, rows, columns of the small video set."""
PATCH = 4
CLASSES = 12
NO_LABEL = CLASSES


class Places(nn.Module):
    """Adds to every token [B, S, D] where it stands: waves over the frames, rows and columns.

    RoPE tells two tokens how far they are apart, in attention only. Which frame is the first one, a
    token learns from this table.
    """

    def __init__(self, sizes: tuple[int, int, int], dim: int):
        super().__init__()
        positions = torch.cartesian_prod(*[torch.arange(n) for n in sizes]).float()  # [S, 3]
        waves = torch.arange(1, dim // 6 + 1) * (math.pi / 2)  # up to dim / 6 half waves an axis
        parts = []
        for axis, size in enumerate(sizes):
            angles = (positions[:, axis, None] + 0.5) / size * waves  # [S, dim // 6]
            parts += [angles.sin(), angles.cos()]
        table = torch.cat(parts, dim=1)
        table = nn.functional.pad(table, (0, dim - table.shape[1]))  # [S, D]
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table


def video_dit(seed: int = 0) -> DiT:
    """A new DiT of 54 tokens with RoPE-3D, on the CPU, for videos [B, 1, 6, 12, 12]."""
    model = seeded(lambda: DiT(1, GRID, 64, 3, 4, CLASSES, patch=PATCH), seed)
    frames, rows, columns = GRID
    places = Places((frames, rows // PATCH, columns // PATCH), 64)
    model.x_embedder = nn.Sequential(model.x_embedder, places)
    return model


def clips(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(videos fp32 [count, 1, 6, 12, 12], labels int64 [count]) on the CPU."""
    return moving_shapes(count, seed, frames=GRID[0], size=GRID[1])


def learn(
    steps: int, batch: int = 32, report: Callable[[int, float], None] | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """On every rank: train one video DiT; (the average's weights on the CPU, this rank's losses).

    Data parallel: each rank draws its share of the batch with a seed of its own, and gradients are
    averaged. One time in ten the label is dropped.
    """
    videos, labels = clips(2000, seed=0)
    where, rank, share = device(), dist.get_rank(), batch // dist.get_world_size()

    def batch_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        pick = torch.randint(len(videos), (share,), generator=generator)
        dropped = torch.rand(share, generator=generator) < 0.1
        y = torch.where(dropped, NO_LABEL, labels[pick])
        noise = torch.randn(share, 1, *GRID, generator=generator)
        # Most times near the noise: there the direction is decided, later the data shows it.
        t = torch.sigmoid(1.5 + 1.2 * torch.randn(share, generator=generator))
        x, y, noise, t = (v.to(where) for v in (videos[pick], y, noise, t))
        return flow_matching_loss(model, x, y, noise, t)

    average, losses = train(
        video_dit().to(where), batch_loss, steps, lr=1e-2, warmup=50, ema=0.99, seed=rank,
        report=report if rank == 0 else None, group=dist.group.WORLD,
    )  # fmt: skip
    return {name: value.cpu() for name, value in average.state_dict().items()}, losses


def draw(
    weights: dict[str, Tensor], labels: Tensor, guidance: float = 1.0, seed: int = 1
) -> Tensor:
    """On every rank: this rank's part of the videos of these labels, on the CPU; 20 Euler steps.

    The noise is drawn whole by every rank from `seed`: the parts fit, whatever the ranks.
    """
    model = video_dit().eval()
    model.load_state_dict(weights)
    noise = torch.randn(len(labels), 1, *GRID, generator=torch.Generator().manual_seed(seed))
    rank, size = dist.get_rank(), dist.get_world_size()
    noise, labels = (v.chunk(size)[rank].to(device()) for v in (noise, labels))
    return euler_sample(model.to(device()), noise, labels, 20, guidance, NO_LABEL).cpu()


def video_classifier(videos: Tensor, labels: Tensor) -> Classifier:
    """Tells shape and direction of videos [N, 1, F, R, W]; it sees the frames as channels."""
    return train_classifier(videos[:, 0], labels, steps=300)


def judge_videos(classifier: Classifier, videos: Tensor, labels: Tensor, real: Tensor) -> dict:
    """The shares of right "shape", "direction" and "both", and "frechet" to the real videos."""
    found = classifier(videos[:, 0]).argmax(1)
    scores = judge(classifier, videos[:, 0], labels, real[:, 0])
    n = len(DIRECTIONS)
    return {
        "shape": (found // n == labels // n).float().mean().item(),
        "direction": (found % n == labels % n).float().mean().item(),
        "both": scores["accuracy"],
        "frechet": scores["frechet"],
    }
