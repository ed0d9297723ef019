"""Chapter 25: mixture of experts, judged token by token against a dense loop."""

import copy
import gc
import types
import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import calls
from ..devices import device
from .compare import all_close, close, expect, random, refuses, same, unchanged, widest
from .groups import held, last_ranks
from .report import check
from .wrong import hints

SIZES = (1, 2, 3, 4)  # group sizes; the groups are the last ranks, so their first is not rank 0
E, D, K = 12, 5, 2  # experts, width, choices
TOKENS = (3, 7, 0, 2)  # tokens of each rank in a group: uneven, one rank has none


# ---- routing, on one rank


@check("route_top_k")
def route_top_k(answer, report):
    """Softmax over all experts, then top k."""
    logits = random(9, 7, seed=1) * 3
    share = logits.double().softmax(-1)
    with report.property(
        "the k largest logits' experts, largest first",
        hint="top k of the softmax over ALL experts",
    ):
        for k in (1, 2, 5):
            with unchanged("route_top_k", logits):
                weights, experts = answer(logits.to(device()), k)
            want = logits.argsort(dim=-1, descending=True)[:, :k]
            close(experts, want, f"the experts for k={k}", 0.0)
            same(tuple(weights.shape), (9, k), "the shape of the weights")
    with report.property(
        "normalised, a token's weights sum to 1 and keep their proportions",
        hint="divide the chosen probabilities by their sum",
    ):
        for k in (1, 2, 5):
            weights, experts = answer(logits.to(device()), k, True)
            picked = share.gather(1, experts.cpu())
            close(weights, (picked / picked.sum(-1, keepdim=True)).float(), f"weights for k={k}")
    with report.property(
        "not normalised, they are the probabilities over all experts",
        hint="softmax first, top k after it: softmax of the chosen logits alone is something else",
    ):
        for k in (1, 3):
            weights, experts = answer(logits.to(device()), k, normalise=False)
            close(weights, share.gather(1, experts.cpu()).float(), f"weights for k={k}")
    with report.property(
        "logits in float64 give weights in float64",
        hint="softmax in the dtype of the logits: a cast to fp32 keeps 7 digits",
    ):
        fine = logits.to(widest()) / 3
        exact = fine.softmax(-1)
        for normalise in (True, False):
            weights, experts = answer(fine.to(device()), 3, normalise)
            picked = exact.gather(1, experts.cpu())
            picked = picked / picked.sum(-1, keepdim=True) if normalise else picked
            close(
                weights,
                picked,
                "the weights in float64",
                1e-12 if widest() == torch.float64 else 1e-5,
            )
    with report.property(
        "gradients reach all logits of a token", hint="weights must stay part of the graph"
    ):
        for normalise in (True, False):
            leaf = logits.to(device()).requires_grad_()
            weights, experts = answer(leaf, 2, normalise)
            pull = random(9, 2, seed=2)
            (got,) = torch.autograd.grad((weights * pull.to(device())).sum(), leaf)
            exact = logits.double().requires_grad_()
            picked = exact.softmax(-1).gather(1, experts.cpu())
            picked = picked / picked.sum(-1, keepdim=True) if normalise else picked
            (want,) = torch.autograd.grad((picked * pull.double()).sum(), exact)
            close(got, want.float(), "the gradient of the logits")


def _balance(logits: Tensor, experts: Tensor) -> Tensor:
    count = torch.zeros(logits.shape[1], dtype=torch.float64)
    for e in experts.flatten().tolist():
        count[e] += 1 / experts.numel()
    return logits.shape[1] * (count * logits.double().softmax(-1).mean(0)).sum()


