"""A video set of two directions, small enough to prefer one of them within seconds."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .diffusion import video_dpo_loss

FRAMES, SIZE = 4, 8


def sliding_blocks(count: int, generator: torch.Generator) -> Tensor:
    """[count, 1, 4, 8, 8] of -1 and 1 on the CPU: a 2 x 2 block slides left or right, evenly.

    On one of three rows, from one of two columns: twelve different clips.
    """
    videos = torch.full((count, 1, FRAMES, SIZE, SIZE), -1.0)
    row = (1 + 2 * torch.randint(0, 3, (count,), generator=generator)).tolist()
    start = (2 * torch.randint(0, 2, (count,), generator=generator)).tolist()
    right = (torch.rand(count, generator=generator) < 0.5).tolist()
    for i in range(count):
        for f in range(FRAMES):
            column = start[i] + (f if right[i] else FRAMES - 1 - f)
            videos[i, 0, f, row[i] : row[i] + 2, column : column + 2] = 1.0
    return videos


def goes_right(videos: Tensor) -> Tensor:
    """How far the bright part moves to the right from frame to frame, in pixels, [B]. The judge."""
    weight = videos.float().clamp(-1, 1)[:, 0] + 1  # [B, frames, rows, columns], 0 where dark
    columns = torch.arange(weight.shape[-1], dtype=torch.float32, device=videos.device)
    mass = weight.sum((2, 3)).clamp(min=1e-3)
    centre = (weight.sum(2) * columns).sum(-1) / mass  # [B, frames]
    return (centre[:, -1] - centre[:, 0]) / (centre.shape[1] - 1)


def squared_error(model: nn.Module, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """The flow-matching error of each video, [B]; label 0 is the only one."""
    at = t.view(-1, 1, 1, 1, 1)
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    velocity = model((1 - at) * x + at * noise, t, labels)
    return (velocity - (noise - x)).square().mean((1, 2, 3, 4))


def prefer(
    reference: nn.Module, wins: Tensor, losses: Tensor, steps: int, beta: float, lr: float,
    generator: torch.Generator, batch: int = 32,
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """Diffusion-DPO (arXiv 2311.12908) from pairs; (the model, its loss at every step).

    Winner and loser of a pair, and model and reference, get the same noise and the same time.
    """
    model, device = copy.deepcopy(reference).requires_grad_(), wins.device
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    curve = []
    for _ in range(steps):
        at = torch.randint(0, min(len(wins), len(losses)), (batch,), generator=generator)
        noise = torch.randn(batch, *wins.shape[1:], generator=generator).to(device)
        t = torch.rand(batch, generator=generator).to(device)
        win, lose = wins[at.to(device)], losses[at.to(device)]
        with torch.no_grad():
            ref = [squared_error(reference, x, noise, t) for x in (win, lose)]
        now = [squared_error(model, x, noise, t) for x in (win, lose)]
        loss = video_dpo_loss(*now, *ref, beta)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return model, curve


def drift(model: nn.Module, reference: nn.Module, videos: Tensor, noise: Tensor) -> float:
    """Root mean square difference of the two velocities, as a part of the reference's own."""
    t = torch.linspace(0.05, 0.95, len(videos), device=videos.device)
    at = t.view(-1, 1, 1, 1, 1)
    x = (1 - at) * videos + at * noise
    labels = torch.zeros(len(videos), dtype=torch.int64, device=videos.device)
    with torch.no_grad():
        a, b = model(x, t, labels), reference(x, t, labels)
    return (F.mse_loss(a, b).sqrt() / b.square().mean().sqrt()).item()
