"""Expert parallelism beyond the checks: transformers' Mixtral, whole models, groups, traps."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, token_loss
from shardbook.memory import storage_bytes
from shardbook.parallel.expert import (
    ExpertParallelMoE,
    apply_capacity,
    combine,
    dispatch,
    load_balancing_loss,
    route_top_k,
)
from shardbook.studies.expert_lm import (
    MoE,
    average_moe_gradients_,
    expert_groups,
    expert_parallel_,
    is_expert,
    moe_lm,
)
from shardbook.studies.moe_today import (
    grouped,
    nudge_,
    once_per_rank,
    one_by_one,
    padded,
    route_sigmoid,
)

# ---- transformers' Mixtral


class Gated(nn.Module):
    """One of Mixtral's experts, whose weights transformers fuses over the experts."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


def over_ranks(router, gate_up, down, x, pull, k):
    """y, dx, the router's and the experts' gradients, and the bytes of weights of this rank."""
    linear = nn.Linear(*router.shape[::-1], bias=False)
    linear.weight = nn.Parameter(router)
    experts = [Gated(g.clone(), d.clone()) for g, d in zip(gate_up, down, strict=True)]
    layer = ExpertParallelMoE(linear, experts, k).to(sb.device())
    x, pull = (t.chunk(dist.get_world_size())[dist.get_rank()].to(sb.device()) for t in (x, pull))
    y = layer(x.requires_grad_())
    (y * pull).sum().backward()
    own = [torch.stack([getattr(e, n).grad for e in layer.experts]) for n in ("gate_up", "down")]
    found = [y.detach(), x.grad, layer.router.weight.grad, *own]
    return [t.cpu() for t in found], storage_bytes(layer.parameters())


@pytest.mark.parametrize("world_size", [2, 4])
def test_layer_equals_transformers_mixtral(world_size):
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    k = 3
    config = MixtralConfig(
        hidden_size=20,
        intermediate_size=36,
        num_local_experts=8,
        num_experts_per_tok=k,
        experts_implementation="eager",
    )
    torch.manual_seed(4)
    theirs = MixtralSparseMoeBlock(config)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    weights = [theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj]
    x, pull = torch.randn(4, 9, 20), torch.randn(4, 9, 20)
    leaf = x.clone().requires_grad_()
    y = theirs(leaf)
    (y * pull).sum().backward()

    copies = [w.detach().clone() for w in weights]
    found = sb.run(over_ranks, *copies, x, pull, k, world_size=world_size).values
    y_, dx, router, gate_up, down = (list(t) for t in zip(*(f[0] for f in found), strict=True))
    for name, ours, want in (
        ("y", torch.cat(y_), y.detach()),
        ("dx", torch.cat(dx), leaf.grad),
        ("router", sum(router), weights[0].grad),
        ("gate_up", torch.cat(gate_up), weights[1].grad),
        ("down", torch.cat(down), weights[2].grad),
    ):
        # fp32, rows added up in another order
        error = (ours - want).abs().max() / want.abs().max()
        assert error < 1e-5, f"{name} is off by {error}"
    expert_bytes = 4 * (2 * 36 * 20 + 36 * 20)
    assert [held for _, held in found] == [4 * 8 * 20 + 8 // world_size * expert_bytes] * world_size


@pytest.mark.parametrize("k", [1, 2, 3])
def test_transformers_balance_loss_is_k_times_ours(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(31, 6, generator=torch.Generator().manual_seed(k))
    theirs = load_balancing_loss_func((logits,), num_experts=6, top_k=k)
    ours = load_balancing_loss(logits, route_top_k(logits, k)[1])
    assert theirs.item() == pytest.approx(k * ours.item(), rel=1e-5)


# ---- routing, any input


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 12),
    experts=st.integers(2, 9),
    seed=st.integers(0, 99),
    capacity=st.integers(0, 6),
    data=st.data(),
)
def test_capacity_bounds_every_expert_and_wastes_no_room(tokens, experts, seed, capacity, data):
    k = data.draw(st.integers(1, min(experts, 3)))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    chosen = route_top_k(logits, k)[1]
    keep = apply_capacity(chosen, experts, capacity)
    asked = torch.bincount(chosen.flatten(), minlength=experts)
    kept = torch.bincount(chosen[keep], minlength=experts)
    assert torch.equal(kept, asked.clamp(max=capacity))


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 12), experts=st.integers(2, 9), seed=st.integers(0, 99))
def test_even_probabilities_are_perfect_balance(tokens, experts, seed):
    chosen = torch.randint(
        experts, (tokens, 2), generator=torch.Generator().manual_seed(seed)
    )  # whatever was chosen, equal probabilities give 1
    assert load_balancing_loss(torch.zeros(tokens, experts), chosen).item() == pytest.approx(1)