@check("load_balancing_loss")
def load_balancing_loss(answer, report):
    """Switch Transformer's auxiliary loss."""
    logits = random(10, 6, seed=3)
    with report.property(
        "E times the sum of (share of the choices) x (mean probability)",
        hint="the share counts all T k choices and divides by their number; the mean probability "
        "is over all tokens, chosen or not",
    ):
        for k, seed in ((1, 1), (2, 2), (3, 3)):
            experts = (random(10, k, seed=seed) * 10).long().abs() % 6
            got = answer(logits.to(device()), experts.to(device()))
            close(torch.as_tensor(got).reshape(()), _balance(logits, experts).float(), f"k={k}")
    with report.property(
        "1.0 at perfect balance, for any k",
        hint="with k choices a token the shares must still sum to 1",
    ):
        for k in (1, 2, 3):
            experts = torch.arange(12 * k).view(12, k) % 6
            got = answer(torch.zeros(12, 6, device=device()), experts.to(device()))
            close(torch.as_tensor(got).reshape(()), torch.tensor(1.0), f"the loss for k={k}")
    with report.property(
        "its gradient flows through the probabilities",
        hint="counts have no gradient, probabilities do",
    ):
        experts = (random(10, 2, seed=4) * 10).long().abs() % 6
        leaf = logits.to(device()).requires_grad_()
        (got,) = torch.autograd.grad(answer(leaf, experts.to(device())), leaf)
        exact = logits.double().requires_grad_()
        (want,) = torch.autograd.grad(_balance(exact, experts), exact)
        close(got, want.float(), "the gradient of the logits")


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
    cases = [((random(n, k, seed=n + k) * 10).long().abs() % 5, c)
             for n, k in ((11, 1), (9, 2), (13, 3)) for c in (1, 2, 4, 50)]  # fmt: skip
    with report.property(
        "an expert keeps its first `capacity` rows, in token order",
        hint="count, for every choice, how many earlier ones went to the same expert",
    ):
        for experts, capacity in cases:
            if experts.shape[1] == 1:
                got = answer(experts.to(device()), 5, capacity)
                same(got.dtype, torch.bool, "the dtype of keep")
                close(got, _keep(experts, 5, capacity), f"keep at a capacity of {capacity}", 0.0)
    with report.property(
        "every first choice comes before any second choice",
        hint="go through the choices column by column, not token by token",
    ):
        for experts, capacity in cases:
            got = answer(experts.to(device()), 5, capacity)
            close(got, _keep(experts, 5, capacity), f"keep at a capacity of {capacity}", 0.0)
    with report.property(
        "an expert of -1 is never kept and takes nobody's room",
        hint="-1 is no expert: counted as expert 0, or as the last, it takes the room of another",
    ):
        for experts, capacity in cases:
            some = experts.masked_fill(random(*experts.shape, seed=capacity) > 0.3, -1)
            got = answer(some.to(device()), 5, capacity)
            close(got, _keep(some, 5, capacity), f"keep at a capacity of {capacity}", 0.0)
    with report.property(
        "a capacity of 0 keeps nothing, and the input stays as it was",
        hint="work on counts of your own",
    ):
        experts = cases[5][0].to(device())
        with unchanged("apply_capacity", experts):
            got = answer(experts, 5, 0)
        close(got, torch.zeros(experts.shape, dtype=torch.bool), "keep at a capacity of 0", 0.0)


# ---- tokens on ranks


def _tokens(rank: int) -> Tensor:
    return random(TOKENS[rank], D, seed=10 + rank)


