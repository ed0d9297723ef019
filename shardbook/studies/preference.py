"""Diffusion-DPO on videos (arXiv 2311.12908): pairs, the training loop, and how far it moved."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.diffusion import video_dpo_loss


def pairs(preferred: Tensor, sure: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices [count] of winners and of losers among N judged videos.

    preferred and sure are bool [N]: has a video what is wanted, and was the judge sure of it? Only
    sure ones are paired, each winner and loser drawn evenly. ValueError where one kind is missing.
    """
    wins = (preferred & sure).nonzero().flatten()
    losses = (~preferred & sure).nonzero().flatten()
    if not len(wins) or not len(losses):
        raise ValueError(
            f"{len(wins)} winners and {len(losses)} losers that the judge is sure of: "
            "pairs need both, draw more videos"
        )
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        kind[torch.randint(len(kind), (count,), generator=generator).to(kind.device)]
        for kind in (wins, losses)
    )


def squared_error(model: nn.Module, x: Tensor, label: int, noise: Tensor, t: Tensor) -> Tensor:
    """The flow-matching error of each video x [B, ...] under one label, [B]; t [B] in [0, 1]."""
    at = t.view(-1, *[1] * (x.dim() - 1))  # [B, 1, …]
    labels = torch.full((len(x),), label, dtype=torch.int64, device=x.device)
    velocity = model((1 - at) * x + at * noise, t, labels)
    return (velocity - (noise - x)).square().flatten(1).mean(1)


def prefer(
    reference: nn.Module, wins: Tensor, losses: Tensor, label: int, steps: int, beta: float,
    lr: float, seed: int = 0, batch: int = 16,
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """Diffusion-DPO from pairs wins[i], losses[i]; (the model, its loss at every step).

    Winner and loser of a pair, and model and reference, get the same noise and the same time.
    """
    model, device = copy.deepcopy(reference).requires_grad_(), wins.device
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(steps):
        pick = torch.randint(len(wins), (batch,), generator=generator).to(device)
        noise = torch.randn(batch, *wins.shape[1:], generator=generator).to(device)
        t = torch.sigmoid(1.5 + 1.2 * torch.randn(batch, generator=generator)).to(device)
        x, noise, t = (
            torch.cat([wins[pick], losses[pick]]),
            noise.repeat(2, 1, 1, 1, 1),
            t.repeat(2),
        )
        with torch.no_grad():
            ref = squared_error(reference, x, label, noise, t).chunk(2)
        now = squared_error(model, x, label, noise, t).chunk(2)
        loss = video_dpo_loss(*now, *ref, beta)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return model.requires_grad_(False), curve


@torch.no_grad()
def drift(
    model: nn.Module, reference: nn.Module, videos: Tensor, labels: Tensor, seed: int = 0
) -> float:
    """Root mean square difference of the two velocities, as a part of the reference's own."""
    noise = torch.randn(videos.shape, generator=torch.Generator().manual_seed(seed))
    noise, t = noise.to(videos.device), torch.linspace(0.05, 0.95, len(videos)).to(videos.device)
    at = t.view(-1, *[1] * (videos.dim() - 1))
    x = (1 - at) * videos + at * noise
    a, b = model(x, t, labels), reference(x, t, labels)
    return (F.mse_loss(a, b).sqrt() / b.square().mean().sqrt()).item()
