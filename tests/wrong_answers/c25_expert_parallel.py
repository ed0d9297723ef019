"""Answers to chapter 25: mistakes engineers make with experts over ranks, and right ones."""

import copy
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardbook.parallel import expert
from shardbook.parallel.expert import _AllToAllRows
from tests.wrong_answers import right, wrong

for name in ("route_top_k", "load_balancing_loss", "apply_capacity", "dispatch", "combine"):
    right(name)(getattr(expert, name))
right("ExpertParallelMoE")(expert.ExpertParallelMoE)


# route_top_k


@right("route_top_k")
def by_sorting(logits, k, normalise=True):
    p, order = logits.softmax(-1).sort(dim=-1, descending=True)
    p = p[:, :k]
    return (p / p.sum(-1, keepdim=True) if normalise else p), order[:, :k]


@wrong("route_top_k", says="weights")
def softmax_of_the_chosen(logits, k, normalise=True):
    top, experts = logits.topk(k, dim=-1)
    return top.softmax(-1), experts


@wrong("route_top_k", says="weights")
def never_normalised(logits, k, normalise=True):
    return logits.softmax(-1).topk(k, dim=-1)


@wrong("route_top_k", says="experts")
def smallest_first(logits, k, normalise=True):
    w, e = by_sorting(logits, k, normalise)
    return w.flip(-1), e.flip(-1)


@wrong("route_top_k", says="weights|off by")
def sigmoid_instead(logits, k, normalise=True):
    w, e = logits.sigmoid().topk(k, dim=-1)
    return (w / w.sum(-1, keepdim=True) if normalise else w), e


@wrong("route_top_k", says="gradient|grad")
def without_graph(logits, k, normalise=True):
    return by_sorting(logits.detach(), k, normalise)


@wrong("route_top_k", says="experts|weights")
def softmax_over_tokens(logits, k, normalise=True):
    w, e = logits.softmax(0).topk(k, dim=-1)
    return (w / w.sum(-1, keepdim=True) if normalise else w), e


# load_balancing_loss


@right("load_balancing_loss")
def from_one_hots(logits, experts):
    n = logits.shape[-1]
    share = F.one_hot(experts, n).float().mean(dim=(0, 1))
    return n * torch.dot(share, logits.softmax(-1).mean(0))


@right("load_balancing_loss")
def leaves_dropped_choices_out(logits, experts):
    return from_one_hots(logits, experts[experts >= 0][:, None])


@right("load_balancing_loss")
def dropped_choices_are_choices(logits, experts):
    n = logits.shape[-1]
    hits = (experts.flatten()[:, None] == torch.arange(n, device=experts.device)).sum(0)
    return n * (hits / experts.numel() * logits.softmax(-1).mean(0)).sum()


@wrong("load_balancing_loss", says="k=2|off by")
def sums_to_k(logits, experts):
    return from_one_hots(logits, experts) * experts.shape[1]


@wrong("load_balancing_loss", says="off by")
def forgets_the_factor(logits, experts):
    return from_one_hots(logits, experts) / logits.shape[-1]


@wrong("load_balancing_loss", says="off by")
def squares_of_the_shares(logits, experts):
    n = logits.shape[-1]
    share = F.one_hot(experts, n).float().mean(dim=(0, 1))
    return n * (share * share).sum() + 0 * logits.sum()


@wrong("load_balancing_loss", says="gradient|grad|raised")
def a_number_without_graph(logits, experts):
    return from_one_hots(logits, experts).detach()


@wrong("load_balancing_loss", says="off by")
def first_choice_only(logits, experts):
    n = logits.shape[-1]
    share = F.one_hot(experts[:, 0], n).float().mean(0)
    return n * torch.dot(share, logits.softmax(-1).mean(0))


@wrong("load_balancing_loss", says="off by")
def sums_over_tokens(logits, experts):
    return from_one_hots(logits, experts) * len(logits)


# apply_capacity


@right("apply_capacity")
def one_by_one(experts, num_experts, capacity):
    keep = torch.zeros_like(experts, dtype=torch.bool)
    room = [capacity] * num_experts
    for j in range(experts.shape[1]):
        for t, e in enumerate(experts[:, j].tolist()):
            if e >= 0 and room[e]:
                room[e] -= 1
                keep[t, j] = True
    return keep