def _choices(rank: int, skew: bool, k: int = K) -> Tensor:
    t = TOKENS[rank]
    if skew:
        experts = torch.tensor([[0, 1, 2]]).repeat(t, 1)  # everything to the first rank
    else:
        first = (random(t, 1, seed=20 + rank) * 100).long().abs() % E
        second = first + 1 + torch.arange(t)[:, None]
        experts = torch.cat([first, second, second + 3], dim=1) % E
    if t:
        experts[t // 2, 1] = -1
    return experts[:, :k]


def _scale(expert: int) -> float:
    return 1.0 + 0.5 * expert


def _plain() -> list[tuple[torch.dtype, int]]:
    """Dtypes and choices a token, tried without gradients."""
    return [(torch.float32, K), (torch.bfloat16, K), (torch.float32, 1), (widest(), 3)]


@torch.no_grad()
def _plain_out(dispatch) -> list:
    """(size, rank, dtype, k, counts, rows) without gradients: as they go in evaluation."""
    found = []
    for size, group, rank in last_ranks():
        for dtype, k in _plain():
            x = _tokens(rank).to(device(), dtype)
            rows, state = dispatch(x, _choices(rank, False, k).to(device()), E, group)
            counts = [int(c) for c in state.counts]
            found.append((size, rank, dtype, k, counts, rows.cpu().clone()))
    return found


@torch.no_grad()
def _twice_out(dispatch) -> list:
    """(size, rank, whether other tokens, sent the same way, left the first rows as they were)."""
    found = []
    for size, group, rank in last_ranks():
        experts = _choices(rank, False).to(device())
        one, two = (random(TOKENS[rank], D, seed=s + rank).to(device()) for s in (10, 70))
        rows, _ = dispatch(one, experts, E, group)
        before = rows.clone()
        dispatch(two, experts, E, group)
        found.append((size, rank, torch.equal(rows, before)))
    return found


@torch.no_grad()
def _twice_home(combine, dispatch) -> list:
    """(size, rank, whether a second call of combine left the first result as it was)."""
    found = []
    for size, group, rank in last_ranks():
        given = []
        for seed in (10, 70):
            x = random(TOKENS[rank], D, seed=seed + rank).to(device())
            rows, state = dispatch(x, _choices(rank, False).to(device()), E, group)
            weights = random(TOKENS[rank], K, seed=30 + rank).to(device())
            given.append((rows, weights, state, group))
        y = combine(*given[0])
        before = y.clone()
        combine(*given[1])
        found.append((size, rank, torch.equal(y, before)))
    return found


def _judge_twice(values) -> None:
    for results in values:
        for size, rank, kept in results:
            said = f"a second call changed what the first one gave on rank {rank} of {size}"
            expect(kept, said, "kept")


def _out(dispatch, skew: bool):
    """Rows go out; the gradient that comes back depends on the expert they went to."""
    results = []
    for size, group, rank in last_ranks():
        x = _tokens(rank).to(device()).requires_grad_()
        experts = _choices(rank, skew).to(device())
        before = experts.clone()
        with calls.record() as log:
            received, state = dispatch(x, experts, E, group)
        log = list(log)
        counts = [int(c) for c in state.counts]
        what = "received carries no gradient: the rows were detached on their way"
        expect(received.requires_grad or not len(received), what)
        scaled = (received * _factors(counts, size, rank)).sum()
        with calls.record() as back:
            scaled.backward()
        dx = torch.zeros_like(x) if x.grad is None else x.grad
        kept = torch.equal(before, experts)
        found = (counts, received.detach().cpu(), dx.cpu(), log, list(back), kept)
        results.append((size, rank, *found))
    return results


def _factors(counts: list[int], size: int, rank: int) -> Tensor:
    mine = E // size
    each = [_scale(rank * mine + i) for i, c in enumerate(counts) for _ in range(c)]
    return torch.tensor(each, device=device())[:, None]


def _and_home(combine, dispatch, skew: bool):
    """Rows go out, are scaled by their expert's number, and come home."""
    results = []
    for size, group, rank in last_ranks():
        x = _tokens(rank).to(device()).requires_grad_()
        received, state = dispatch(x, _choices(rank, skew).to(device()), E, group)
        outputs = received * _factors([int(c) for c in state.counts], size, rank)
        weights = random(TOKENS[rank], K, seed=30 + rank).to(device()).requires_grad_()
        with calls.record() as log:
            y = combine(outputs, weights, state, group)
        log = list(log)
        pull = random(TOKENS[rank], D, seed=40 + rank).to(device())
        pulled = (y * pull).sum()
        with calls.record() as back:
            grads = torch.autograd.grad(pulled, (x, weights), allow_unused=True)
        out = [None if t is None else t.detach().cpu() for t in (y, *grads)]
        results.append((size, rank, out, log, list(back)))
    return results


@torch.no_grad()
def _plain_home(combine, dispatch) -> list:
    """(size, rank, dtype, k, y) without gradients."""
    found = []
    for size, group, rank in last_ranks():
        for dtype, k in _plain():
            x = _tokens(rank).to(device(), dtype)
            rows, state = dispatch(x, _choices(rank, False, k).to(device()), E, group)
            outputs = rows * _factors([int(c) for c in state.counts], size, rank).to(dtype)
            weights = random(TOKENS[rank], k, seed=30 + rank).to(device(), dtype)
            y = combine(outputs, weights, state, group).cpu().clone()
            found.append((size, rank, dtype, k, y))
    return found


def _arrivals(size: int, rank: int, skew: bool, k: int = K):
    """(rows per local expert, the rows of each local expert in any order of sources)."""
    mine = range(rank * (E // size), (rank + 1) * (E // size))
    rows = []
    for e in mine:
        found = []
        for source in range(size):
            for token, chosen in enumerate(_choices(source, skew, k).tolist()):
                found += [_tokens(source)[token]] * chosen.count(e)
        rows.append(torch.stack(found) if found else torch.empty(0, D))
    return rows


def _home(rank: int, skew: bool, k: int = K):
    """(y, dx, dweights) of the dense loop in float64."""
    x = _tokens(rank).double().requires_grad_()
    weights = random(TOKENS[rank], k, seed=30 + rank).double().requires_grad_()
    y = torch.zeros(TOKENS[rank], D, dtype=torch.float64)
    rows = []
    for token, chosen in enumerate(_choices(rank, skew, k).tolist()):
        parts = [weights[token, j] * _scale(e) * x[token] for j, e in enumerate(chosen) if e >= 0]
        rows.append(sum(parts) if parts else 0 * x[token])
    y = torch.stack(rows) if rows else x * 1
    pull = random(TOKENS[rank], D, seed=40 + rank).double()
    dx, dw = torch.autograd.grad((y * pull).sum(), (x, weights), allow_unused=True)
    dw = torch.zeros_like(weights) if dw is None else dw
    return [t.detach().float() for t in (y, dx, dw)]


def _sorted_rows(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()] if len(rows) else rows


def _judge_rows(counts: list[int], rows: Tensor, want: list[Tensor], where: str) -> None:
    same(counts, [len(w) for w in want], f"state.counts on {where}")
    same(tuple(rows.shape), (sum(counts), D), f"the shape received on {where}")
    for i, (got, expected) in enumerate(zip(rows.split(counts), want, strict=True)):
        what = f"the rows of local expert {i} on {where}"
        close(_sorted_rows(got), _sorted_rows(expected), what)


def _named(dtype: torch.dtype, k: int, where: str) -> str:
    return f"{where}, {str(dtype).removeprefix('torch.')}, {k} choices, without gradients"


def _judge_plain_arrivals(values) -> None:
    for results in values:
        for size, rank, dtype, k, counts, rows in results:
            want = [w.to(dtype) for w in _arrivals(size, rank, False, k)]
            _judge_rows(counts, rows, want, _named(dtype, k, f"rank {rank} of {size}"))


def _judge_plain_home(values) -> None:
    for results in values:
        for size, rank, dtype, k, y in results:
            what = "y on " + _named(dtype, k, f"rank {rank} of {size}")
            rough = 0.05 if dtype == torch.bfloat16 else 1e-5
            close(y, _home(rank, False, k)[0].to(dtype), what, rough)


def _judge_arrivals(values, skew: bool) -> None:
    for results in values:
        for size, rank, counts, rows, dx, *_, kept in results:
            where = f"rank {rank} of {size}"
            _judge_rows(counts, rows, _arrivals(size, rank, skew), where)
            wanted = torch.zeros(TOKENS[rank], D)
            for token, chosen in enumerate(_choices(rank, skew).tolist()):
                wanted[token] = sum(_scale(e) for e in chosen if e >= 0)
            close(dx, wanted, f"the gradient of the tokens on {where}")
            expect(kept, f"{where} changed `experts`")


def _judge_home(values, skew: bool) -> None:
    for results in values:
        for size, rank, out, *_ in results:
            where = f"rank {rank} of {size}"
            names = ("y", "the gradient of the tokens", "the gradient of the weights")
            pairs = dict(zip(names, zip(out, _home(rank, skew), strict=True), strict=True))
            there = {name: (got, want) for name, (got, want) in pairs.items() if got is not None}
            all_close(there, where)
            for name in pairs.keys() - there.keys():
                expect(not pairs[name][1].numel(), f"{name} is missing on {where}")


def _judge_traffic(results, routed: int, way: str = "forward", width: int = D) -> None:
    size, rank, log = results
    where = f"rank {rank} of {size}, {way},"
    rows = [c for c in log if c.dtype.is_floating_point]
    wrong = [c.op for c in rows if c.op not in ("all_to_all", "send", "recv")]
    expect(not wrong, f"{where} moved rows with {wrong[:1]}, expected an all-to-all")
    sent = sum(c.nbytes for c in rows if c.op != "recv")
    expect(
        sent <= routed * width * 4,
        f"{where} sent {sent} bytes of rows, expected {routed * D * 4}: only routed rows travel",
    )
    expect(sent > 0 or size == 1 or routed == 0, f"{where} sent no rows")
    small = sum(c.nbytes for c in log if not c.dtype.is_floating_point)
    expect(small <= 8 * E * size, f"{where} sent {small} bytes of counts")


@check("dispatch")
def dispatch(answer, report):
    """Rows to their experts."""
    values = None
    with report.property(
        "received holds the routed rows, ordered by local expert, on 1 to 4 ranks",
        hint=hints(
            "sort the choices by expert, so rows for one rank lie together; exchange counts; "
            "what arrives is ordered by source rank and must be sorted by local expert. The "
            "gradient takes the same way back: an all-to-all with the sizes exchanged",
            hang="every rank takes part in every all-to-all, also one that has no tokens, and "
            "gives and takes as many rows as the counts say",
        ),
    ):
        values = report.ranks(_out, 4, answer, False)
        _judge_arrivals(values, False)
    with report.property(
        "the same without gradients, in bf16 and float64, and for 1 and 3 choices a token",
        hint=hints(
            "experts.shape[1] is k; evaluation runs under no_grad and needs the same rows",
            dtype="a buffer takes the dtype of the tokens: x.new_empty, not torch.empty",
        ),
    ):
        _judge_plain_arrivals(report.ranks(_plain_out, 4, answer))
    with report.property(
        "a second call leaves the first rows as they were",
        hint="a buffer kept for the next call is overwritten by it: receive into a new one",
    ):
        _judge_twice(report.ranks(_twice_out, 4, answer))
    with report.property(
        "also where all tokens go to one rank, and others get none",
        hint="all-to-all takes empty pieces; the shapes must still be right",
    ):
        _judge_arrivals(report.ranks(_out, 4, answer, True), True)
    with report.property(
        "only routed rows travel, once each way; a dropped choice (-1) sends nothing",
        hint="no padding, no all-gather of all tokens; the gradient goes back as the rows came",
    ):
        for results in values or report.ranks(_out, 4, answer, False):
            for size, rank, counts, *_, log, back, _ in results:
                _judge_traffic((size, rank, log), int((_choices(rank, False) >= 0).sum()))
                _judge_traffic((size, rank, back), sum(counts), "backward")
    with report.property(
        "ValueError where the experts do not divide by the ranks, or one does not exist",
        hint="each rank owns num_experts / P consecutive experts; -1 is the only index below 0",
    ):
        for problem in report.ranks(_refused, 4, answer):
            expect(problem is None, problem or "")


def _refused(answer) -> str | None:
    x, experts = random(3, D).to(device()), torch.tensor([[0], [1], [2]], device=device())
    try:
        refuses(answer, x, experts, 6, what="6 experts on 4 ranks")
        refuses(answer, x, experts + 6, 8, what="expert 8 of 8")
    except AssertionError as error:
        return str(error)
    return None


def _its_dispatch(answer):
    """The dispatch that stands beside this combine: only it knows what is in its state."""
    beside = getattr(answer, "__globals__", {}).get("dispatch")
    if callable(beside) and not hasattr(beside, "exercise"):
        return beside
    return _plain_dispatch  # for a combine that stands alone


class _Rows(torch.autograd.Function):
    """An all-to-all of rows; the gradient takes it the other way round."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.args = receive, send, group
        arrived = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return _Rows.apply(grad, *ctx.args), None, None, None


def _plain_dispatch(tokens, experts, num_experts, group=None):
    """A dispatch by loops over experts, whose state has the fields of the lab's `Dispatched`."""
    world = dist.get_world_size(group)
    here, k = num_experts // world, experts.shape[1]
    chosen = experts.flatten().tolist()
    choices = [i for e in range(num_experts) for i, c in enumerate(chosen) if c == e]
    sent = torch.tensor([chosen.count(e) for e in range(num_experts)], device=device())
    incoming = torch.empty_like(sent)
    dist.all_to_all_single(incoming, sent, group=group)
    incoming = incoming.view(world, here).tolist()  # by source, by local expert
    send = sent.view(world, here).sum(1).tolist()
    receive = [sum(row) for row in incoming]
    rows = tokens[[i // k for i in choices]]
    arrived = _Rows.apply(rows, send, receive, group)
    owner = [e for row in incoming for e, count in enumerate(row) for _ in range(count)]
    arrival = [i for e in range(here) for i, o in enumerate(owner) if o == e]
    state = types.SimpleNamespace(
        counts=[sum(row[e] for row in incoming) for e in range(here)],
        choices=torch.tensor(choices, dtype=torch.int64, device=device()),
        shape=experts.shape,
        send=send,
        receive=receive,
        arrival=torch.tensor(arrival, dtype=torch.int64, device=device()),
    )
    return arrived[state.arrival], state


@check("combine")
def combine(answer, report):
    """Rows come home; checked with the dispatch of the same file or notebook."""
    other = _its_dispatch(answer)
    values = None
    with report.property(
        "every token gets the weighted sum of its experts' outputs, 1 to 4 ranks",
        hint="undo the sort by local expert, send the rows back the way they came, multiply by the "
        "weight of the choice, add up by token; a dropped choice adds 0",
    ):
        values = report.ranks(_and_home, 4, answer, other, False)
        _judge_home(values, False)
    with report.property(
        "the same without gradients, in bf16 and float64, and for 1 and 3 choices a token",
        hint="weights.shape[1] is k; y has the dtype of the rows",
    ):
        _judge_plain_home(report.ranks(_plain_home, 4, answer, other))
    with report.property(
        "a second call leaves the first result as it was",
        hint="a buffer kept for the next call is overwritten by it: add up in a new one",
    ):
        _judge_twice(report.ranks(_twice_home, 4, answer, other))
    with report.property(
        "also where all tokens go to one rank",
        hint="the rank that computes most sends most rows back",
    ):
        _judge_home(report.ranks(_and_home, 4, answer, other, True), True)
    with report.property(
        "each row comes back once, its gradient goes out once, and nothing else moves",
        hint="the sizes are known since dispatch: the same all-to-all, the other way round",
    ):
        for results in values or report.ranks(_and_home, 4, answer, other, False):
            for size, rank, *_, log, back in results:
                held = sum(len(rows) for rows in _arrivals(size, rank, False))
                routed = int((_choices(rank, False) >= 0).sum())
                _judge_traffic((size, rank, log), held)
                # autograd goes on through dispatch, whose gradient takes the way of the rows home
                _judge_traffic((size, rank, back), routed + held, "backward")


# ---- the layer


class _Parts(nn.Module):
    """A full router and all experts, the same on every rank."""

    def __init__(self, skew: bool):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.Linear(7, D)) for _ in range(E)
        )
        for i, p in enumerate(self.parameters()):
            with torch.no_grad():
                p.copy_(random(*p.shape, seed=50 + i) / 2)
        if skew:
            with torch.no_grad():
                self.router.bias[:2] += torch.tensor([60.0, 40.0])


def _dense(parts: nn.Module, x: Tensor, k: int = K) -> Tensor:
    """Each token through its experts, one by one (float64)."""
    share = parts.router(x).softmax(-1)
    rows = []
    for token in range(len(x)):
        picked, experts = share[token].topk(k)
        picked = picked / picked.sum()
        rows.append(
            sum(
                w * parts.experts[e](x[token])
                for w, e in zip(picked, experts.tolist(), strict=True)
            )
        )
    return torch.stack(rows) if rows else x * 1


def _alive(given: list) -> int:
    """How many of these tensors somebody still holds."""
    if sum(ref() is not None for ref in given) > 0:
        gc.collect()
    return sum(ref() is not None for ref in given)


def _layer(answer, skew: bool):
    results = []
    for size, group, rank in last_ranks():
        parts = _Parts(skew).to(device())
        seen: list[int] = []  # rows that the experts compute
        for expert in parts.experts:
            expert.register_forward_hook(lambda m, args, y, seen=seen: seen.append(len(args[0])))
        given = [weakref.ref(p) for p in parts.experts.parameters()]
        layer = answer(parts.router, list(parts.experts), K, group)
        count = sum(p.numel() for p in layer.parameters())
        in_memory = held(layer)
        del parts, expert
        alive = _alive(given)
        x = _tokens(rank).to(device()).requires_grad_()
        with calls.record() as log:
            y = layer(x)
        pulled = (y * random(TOKENS[rank], D, seed=40 + rank).to(device())).sum()
        with calls.record() as back:
            pulled.backward()
        work = (list(log), list(back), sum(seen))
        grads = {
            n: p.grad.detach().cpu() for n, p in layer.named_parameters() if p.grad is not None
        }
        router = [g for n, g in grads.items() if "router" in n]
        if not router:
            router = [torch.zeros(E, D), torch.zeros(E)]
        others = [g for n, g in grads.items() if "router" not in n]
        found = (y.detach().cpu(), x.grad.detach().cpu(), router, others)
        results.append((size, rank, *found, work, in_memory, count, alive))
    return results


@torch.no_grad()
def _again(answer) -> list:
    """What a layer gives without gradients, call after call, and how many calls it keeps."""
    results = []
    for size, group, rank in last_ranks():
        parts, found, given = _Parts(False).to(device()), [], []
        layers = [answer(parts.router, list(parts.experts), k, group) for k in (K, 1, 3)]
        for k, layer in zip((K, 1, 3), layers, strict=True):
            for seed in (10, 70):  # the second call brings other tokens
                x = random(TOKENS[rank], D, seed=seed + rank).to(device())
                given.append(weakref.ref(x))
                found.append((k, seed, layer(x).cpu()))
        del x
        results.append((size, rank, found, _alive(given)))
    return results


def _held_rows(size: int, skew: bool) -> list[list[int]]:
    """For each rank, the rows that its experts get."""
    router, sent = _Parts(skew).router, torch.zeros(E, dtype=torch.long)
    for rank in range(size):
        chosen = router(_tokens(rank)).topk(K).indices
        sent += torch.bincount(chosen.flatten(), minlength=E)
    return sent.view(size, -1).tolist()


def _judge_again(values) -> None:
    parts = _Parts(False).double()
    for results in values:
        for size, rank, found, alive in results:
            where = f"rank {rank} of {size}"
            for k, seed, y in found:
                want = _dense(parts, random(TOKENS[rank], D, seed=seed + rank).double(), k)
                call = "first" if seed == 10 else "second"
                what = f"y without gradients, {call} call, {k} choices, on {where}"
                close(y, want.detach().float(), what)
            expect(
                alive <= 3,
                f"{where} still holds the tokens of {alive} of 6 calls: a layer that keeps what "
                "it has seen runs out of memory",
            )


def _judge_work(values, skew: bool) -> None:
    for results in values:
        for size, rank, *_, (log, back, seen), _, _, _ in results:
            rows = _held_rows(size, skew)[rank]
            both = TOKENS[rank] * K + sum(rows)  # out with dispatch, home with combine
            wide = D + 1  # a weight may travel with its row
            _judge_traffic((size, rank, log), both, "forward", wide)
            _judge_traffic((size, rank, back), both, "backward", wide)
            most = len(rows) * max([*rows, 1])  # padded to the busiest expert at worst
            expect(
                seen <= most,
                f"the experts of rank {rank} of {size} compute {seen} rows, {sum(rows)} were "
                "routed to them",
            )


def _judge_layer(values, skew: bool) -> None:
    by_rank: dict = {}
    for results in values:
        for size, rank, *rest in results:
            by_rank[size, rank] = rest
    for size in SIZES:
        parts = _Parts(skew).double()
        xs = [_tokens(r).double().requires_grad_() for r in range(size)]
        ys = [_dense(parts, x) for x in xs]
        sum((y * random(*y.shape, seed=40 + r)).sum() for r, y in enumerate(ys)).backward()
        router = [torch.zeros(E, D), torch.zeros(E)]
        for rank in range(size):
            y, dx, mine, others, *_ = by_rank[size, rank]
            where = f"rank {rank} of {size}"
            close(y, ys[rank].detach().float(), f"y on {where}")
            want = xs[rank].grad if xs[rank].grad is not None else torch.zeros_like(xs[rank])
            close(dx, want.float(), f"the gradient of x on {where}")
            router = [a + b for a, b in zip(router, mine, strict=True)]
            owned = parts.experts[rank * (E // size) : (rank + 1) * (E // size)]
            wanted = [p.grad for p in owned.parameters()]
            wanted = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(owned.parameters(), wanted, strict=True)
            ]
            if len(others) == len(wanted):
                for got, w in zip(others, wanted, strict=True):
                    close(got, w.float(), f"an expert's gradient on {where}")
            else:  # experts without tokens may keep None
                some = [w for w in wanted if float(w.abs().sum()) > 0]
                same(len(others), len(some), f"the number of expert gradients on {where}")
                for got, w in zip(others, some, strict=True):
                    close(got, w.float(), f"an expert's gradient on {where}")
        for got, w in zip(router, (parts.router.weight.grad, parts.router.bias.grad), strict=True):
            close(got, w.float(), f"the router's gradient summed over {size} ranks")


@check("ExpertParallelMoE")
def expert_parallel_moe(answer, report):
    """The whole layer."""
    values = None
    with report.property(
        "values and gradients equal the dense computation, 1 to 4 ranks, uneven tokens",
        hint="an expert's gradient is the SUM over all ranks' tokens, so it needs no scaling by "
        "the number of ranks; the weights of route_top_k carry the router's gradient",
    ):
        values = report.ranks(_layer, 4, answer, False)
        _judge_layer(values, False)
    with report.property(
        "the same call after call, without gradients, and for 1 and 3 choices a token",
        hint="route every call anew, by the k that was given, and keep nothing of a call: "
        "evaluation under no_grad takes the same way as training",
    ):
        _judge_again(report.ranks(_again, 4, answer))
    with report.property(
        "also where two experts get every token and most ranks get none",
        hint="a rank without tokens still takes part in every all-to-all, forward and backward",
    ):
        _judge_layer(report.ranks(_layer, 4, answer, True), True)
    with report.property(
        "only routed rows travel and are computed, forward and backward",
        hint="dispatch the rows to their experts and combine what comes back; an all-gather of all "
        "tokens, or every expert on every token, gives the same values at E/k times the work",
    ):
        _judge_work(values, False)
    with report.property(
        "a rank keeps the router and its own experts, no others",
        hint="E/P consecutive experts; do not register the full list, and do not keep it in a list "
        "or a closure either",
    ):
        expert = sum(p.numel() for p in _Parts(False).experts[0].parameters())
        for results in values or report.ranks(_layer, 4, answer, False):
            for size, rank, *_, in_memory, count, alive in results:
                want = E // size * expert + E * D + E
                same(count, want, f"parameters held by rank {rank} of {size}")
                expect(
                    in_memory <= 4 * want + 64,  # a little bookkeeping
                    f"rank {rank} of {size} keeps {in_memory} bytes in memory, its router and its "
                    f"own experts have {4 * want}",
                )
                own = E // size * 4  # two weights and two biases each
                expect(
                    alive <= own,
                    f"rank {rank} of {size} keeps {alive} of the experts' parameters in memory, "
                    f"expected {own}",
                )
    with report.property(
        "ValueError where the experts do not divide by the ranks", hint="say so when it is built"
    ):
        for problem in report.ranks(_layer_refused, 4, answer):
            expect(problem is None, problem or "")


def _layer_refused(answer) -> str | None:
    parts = copy.deepcopy(_Parts(False)).to(device())
    try:
        refuses(answer, parts.router, list(parts.experts)[:6], K, what="6 experts on 4 ranks")
    except AssertionError as error:
        return str(error)
    return None


ExpertParallelMoE = expert_parallel_moe  # by the name of the exercise as well
