"""Mixture of experts: who goes to which expert, and experts spread over the ranks.

T tokens of width D, E experts, k choices a token. Rank r owns experts r E/P to (r+1) E/P - 1.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .group import Group


def route_top_k(logits: Tensor, k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] and experts [T, k]: softmax over all, then the k largest.

    normalise makes a token's weights sum to 1 (Mixtral, arXiv 2401.04088); without it they keep
    the share that the experts not chosen took.
    """
    experts = logits.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}, expected 1 to {experts}, the number of experts")
    weights, chosen = logits.softmax(dim=-1).topk(k, dim=-1)  # [T, k]
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def load_balancing_loss(logits: Tensor, experts: Tensor) -> Tensor:
    """E * sum over experts of f_e * p_e (Switch Transformer, arXiv 2101.03961), a scalar.

    f_e is the share of the T k choices that went to expert e (it carries no gradient), p_e the
    mean router probability. 1.0 at perfect balance for any k. A dropped choice, -1, counts as one
    of the T k and for no expert.
    """
    num_experts = logits.shape[-1]
    counts = torch.bincount(experts.flatten() + 1, minlength=num_experts + 1)[1:]  # [E], without -1
    share = counts.to(logits.dtype) / experts.numel()  # [E]
    return num_experts * (share * logits.softmax(dim=-1).mean(dim=0)).sum()


def apply_capacity(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """experts [T, k] -> keep [T, k] bool: an expert takes `capacity` rows, first come, first kept.

    In token order, and every token's first choice comes before any second choice.
    """
    order = experts.t().flatten()  # [k*T]: all first choices, then all second ones
    hits = F.one_hot(order.clamp(min=0), num_experts) * (order >= 0)[:, None]  # [k*T, E]
    place = (hits.cumsum(dim=0) * hits).sum(dim=1)  # 1 for the first row of its expert
    keep = (place <= capacity) & (order >= 0)
    return keep.unflatten(0, (experts.shape[1], -1)).t()


# ---- tokens travel to their experts and back


class _AllToAllRows(torch.autograd.Function):
    """Rows to the ranks, as many as each takes; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = _AllToAllRows.apply(grad, ctx.receive, ctx.send, ctx.group)
        return back, None, None, None


@dataclasses.dataclass
class Dispatched:
    """What `combine` needs to bring the rows back, and how many each local expert got."""

    counts: list[int]  # rows per local expert, as `received` is ordered
    choices: Tensor  # [N]: token * k + choice of each row sent, in the order it was sent
    shape: torch.Size  # of experts: [T, k]
    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each rank
    arrival: Tensor  # [M]: where each row of `received` stood when it arrived


def dispatch(
    tokens: Tensor, experts: Tensor, num_experts: int, group: Group = None
) -> tuple[Tensor, Dispatched]:
    """Send each token to its experts: tokens [T, D], experts [T, k] -> received [M, D].

    An expert of -1 is dropped. Only routed rows travel: one small all-to-all of counts, then the
    rows. `received` is ordered by local expert, inside one by source rank. ValueError where the
    experts do not divide by the ranks, or an index is out of range.
    """
    world = dist.get_world_size(group)
    if num_experts % world:
        raise ValueError(f"{num_experts} experts do not divide by {world} ranks")
    if experts.numel() and int(experts.max()) >= num_experts:
        raise ValueError(f"expert {int(experts.max())} does not exist: there are {num_experts}")
    k = experts.shape[1]
    flat = experts.flatten()  # [T*k]
    choices = flat.argsort(stable=True)  # by expert, so by rank; inside one in token order
    choices = choices[int((flat < 0).sum()) :]  # the dropped ones come first
    sent = torch.bincount(flat[choices], minlength=num_experts)  # [E] rows to each expert
    incoming = torch.empty_like(sent)
    dist.all_to_all_single(incoming, sent, group=group)  # [P*E/P]: by source, by local expert
    send = sent.unflatten(0, (world, -1)).sum(dim=1).tolist()
    incoming = incoming.unflatten(0, (world, -1))  # [P, E/P]
    receive = incoming.sum(dim=1).tolist()

    arrived = _AllToAllRows.apply(tokens[choices // k], send, receive, group)  # [M, D]
    local = torch.arange(num_experts // world, device=tokens.device).repeat(world)
    arrival = local.repeat_interleave(incoming.flatten()).argsort(stable=True)  # by expert
    counts = incoming.sum(dim=0).tolist()
    state = Dispatched(counts, choices, experts.shape, send, receive, arrival)
    return arrived[arrival], state


def combine(outputs: Tensor, weights: Tensor, state: Dispatched, group: Group = None) -> Tensor:
    """Bring the experts' outputs [M, D] home and add them up by weight: [T, D]."""
    back = torch.empty_like(state.arrival)
    back[state.arrival] = torch.arange(len(back), device=back.device)
    rows = _AllToAllRows.apply(outputs[back], state.receive, state.send, group)  # [N, D]
    tokens, k = state.shape
    weighted = rows * weights.flatten()[state.choices][:, None]  # fp32 weights make fp32 sums
    y = weighted.new_zeros(tokens, rows.shape[1]).index_add(0, state.choices // k, weighted)
    return y.to(rows.dtype)


class ExpertParallelMoE(nn.Module):
    """Top-k experts spread over the ranks: x [..., D] -> [..., D] on this rank's own tokens.

    Built from a full router (D -> E) and the full list of experts, the same on every rank; keeps
    the router and its own experts only. An expert's gradient is the sum over all ranks' tokens
    and is complete where it lives; the router's is this rank's share, to be summed over ranks.
    ValueError, when it is made, where the experts do not divide by the ranks.
    """

    def __init__(self, router: nn.Module, experts: list[nn.Module], k: int, group: Group = None):
        super().__init__()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if len(experts) % world:
            raise ValueError(f"{len(experts)} experts do not divide by {world} ranks")
        mine = len(experts) // world
        self.router, self.k, self.group, self.num_experts = router, k, group, len(experts)
        self.experts = nn.ModuleList(experts[rank * mine : (rank + 1) * mine])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # [T, D]
        weights, chosen = route_top_k(self.router(tokens), self.k)
        received, state = dispatch(tokens, chosen, self.num_experts, self.group)
        parts = received.split(state.counts)
        # an expert without tokens still runs on its empty part, so no rank leaves backward early
        outputs = torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])
        return combine(outputs, weights, state, self.group).view_as(x)
