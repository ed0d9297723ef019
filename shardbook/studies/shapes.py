"""A video set small enough to learn in a minute: one shape moves in one direction."""

import torch
from torch import Tensor

SHAPES = ("square", "cross", "triangle")
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
"""Rows and columns a frame."""

_MASKS = torch.tensor(
    [
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    ],
    dtype=torch.float32,
)


def moving_shapes(
    count: int, seed: int = 0, frames: int = 8, size: int = 16
) -> tuple[Tensor, Tensor]:
    """(videos fp32 [count, 1, frames, size, size] of -1 and 1, labels int64 [count]) on the CPU.

    A label is shape * 4 + direction, drawn evenly. A shape moves a pixel a frame and starts where
    it has room for it: nothing wraps around, so a direction can be read off any two frames.
    ValueError where there is no room.
    """
    side = _MASKS.shape[-1]
    room = size - side + 1  # places along one axis
    if room < frames:
        raise ValueError(
            f"{frames} frames need {frames + side - 1} pixels, a side has {size}: take fewer frames"
        )
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES) * len(DIRECTIONS), (count,), generator=generator)
    videos = torch.full((count, 1, frames, size, size), -1.0)
    for video, label in zip(videos, labels.tolist(), strict=True):
        mask = _MASKS[label // 4] * 2 - 1
        start = []
        steps = list(DIRECTIONS.values())[label % 4]
        for step in steps:
            travel = (frames - 1) * abs(step)
            at = int(torch.randint(room - travel, (1,), generator=generator))
            start.append(at + travel if step < 0 else at)
        for i in range(frames):
            row, column = (s + i * step for s, step in zip(start, steps, strict=True))
            video[0, i, row : row + side, column : column + side] = mask
    return videos, labels