@wrong("apply_capacity", says="differs|keep")
def token_by_token(experts, num_experts, capacity):
    flat = experts.flatten()[:, None]
    return one_by_one(flat, num_experts, capacity).view_as(experts)


@wrong("apply_capacity", says="differs|keep")
def last_come_first_kept(experts, num_experts, capacity):
    return one_by_one(experts.flip(0), num_experts, capacity).flip(0)


@wrong("apply_capacity", says="differs|keep")
def one_too_many(experts, num_experts, capacity):
    return one_by_one(experts, num_experts, capacity + 1)


@wrong("apply_capacity", says="differs|keep")
def keeps_everything(experts, num_experts, capacity):
    return torch.ones_like(experts, dtype=torch.bool)


@wrong("apply_capacity", says="dtype")
def as_numbers(experts, num_experts, capacity):
    return one_by_one(experts, num_experts, capacity).long()


@wrong("apply_capacity", says="differs|keep")
def capacity_of_each_choice(experts, num_experts, capacity):
    columns = [one_by_one(c[:, None], num_experts, capacity) for c in experts.unbind(1)]
    return torch.cat(columns, dim=1)


@wrong("apply_capacity", says="takes nobody's room.*differs")
def dropped_rows_take_room_of_expert_0(experts, num_experts, capacity):
    return one_by_one(experts.clamp(min=0), num_experts, capacity) & (experts >= 0)


@wrong("apply_capacity", says="takes nobody's room.*differs")
def dropped_rows_take_room_of_the_last_expert(experts, num_experts, capacity):
    return one_by_one(experts % num_experts, num_experts, capacity) & (experts >= 0)


# dispatch and combine: each wrong one changes a step of the right way


def _sizes(experts, num_experts, group):
    world = dist.get_world_size(group)
    if num_experts % world:
        raise ValueError(f"{num_experts} experts do not divide by {world} ranks")
    if ((experts >= num_experts) | (experts < -1)).any():
        raise ValueError(f"an expert is not one of {num_experts}")
    flat = experts.flatten()
    choices = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    sent = torch.bincount(flat[choices], minlength=num_experts)
    incoming = torch.empty_like(sent)
    dist.all_to_all_single(incoming, sent, group=group)
    return world, flat, choices, sent.view(world, -1), incoming.view(world, -1)


