"""Mixtures of experts as they are built today: the gate, the balance, the products, the rows sent.

T tokens of width D, E experts of inner width I, k choices per token.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.tiny import counting_batch, token_loss
from ..devices import device
from ..parallel.expert import (
    ExpertParallelMoE,
    combine,
    dispatch,
    load_balancing_loss,
    route_top_k,
)
from .expert_lm import moe_lm


def route_sigmoid(logits: Tensor, k: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Each score by itself; the bias [E] takes part in the choice and not in the weights."""
    scores = logits.sigmoid()  # [T, E]
    experts = (scores + bias).topk(k, dim=-1).indices  # [T, k]
    weights = scores.gather(-1, experts)
    return weights / weights.sum(dim=-1, keepdim=True), experts


@torch.no_grad()
def nudge_(bias: Tensor, experts: Tensor, speed: float) -> None:
    """After a step: up for experts with less than the mean load, down for those with more."""
    load = torch.bincount(experts.flatten(), minlength=len(bias)).float()
    bias += speed * torch.sign(load.mean() - load)


def router_z_loss(logits: Tensor) -> Tensor:
    """The mean square of log(sum(exp(logits))): keeps logits small, which softmax can't see."""
    return logits.logsumexp(dim=-1).square().mean()


def train_with_favourites(
    alpha: float = 0.0, speed: float = 0.0, steps: int = 40, k: int = 2
) -> tuple[list[float], list[float], Tensor]:
    """(max / mean load by step, losses, last logits) where the routers begin with two favourites.

    alpha weighs the balance loss; with a speed the gate is a sigmoid with a bias that is nudged.
    """
    model, seen = moe_lm(k=k), []
    biases = [torch.zeros(8, device=device()) for _ in model.blocks]
    for block, bias in zip(model.blocks, biases, strict=True):
        router = nn.Linear(64, 8)
        with torch.no_grad():
            router.weight.copy_(block.mlp.router.weight)
            router.bias.copy_(torch.tensor([3.0, 3.0, 0, 0, 0, 0, 0, 0]))
        router.register_forward_hook(lambda module, args, logits: seen.append(logits))
        block.mlp.router = router
        if speed:
            block.mlp.route = partial(route_sigmoid, bias=bias)
    model.to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loads, losses = [], []
    for step in range(steps):
        seen.clear()
        tokens, targets = (t.to(device()) for t in counting_batch(step))
        loss = token_loss(model(tokens), targets)
        chosen = [b.mlp.route(z, k)[1] for b, z in zip(model.blocks, seen, strict=True)]
        balance = sum(map(load_balancing_loss, seen, chosen)) / len(seen)
        optimizer.zero_grad()
        (loss + alpha * balance).backward()
        optimizer.step()
        for bias, experts in zip(biases, chosen, strict=True):
            nudge_(bias, experts, speed)
        load = torch.bincount(chosen[0].flatten(), minlength=8)  # [E]
        loads.append((load.max() / load.float().mean()).item())
        losses.append(loss.item())
    return loads, losses, seen[0].detach().cpu()


# ---- a rank's experts as one product: rows [M, D] in their order, up [E, D, I], down [E, I, D]


def one_by_one(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """A loop: two products per expert."""
    parts = zip(rows.split(counts), up, down, strict=True)
    return torch.cat([F.gelu(part @ u) @ d for part, u, d in parts])


def padded(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Two batched products; every expert gets as many rows as the fullest one."""
    x = torch.nn.utils.rnn.pad_sequence(rows.split(counts), batch_first=True)  # [E, most, D]
    y = torch.bmm(F.gelu(torch.bmm(x, up)), down)
    return torch.cat([part[:n] for part, n in zip(y, counts, strict=True)])


def grouped(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Two grouped products, told where each expert's rows end; nothing is padded."""
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


# ---- a row per rank


def once_per_rank(layer: ExpertParallelMoE, x: Tensor) -> Tensor:
    """What the layer computes, with a token sent once to each rank that has experts of its choice.

    Its weights and choices travel beside it; the rank adds up what its experts give before the
    one row comes home.
    """
    tokens, world = x.reshape(-1, x.shape[-1]), dist.get_world_size(layer.group)  # [T, D]
    mine = layer.num_experts // world
    weights, chosen = route_top_k(layer.router(tokens), layer.k)
    ranks = chosen // mine  # [T, k]
    again = [(ranks[:, :j] == ranks[:, j : j + 1]).any(dim=1) for j in range(layer.k)]
    once = ranks.masked_fill(torch.stack(again, dim=1), -1)  # a rank's further mentions dropped
    rows, state = dispatch(tokens, once, world, layer.group)  # [M, D]: "expert" is a rank here
    notes = torch.cat([weights, chosen.to(weights.dtype)], dim=1)
    notes, _ = dispatch(notes, once, world, layer.group)  # [M, 2k]
    weight, expert = notes.chunk(2, dim=1)
    local = expert.long() - dist.get_rank(layer.group) * mine  # other ranks' are out of range
    out = torch.zeros_like(rows)
    for e, module in enumerate(layer.experts):
        row, choice = (local == e).nonzero(as_tuple=True)
        out = out.index_add(0, row, module(rows[row]) * weight[row, choice, None])
    return combine(out, torch.ones_like(weights), state, layer.group).view_as(x)