# ---- over ranks


def there_and_back(k):
    """Rows go out and come home unchanged: y / sum of weights is x. And the calls it took."""
    rank = dist.get_rank()
    tokens = (6, 0, 11)[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 7, generator=generator).to(sb.device())
    experts = torch.randint(-1, 9, (tokens, k), generator=generator).to(sb.device())
    with calls.record() as log:
        received, state = dispatch(x, experts, 9)
        y = combine(received, torch.ones(tokens, k, device=sb.device()), state)
    kept = (experts >= 0).sum(dim=1, keepdim=True)
    return torch.equal(y.cpu(), (x * kept).cpu()), int(kept.sum()), len(received), list(log)


@pytest.mark.parametrize("k", [1, 2])
def test_dispatch_then_combine_is_the_identity_and_sends_routed_rows_only(k):
    values = sb.run(there_and_back, k, world_size=3).values
    assert sum(sent for _, sent, _, _ in values) == sum(got for _, _, got, _ in values)
    for equal, sent, got, log in values:
        if k == 1:  # one addend: exact
            assert equal
        assert [c.op for c in log] == ["all_to_all"] * 3
        assert [c.nbytes for c in log] == [9 * 8, sent * 7 * 4, got * 7 * 4]


def train(sharing, steps=5):
    """A few steps of SGD, because Adam would hide a wrong scale of the experts' gradients."""
    model, rank, world = moe_lm().to(sb.device()), dist.get_rank(), dist.get_world_size()
    if sharing:
        experts, copies = expert_groups(sharing)
        expert_parallel_(model, experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        tokens, targets = (t.chunk(world)[rank].to(sb.device()) for t in counting_batch(step % 2))
        loss = token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        if sharing:
            average_moe_gradients_(model, copies)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    sums = {
        n: p.detach().cpu().double().sum().item()
        for n, p in model.named_parameters()
        if "experts" not in n
    }
    return (losses / world).tolist(), sums, sum(p.numel() for p in model.parameters())


def test_training_equals_one_process_for_every_way_to_share():
    ((one, weights, params),) = sb.run(train, 0, world_size=1).values
    assert one[0] - one[-1] > 0.1, "the model learns in these steps"
    expert = sum(p.numel() for n, p in moe_lm().named_parameters() if is_expert(n))
    for sharing in (4, 2, 1):
        for losses, sums, held in sb.run(train, sharing, world_size=4).values:
            assert losses == pytest.approx(one, abs=1e-5)
            assert sums == pytest.approx(weights, abs=1e-3)  # sums of up to 12k weights in fp32
            assert held == params - expert + expert // sharing


def groups_of(sharing):
    experts, copies = expert_groups(sharing)
    return dist.get_process_group_ranks(experts), dist.get_process_group_ranks(copies)


def test_expert_groups():
    assert sb.run(groups_of, 2, world_size=4).values == [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 3]),
        ([2, 3], [0, 2]),
        ([2, 3], [1, 3]),
    ]
    with pytest.raises(sb.RankError, match="3 ranks do not divide into groups of 2"):
        sb.run(groups_of, 2, world_size=3, echo=False)


