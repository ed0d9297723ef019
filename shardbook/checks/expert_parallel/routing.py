"""Chapter 25, routing, on one rank: who goes where, and who finds room."""

import torch
from torch import Tensor

from ..compare import random, widest
from ..functions import called
from ..report import check
from ..wrong import hints


def _routed(logits: Tensor, k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    experts = logits.argsort(dim=-1, descending=True)[:, :k]
    weights = logits.double().softmax(-1).gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True) if normalise else weights
    return weights.to(logits.dtype), experts


@check("route_top_k")
def route_top_k(answer, report):
    """Softmax over all experts, then top k."""
    logits = random(9, 7, seed=1) * 3
    it = report.function(answer, _routed, names=("the weights", "the experts"))
    weights = it.only(0)
    it.only(1).value(
        "the k largest logits' experts, largest first",
        *((logits, k) for k in (1, 2, 5)),
        hint="top k of the softmax over ALL experts",
    )
    weights.value(
        "normalised, a token's weights sum to 1 and keep their proportions",
        *((logits, k, True) for k in (1, 2, 5, 7)),
        (logits[:1, :1], 1),
        hint="divide the chosen probabilities by their sum",
    )
    weights.value(
        "not normalised, they are the probabilities over all experts",
        *((logits, k, False) for k in (1, 3)),
        hint="softmax first, top k after it: softmax of the chosen logits alone is something else",
    )
    weights.value(
        "logits in float64 give weights in float64",
        *((logits.to(widest()) / 3, 3, normalise) for normalise in (True, False)),
        tolerance=1e-12 if widest() == torch.float64 else 1e-5,
        hint="softmax in the dtype of the logits: a cast to fp32 keeps 7 digits",
    )
    weights.gradient(
        "gradients reach all logits of a token",
        *((logits, 2, normalise) for normalise in (True, False)),
        hint="weights must stay part of the graph",
    )


def _balance(logits: Tensor, experts: Tensor) -> Tensor:
    count = torch.zeros(logits.shape[1], dtype=torch.float64)
    for e in experts.flatten().tolist():
        count[e] += 1 / experts.numel()
    return (logits.shape[1] * (count * logits.double().softmax(-1).mean(0)).sum()).to(logits.dtype)


def _some(num_experts: int, *shape: int, seed: int) -> Tensor:
    """Experts, drawn."""
    return (random(*shape, seed=seed) * 10).long().abs() % num_experts


@check("load_balancing_loss")
def load_balancing_loss(answer, report):
    """Switch Transformer's auxiliary loss."""
    logits = random(10, 6, seed=3)
    it = report.function(lambda *args: answer(*args).reshape(()), _balance, what="the loss")
    it.value(
        "E times the sum of (share of the choices) x (mean probability)",
        *(called(f"for k={k}", logits, _some(6, 10, k, seed=k)) for k in (1, 2, 3)),
        called("for one token and one expert", logits[:1, :1], torch.zeros(1, 1).long()),
        hint="the share counts all T k choices and divides by their number; the mean probability "
        "is over all tokens, chosen or not",
    )
    it.value(
        "1.0 at perfect balance, for any k",
        *(
            called(f"for k={k}", torch.zeros(12, 6), torch.arange(12 * k).view(12, k) % 6)
            for k in (1, 2, 3)
        ),
        oracle=lambda *_: torch.tensor(1.0),
        hint="with k choices a token the shares must still sum to 1",
    )
    it.gradient(
        "its gradient flows through the probabilities",
        (logits, _some(6, 10, 2, seed=4)),
        hint="counts have no gradient, probabilities do",
    )


def _keep(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    room = [capacity] * num_experts
    keep = torch.zeros(experts.shape, dtype=torch.bool)
    for choice in range(experts.shape[1]):
        for token in range(experts.shape[0]):
            e = int(experts[token, choice])
            if e >= 0 and room[e] > 0:
                room[e] -= 1
                keep[token, choice] = True
    return keep


@check("apply_capacity")
def apply_capacity(answer, report):
    """First come, first kept."""

    def filled(k: int, tokens: int, *capacities: int, dropped: bool = False) -> list:
        made = []
        for capacity in capacities:
            experts = _some(5, tokens, k, seed=tokens + k)
            if dropped:
                experts = experts.masked_fill(random(tokens, k, seed=capacity) > 0.3, -1)
            made.append(called(f"at a capacity of {capacity}", experts, 5, capacity))
        return made

    each = (1, 2, 4, 50)
    it = report.function(answer, _keep, what="keep")
    it.value(
        "an expert keeps its first `capacity` rows, in token order",
        *filled(1, 11, *each),
        *filled(1, 1, 1),
        hint=hints(
            "count, for every choice, how many earlier ones went to the same expert",
            dtype="keep is a mask: its dtype is torch.bool",
        ),
    )
    it.value(
        "every first choice comes before any second choice",
        *filled(2, 9, *each),
        *filled(3, 13, *each),
        hint="go through the choices column by column, not token by token",
    )
    it.value(
        "an expert of -1 is never kept and takes nobody's room",
        *(c for k, n in ((1, 11), (2, 9), (3, 13)) for c in filled(k, n, *each, dropped=True)),
        hint="-1 is no expert: counted as expert 0, or as the last, it takes the room of another",
    )
    it.value(
        "a capacity of 0 keeps nothing, and the input stays as it was",
        *filled(2, 9, 0),
        hint="work on counts of your own",
    )
