"""The small language model with experts in place of its MLPs: in one process and over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..basics.tiny import MLP, TinyLM, tiny_lm
from ..parallel.data import average_gradients_
from ..parallel.expert import ExpertParallelMoE, Group, route_top_k


class MoE(nn.Module):
    """Top-k experts in one process, a loop over all of them: x [..., D] -> [..., D]."""

    def __init__(self, router: nn.Module, experts: list[nn.Module], k: int):
        super().__init__()
        self.router, self.experts, self.k = router, nn.ModuleList(experts), k
        self.route = route_top_k  # (logits [T, E], k) -> weights and experts [T, k]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # [T, D]
        weights, chosen = self.route(self.router(tokens), self.k)  # [T, k]
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, choice = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, choice, None])
        return out.view_as(x)


def moe_lm(
    num_experts: int = 8, k: int = 2, hidden: int = 128, seed: int = 0, **sizes: int
) -> TinyLM:
    """tiny_lm with a MoE in every block; weights depend on the seed only."""
    model = tiny_lm(seed, **sizes)
    dim = model.embed.embedding_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for block in model.blocks:
            router = nn.Linear(dim, num_experts, bias=False)
            block.mlp = MoE(router, [MLP(dim, hidden) for _ in range(num_experts)], k)
    return model


def expert_parallel_(model: TinyLM, group: Group = None) -> TinyLM:
    """Replace every MoE by one that keeps this rank's experts; all else stays whole."""
    for block in model.blocks:
        moe = block.mlp
        block.mlp = ExpertParallelMoE(moe.router, list(moe.experts), moe.k, group)
    return model


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to an expert."""
    return "experts" in name.split(".")


def expert_groups(expert_ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(ranks that share one set of experts, ranks that hold the same experts as this one).

    Neighbours share: with 4 ranks and expert_ranks=2, {0, 1} and {2, 3} hold all experts each,
    and {0, 2} and {1, 3} hold copies. ValueError where the ranks do not divide.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % expert_ranks:
        raise ValueError(f"{world} ranks do not divide into groups of {expert_ranks}")
    sharing = [
        dist.new_group(list(range(first, first + expert_ranks)))
        for first in range(0, world, expert_ranks)
    ]
    copies = [dist.new_group(list(range(i, world, expert_ranks))) for i in range(expert_ranks)]
    return sharing[rank // expert_ranks], copies[rank % expert_ranks]


@torch.no_grad()
def average_moe_gradients_(model: nn.Module, copies: Group) -> None:
    """The gradient of the mean of all ranks' losses, for the whole layers and for the experts.

    An expert's gradient came back through the all-to-all already summed over the ranks that share
    it: the mean over `copies` is that many times too large (databricks/megablocks#86).
    """
    whole = [p for name, p in model.named_parameters() if not is_expert(name)]
    experts = [p for name, p in model.named_parameters() if is_expert(name)]
    average_gradients_(nn.ParameterList(whole))
    average_gradients_(nn.ParameterList(experts), copies)
    sharing = dist.get_world_size() // dist.get_world_size(copies)
    for p in experts:
        if p.grad is not None:
            p.grad /= sharing