def _dispatch(name, sort=True, drop=True, gradient=True, counts="local", offset=0, all_rows=False):
    def answer(tokens, experts, num_experts, group=None):
        k = experts.shape[1]
        if not drop:
            experts = experts.clamp(min=0)
        if offset:
            experts = torch.where(experts >= 0, (experts + offset) % num_experts, experts)
        _, _, choices, sent, incoming = _sizes(experts, num_experts, group)
        send, receive = sent.sum(1).tolist(), incoming.sum(1).tolist()
        rows = tokens[choices // k]
        if all_rows:
            padded = tokens.new_zeros(8, tokens.shape[1])  # ranks have different numbers of tokens
            dist.all_reduce(padded, group=group)
        arrived = _AllToAllRows.apply(rows if gradient else rows.detach(), send, receive, group)
        local = torch.arange(incoming.shape[1], device=tokens.device).repeat(len(incoming))
        order = local.repeat_interleave(incoming.flatten()).argsort(stable=True)
        if not sort:
            order = torch.arange(len(order), device=order.device)
        got = arrived[order]
        per_expert = incoming.sum(0).tolist()
        if counts == "global":
            per_expert = receive
        if not gradient:
            got = got.requires_grad_()
        state = types.SimpleNamespace(
            counts=per_expert, choices=choices, shape=experts.shape, send=send, receive=receive,
            arrival=order,
        )  # fmt: skip
        return got, state

    answer.__name__ = name
    return answer


right("dispatch")(_dispatch("step_by_step"))
wrong("dispatch", says="rows of local expert|off by")(_dispatch("ordered_by_source", sort=False))
wrong("dispatch", says="counts|shape")(_dispatch("sends_dropped_rows", drop=False))
wrong("dispatch", says="gradient")(_dispatch("gradient_stays_behind", gradient=False))
wrong("dispatch", says="counts")(_dispatch("counts_by_source", counts="global"))
wrong("dispatch", says="counts|rows|shape")(_dispatch("off_by_one_expert", offset=1))
wrong("dispatch", says="moved rows|bytes")(_dispatch("also_reduces_padded_tokens", all_rows=True))


@wrong("dispatch", says="accepted|expected ValueError|raised|counts")
def rounds_experts_down(tokens, experts, num_experts, group=None):
    world = dist.get_world_size(group)
    if num_experts % world:
        return tokens, types.SimpleNamespace(counts=[len(tokens)])
    return expert.dispatch(tokens, experts, num_experts, group)


@wrong("dispatch", says="expert 8 of 8 was accepted")
def takes_any_index(tokens, experts, num_experts, group=None):
    known = experts.masked_fill(experts >= num_experts, -1)
    return expert.dispatch(tokens, known, num_experts, group)


@wrong("dispatch", says="the result carries no gradient")
def detaches_what_arrives(tokens, experts, num_experts, group=None):
    received, state = expert.dispatch(tokens, experts, num_experts, group)
    return received.detach(), state


@wrong("dispatch", says="counts|shape|bytes|raised")
def everything_stays_home(tokens, experts, num_experts, group=None):
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if num_experts % world:
        raise ValueError("experts do not divide by the ranks")
    mine = num_experts // world
    found = [(experts == rank * mine + e).any(1).nonzero()[:, 0] for e in range(mine)]
    rows = torch.cat(found)
    return tokens[rows], types.SimpleNamespace(counts=[len(f) for f in found])


def _combine(name, weigh=True, undo=True, add=True, gradient=True, mean=False, extra=False):
    def answer(outputs, weights, state, group=None):
        back = torch.empty_like(state.arrival)
        back[state.arrival] = torch.arange(len(back), device=back.device)
        rows = outputs[back] if undo else outputs
        if not gradient:
            rows = rows.detach()
        home = _AllToAllRows.apply(rows, state.receive, state.send, group)
        if extra:
            _AllToAllRows.apply(rows.detach(), state.receive, state.send, group)
        tokens, k = state.shape
        if weigh:
            home = home * weights.flatten()[state.choices][:, None]
        out = home.new_zeros(tokens, home.shape[1])
        at = state.choices // k
        out = out.index_add(0, at, home) if add else out.index_copy(0, at, home)
        return out / k if mean else out

    answer.__name__ = name
    return answer


right("combine")(_combine("back_the_same_way"))
wrong("combine", says="y on|off by")(_combine("forgets_the_weights", weigh=False))
wrong("combine", says="y on|off by")(_combine("in_order_of_arrival", undo=False))
wrong("combine", says="y on|off by")(_combine("last_choice_wins", add=False))
wrong("combine", says="gradient")(_combine("no_gradient_home", gradient=False))
wrong("combine", says="y on|off by")(_combine("mean_of_the_choices", mean=True))
wrong("combine", says="bytes")(_combine("sends_twice", extra=True))


# ExpertParallelMoE


@right("ExpertParallelMoE")
class WithFunctionalExperts(nn.Module):
    """The same layer from parts, with the router applied last."""

    def __init__(self, router, experts, k, group=None):
        super().__init__()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if len(experts) % world:
            raise ValueError(f"{len(experts)} experts can't be shared evenly by {world} ranks")
        per = len(experts) // world
        self.total, self.k, self.group = len(experts), k, group
        self.mine = nn.ModuleList(experts[rank * per :][:per])
        self.router = router

    def forward(self, x):
        flat = x.flatten(0, -2)
        p = self.router(flat).softmax(-1)
        w, e = p.topk(self.k, -1)
        rows, state = expert.dispatch(flat, e, self.total, self.group)
        done, at = [], 0
        for module, n in zip(self.mine, state.counts, strict=True):
            done.append(module(rows[at : at + n]))
            at += n
        w = w / w.sum(-1, keepdim=True)
        return expert.combine(torch.cat(done), w, state, self.group).unflatten(0, x.shape[:-1])


class _Base(expert.ExpertParallelMoE):
    pass


@wrong("ExpertParallelMoE", says="parameters|number")
class KeepsAllExperts(_Base):
    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, k, group)
        self.all_experts = nn.ModuleList(experts)


@wrong("ExpertParallelMoE", says="frozen parameters.*is 0, expected")
class TrainsWhatWasFrozen(_Base):
    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, k, group)
        self.experts.requires_grad_(True)


