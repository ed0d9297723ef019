"""The training loop of the diffusion chapters: warm-up and cosine, clipping, a moving average."""

import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.data import average_gradients_


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What build() makes with this seed, the random state of the caller left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def cosine(step: int, steps: int, warmup: int, floor: float = 0.02) -> float:
    """The factor of the learning rate: up over `warmup` steps, down to `floor` along a cosine."""
    down = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / max(warmup, 1)) * (floor + (1 - floor) * down)


def train(
    model: nn.Module, loss_fn: Callable[[nn.Module, torch.Generator], Tensor], steps: int,
    lr: float = 3e-3, warmup: int = 100, clip: float = 1.0, ema: float = 0.995,
    weight_decay: float = 0.01, seed: int = 0, report: Callable[[int, float], None] | None = None,
    every: int = 100, group: dist.ProcessGroup | None = None,
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """Train with AdamW; (the moving average of the model, the loss of every step).

    loss_fn(model, generator) draws a batch, with the CPU generator that starts from `seed`, and
    returns its loss. report(step, mean loss) is called every `every` steps. With a group, gradients
    are averaged over its ranks: give each rank its own seed.
    """
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, betas=(0.9, 0.99), weight_decay=weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: cosine(i, steps, warmup))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, steps + 1):
        loss = loss_fn(model, generator)
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            average_gradients_(model, group)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        keep = min(ema, step / (step + 9))  # a short memory first: the start should be forgotten
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 1 - keep)
        losses.append(loss.detach())
        if report is not None and step % every == 0:
            report(step, torch.stack(losses[-every:]).mean().item())
    return average, torch.stack(losses).tolist() if losses else []