def idle_gradients():
    """All tokens of all ranks go to expert 0: the other experts' gradients are zero, not None."""
    moe = moe_lm(num_experts=4).blocks[0].mlp
    router = nn.Linear(64, 4)
    with torch.no_grad():
        router.bias.copy_(torch.tensor([50.0, 0, 0, 0]))
    layer = ExpertParallelMoE(router, list(moe.experts), 1).to(sb.device())
    layer(torch.randn(3, 64).to(sb.device())).sum().backward()
    return [p.grad.abs().sum().item() for p in layer.experts.parameters()]


def test_an_expert_without_tokens_has_a_zero_gradient():
    first, *others = sb.run(idle_gradients, world_size=4).values
    assert min(first) > 0
    assert others == [[0.0] * 4] * 3


def test_single_process_moe_is_the_sum_over_chosen_experts():
    torch.manual_seed(0)
    moe = moe_lm(num_experts=4, k=2).blocks[0].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(2, 5, 64)
    weights, chosen = route_top_k(moe.router(x.flatten(0, 1)), 2)
    every = torch.stack([e(x.flatten(0, 1)) for e in moe.experts])  # [E, T, D]
    want = sum(
        weights[:, j, None] * every[chosen[:, j], torch.arange(len(chosen))] for j in range(2)
    )
    torch.testing.assert_close(moe(x), want.view_as(x), rtol=1e-5, atol=1e-5)


# ---- as they are built today


def test_a_dropped_choice_counts_for_no_expert():
    logits, experts = torch.randn(6, 4), torch.tensor([[0], [1], [2], [3], [-1], [-1]])
    share, probability = torch.tensor([1.0, 1, 1, 1]) / 6, logits.softmax(-1).mean(0)
    expected = 4 * (share * probability).sum()
    torch.testing.assert_close(load_balancing_loss(logits, experts), expected)


def test_the_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, experts = route_sigmoid(logits, 2, torch.tensor([0.0, 0, 0, 1]))
    assert experts.tolist() == [[3, 0]]
    scores = logits.sigmoid()[0, [3, 0]]
    torch.testing.assert_close(weights[0], scores / scores.sum())
    bias = torch.zeros(4)
    nudge_(bias, torch.tensor([[0, 1], [0, 1], [0, 2]]), 0.5)  # loads 3, 2, 1, 0; mean 1.5
    assert bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_three_ways_to_multiply_are_one():
    generator = torch.Generator().manual_seed(0)
    counts = [3, 0, 7, 1]
    rows = torch.randn(11, 16, generator=generator)
    up = torch.randn(4, 16, 24, generator=generator)
    down = torch.randn(4, 24, 16, generator=generator)
    wanted = one_by_one(rows, counts, up, down)
    for way in (padded, grouped):
        torch.testing.assert_close(way(rows, counts, up, down), wanted, rtol=1e-4, atol=1e-3)


def sent_once():
    """Both layers' outputs and gradients, and the bytes of rows each hands over."""
    moe = moe_lm(16, k=6, hidden=16).blocks[0].mlp.to(sb.device())
    layer = ExpertParallelMoE(moe.router, list(moe.experts), moe.k)
    found = []
    for way in (layer, lambda x: once_per_rank(layer, x)):
        layer.zero_grad()
        x = torch.randn(9 + dist.get_rank(), 64, generator=torch.Generator().manual_seed(5))
        x = x.to(sb.device()).requires_grad_()
        with calls.record() as log:
            y = way(x)
        y.square().sum().backward()
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        rows = sum(c.nbytes for c in log if c.dtype.is_floating_point and c.shape[-1] == 64)
        found.append(([t.detach().cpu() for t in (y, *grads)], rows))
    return found


def test_a_row_once_per_rank_gives_the_same():
    ranks = sb.run(sent_once, world_size=2).values
    for (wanted, _), (got, _) in ranks:
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    many, few = (sum(rank[way][1] for rank in ranks) for way in (0, 1))
    assert 0 < few <= many * 2 / 6, "at most one row for each of two ranks, of six choices"