@wrong("ExpertParallelMoE", says="in memory")
class KeepsTheListOfExperts(_Base):
    """Registers its own experts only, and keeps the others alive all the same."""

    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, k, group)
        self.all_experts = experts  # a plain list: parameters() does not see it


@wrong("ExpertParallelMoE", says="bytes in memory")
class CopiesTheListOfExperts(_Base):
    """Copies of all experts in a plain list: neither parameters() nor the originals show them."""

    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, k, group)
        self.spare = [copy.deepcopy(expert) for expert in experts]


@wrong("ExpertParallelMoE", says="y on|off by")
class TheNextRanksExperts(_Base):
    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, k, group)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        mine, owner = len(experts) // world, (rank + 1) % world
        if world > 1:
            self.experts = nn.ModuleList(experts[owner * mine : (owner + 1) * mine])


@wrong("ExpertParallelMoE", says="gradient")
class ScalesExpertGradients(_Base):
    def forward(self, x):
        y = super().forward(x)
        world = dist.get_world_size(self.group)
        for p in self.experts.parameters():
            if p.grad is None and world > 1:
                p.register_hook(lambda g, w=world: g / w)
        return y


@wrong("ExpertParallelMoE", says="router|gradient")
class RouterWithoutGradient(_Base):
    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = expert.route_top_k(self.router(tokens), self.k)
        received, state = expert.dispatch(tokens, chosen, self.num_experts, self.group)
        parts = received.split(state.counts)
        out = torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)])
        return expert.combine(out, weights.detach(), state, self.group).view_as(x)


@wrong("ExpertParallelMoE", says="y on|off by")
class FirstChoiceOnly(_Base):
    def __init__(self, router, experts, k, group=None):
        super().__init__(router, experts, 1, group)


@wrong("ExpertParallelMoE", says="y on|off by|gradient")
class LocalExpertsOnly(_Base):
    """No communication: each token goes through the experts that happen to be here."""

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return sum(share[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


@wrong("ExpertParallelMoE", says="accepted|expected ValueError")
class DropsTheRest(nn.Module):
    def __new__(cls, router, experts, k, group=None):
        world = dist.get_world_size(group)
        if len(experts) % world:
            return nn.Identity()
        return expert.ExpertParallelMoE(router, experts, k, group)


# what only a second look shows: evaluation, other choices, other dtypes, the way back


class _RowsThatGatherBack(torch.autograd.Function):
    """_AllToAllRows whose gradient all-gathers everything before it sends what is needed."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.args = send, receive, group
        return _AllToAllRows.apply(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        send, receive, group = ctx.args
        pad = grad.new_zeros(64, *grad.shape[1:])
        pad[: len(grad)] = grad
        dist.all_gather([torch.empty_like(pad) for _ in send], pad, group=group)
        return _AllToAllRows.apply(grad, receive, send, group), None, None, None


class _RowsInFp32(_RowsThatGatherBack):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.args = send, receive, group
        return _AllToAllRows.apply(x.float(), send, receive, group)


def with_rows(fn, rows):
    """A function of the reference whose rows travel by other means."""
    scope = vars(expert) | {"_AllToAllRows": rows}
    return types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)


wrong("dispatch", says="backward.*expected an all-to-all")(
    with_rows(expert.dispatch, _RowsThatGatherBack)
)
wrong("combine", says="backward.*expected an all-to-all")(
    with_rows(expert.combine, _RowsThatGatherBack)
)
wrong("dispatch", says="bfloat16.*are torch.float32.*(?s:.*)dtype of the tokens")(
    with_rows(expert.dispatch, _RowsInFp32)
)


BUFFERS: dict = {}


def _into_a_kept_buffer(x):
    kept = BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return kept.copy_(x)


@wrong("dispatch", says="a second call changed what the first one gave.*(?s:.*)a new one")
def receives_into_a_kept_buffer(tokens, experts, num_experts, group=None):
    rows, state = expert.dispatch(tokens, experts, num_experts, group)
    return (rows if rows.requires_grad else _into_a_kept_buffer(rows)), state


@wrong("combine", says="a second call changed what the first one gave.*(?s:.*)a new one")
def adds_up_in_a_kept_buffer(outputs, weights, state, group=None):
    y = expert.combine(outputs, weights, state, group)
    return y if y.requires_grad else _into_a_kept_buffer(y)


@wrong("route_top_k", says="in float64.*(?s:.*)a cast to fp32")
def routes_in_fp32(logits, k, normalise=True):
    weights, experts = by_sorting(logits.float(), k, normalise)
    return weights.to(logits.dtype), experts


@wrong("dispatch", says="rows of local expert.*without gradients")
def flipped_without_gradients(tokens, experts, num_experts, group=None):
    received, state = expert.dispatch(tokens, experts, num_experts, group)
    return (received if tokens.requires_grad else received.flip(0)), state


@wrong("dispatch", says="1 choices|shape.*k")
def two_choices_only(tokens, experts, num_experts, group=None):
    if experts.shape[1] != 2:
        tokens = tokens * 0
    return expert.dispatch(tokens, experts, num_experts, group)


@wrong("combine", says="3 choices")
def at_most_two_choices(outputs, weights, state, group=None):
    weights = weights.clone()
    weights[:, 2:] = 0
    return expert.combine(outputs, weights, state, group)


class _Layer(expert.ExpertParallelMoE):
    def route(self, x):
        return expert.route_top_k(self.router(x), self.k)

    def forward(self, x):
        weights, chosen = self.route(x)
        received, state = expert.dispatch(x, chosen, self.num_experts, self.group)
        parts = zip(self.experts, received.split(state.counts), strict=True)
        outputs = torch.cat([e(rows) for e, rows in parts])
        self.note(x, outputs)
        return expert.combine(outputs, weights, state, self.group)

    def note(self, x, outputs):
        pass


@wrong("ExpertParallelMoE", says="without gradients")
class OnlyInTraining(_Layer):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else x


@wrong("ExpertParallelMoE", says="1 choices")
class AlwaysTwoChoices(_Layer):
    def route(self, x):
        return expert.route_top_k(self.router(x), 2)


@wrong("ExpertParallelMoE", says="second call")
class RoutesOnce(_Layer):
    def route(self, x):
        if not hasattr(self, "chosen"):
            self.chosen = super().route(x)[1]
        weights = self.router(x).softmax(-1).gather(1, self.chosen)
        return weights / weights.sum(-1, keepdim=True), self.chosen


@wrong("ExpertParallelMoE", says="still holds the tokens of 6 of 6 calls")
class KeepsHistory(_Layer):
    def note(self, x, outputs):
        self.__dict__.setdefault("history", []).append((x, outputs))


@right("ExpertParallelMoE")
class KeepsTheLastCall(_Layer):
    def note(self, x, outputs):
        self.last = x


@wrong("ExpertParallelMoE", says="only routed rows travel")
class EveryTokenToEveryExpert(_Layer):
    def route(self, x):
        weights, chosen = super().route(x)
        everyone = torch.arange(self.num_experts, device=x.device).repeat(len(x), 1)
        return torch.zeros_like(everyone, dtype=x.dtype).scatter(1, chosen, weights), everyone


class _GatherAll(torch.autograd.Function):
    """Every rank's rows, padded; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.rows, ctx.group = len(x), group
        pad = x.new_zeros(8, x.shape[1])
        pad[: len(x)] = x
        out = [torch.empty_like(pad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, pad, group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.view(-1, 8, grad.shape[1])[dist.get_rank(ctx.group), : ctx.rows], None


class _SumAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group):
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x.view(-1, 8, x.shape[1])[dist.get_rank(group), :rows].clone()

    @staticmethod
    def backward(ctx, grad):
        return _GatherAll.apply(grad, ctx.group), None, None


@wrong("ExpertParallelMoE", says="all_gather.*expected an all-to-all")
class GathersEverything(expert.ExpertParallelMoE):
    def forward(self, x):
        weights, chosen = expert.route_top_k(self.router(x), self.k)
        share = x.new_zeros(len(x), self.num_experts).scatter(1, chosen, weights)
        every, shares = _GatherAll.apply(x, self.group), _GatherAll.apply(share, self.group)
        first = dist.get_rank(self.group) * len(self.experts)
        y = sum(shares[:, first + i, None] * e(every) for i, e in enumerate(self.experts))
        return _SumAll.apply(y, len(x), self.group)
