"""Chapter 25, the whole layer: a router and its experts over ranks."""

import functools
import gc
import weakref

import torch
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random, same
from ..groups import held, refusal
from ..report import check
from ..seen import WORLD, Here, Seen
from .rows import TOKENS, D, E, K, only_rows, pull, tokens

SPREAD, SKEWED, AGAIN = "spread", "two experts get all", "again"


class _Parts(nn.Module):
    """A full router and all experts, the same on every rank."""

    def __init__(self, skew: bool):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.Linear(7, D)) for _ in range(E)
        )
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(random(*p.shape, seed=50 + i) / 2)
            if skew:
                self.router.bias[:2] += torch.tensor([60.0, 40.0])


def _dense(parts: nn.Module, x: Tensor, k: int = K) -> Tensor:
    """Each token through its experts, one by one."""
    rows = []
    for token, share in zip(x, parts.router(x).softmax(-1), strict=True):
        picked, experts = share.topk(k)
        weights = picked / picked.sum()
        rows.append(sum(w * parts.experts[e](token) for w, e in zip(weights, experts, strict=True)))
    return torch.stack(rows) if rows else x * 1


# On a rank


def _alive(given: list[weakref.ref]) -> int:
    """How many of these tensors somebody still holds."""
    if any(ref() is not None for ref in given):
        gc.collect()
    return sum(ref() is not None for ref in given)


def _layer(answer, here: Here, kind: str) -> Seen:
    if kind == AGAIN:
        return _again(answer, here)
    parts = _Parts(kind == SKEWED).to(device())
    computed: list[int] = []  # rows that the experts compute
    for expert in parts.experts:
        expert.register_forward_hook(lambda m, args, y: computed.append(len(args[0])))
    given = [weakref.ref(p) for p in parts.experts.parameters()]
    layer = answer(parts.router, list(parts.experts), K, **here.options)
    count, nbytes = sum(p.numel() for p in layer.parameters()), held(layer)
    del parts, expert
    found = {"count": count, "alive": _alive(given)}
    x, grad = tokens(here.place).to(device()), pull(here.place).to(device())
    seen = here.see(layer, grad, module=layer, x=x)
    seen.held, seen.more = nbytes, found | {"computed": sum(computed)}
    return seen


@torch.no_grad()
def _again(answer, here: Here) -> Seen:
    """What a layer gives without gradients, call after call, and how many calls it keeps."""
    parts, found, given = _Parts(False).to(device()), [], []
    for expert in parts.experts:
        expert[0].bias.requires_grad_(False)
    layers = [(k, answer(parts.router, list(parts.experts), k, **here.options)) for k in (K, 1, 3)]
    for k, layer in layers:
        for seed in (0, 60):  # the second call brings other tokens
            x = tokens(here.place, seed).to(device())
            given.append(weakref.ref(x))
            found.append((k, seed, layer(x).cpu()))
    del x
    frozen = sum(not p.requires_grad for p in layers[0][1].parameters())
    return Seen(found, held=_alive(given), more={"frozen": frozen})


def _refused(answer, here: Here) -> Seen:
    parts = _Parts(False).to(device())
    six = list(parts.experts)[:6]
    return Seen(refused=refusal(answer, parts.router, six, K, what="6 experts on 4 ranks"))


# In the check


@functools.cache
def _wanted(size: int, skew: bool) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The full parts with their gradients, and y and dx of every rank."""
    parts = _Parts(skew).double()
    xs = [tokens(r).double().requires_grad_() for r in range(size)]
    ys = [_dense(parts, x) for x in xs]
    sum((y * pull(r)).sum() for r, y in enumerate(ys)).backward()
    for p in parts.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    dx = [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]
    return parts, [y.detach().float() for y in ys], [d.float() for d in dx]


def _judge_group(members: list[Seen]) -> None:
    """y, dx and the experts' gradients of every rank; the router's gradient is that of all."""
    size, router = len(members), [torch.zeros(E, D), torch.zeros(E)]
    parts, ys, dxs = _wanted(size, members[0].case == SKEWED)
    for s in members:
        close(s.value, ys[s.place], f"y on {s.where}")
        grads = {name: g for name, g in s.grads.items() if g is not None}
        close(grads.pop("x"), dxs[s.place], f"the gradient of x on {s.where}")
        mine = [g for name, g in grads.items() if "router" in name] or [torch.zeros(())] * 2
        router = [a + b for a, b in zip(router, mine, strict=True)]
        got = [g for name, g in grads.items() if "router" not in name]
        owned = parts.experts[s.place * (E // size) : (s.place + 1) * (E // size)]
        want = [p.grad.float() for p in owned.parameters()]
        if len(got) < len(want):  # experts without tokens may keep None
            want = [w for w in want if w.any()]
        same(len(got), len(want), f"the number of expert gradients on {s.where}")
        for g, w in zip(got, want, strict=True):
            close(g, w, f"an expert's gradient on {s.where}")
    for got, p in zip(router, parts.router.parameters(), strict=True):
        close(got, p.grad.float(), f"the router's gradient summed over {size} ranks")


def _judge_again(s: Seen) -> None:
    parts = _Parts(False).double()
    for k, seed, y in s.value:
        want = _dense(parts, tokens(s.place, seed).double(), k).detach().float()
        call = "second" if seed else "first"
        close(y, want, f"y without gradients, {call} call, {k} choices, on {s.where}")
    expect(
        s.held <= 3,
        f"{s.where} still holds the tokens of {s.held} of 6 calls: a layer that keeps what "
        "it has seen runs out of memory",
        "memory",
    )


@functools.cache
def _routed(size: int) -> list[list[int]]:
    """For each rank, the rows that its experts get."""
    router, sent = _Parts(False).router, torch.zeros(E, dtype=torch.long)
    for rank in range(size):
        chosen = router(tokens(rank)).topk(K).indices
        sent += torch.bincount(chosen.flatten(), minlength=E)
    return sent.view(size, -1).tolist()


def _judge_work(s: Seen) -> None:
    rows = _routed(s.size)[s.place]
    both = TOKENS[s.place] * K + sum(rows)  # out with dispatch, home with combine
    for way, log in (("forward", s.forward), ("backward", s.backward)):
        only_rows(s, way, log, both, width=D + 1)  # a weight may travel with its row
    most = len(rows) * max([*rows, 1])  # padded to the busiest expert at worst
    done = s.more["computed"]
    said = f"the experts of {s.where} compute {done} rows, {sum(rows)} were routed to them"
    expect(done <= most, said, "traffic")


def _judge_memory(s: Seen) -> None:
    own = sum(p.numel() for p in _Parts(False).experts[0].parameters()) * (E // s.size)
    want = own + E * D + E
    same(s.more["count"], want, f"parameters held by {s.where}")
    said = f"{s.where} keeps {s.held} bytes in memory, its router and its own experts have"
    expect(s.held <= 4 * want + 64, f"{said} {4 * want}", "memory")  # a little bookkeeping
    alive, most = s.more["alive"], E // s.size * 4  # two weights and two biases each
    said = f"{s.where} keeps {alive} of the experts' parameters in memory, expected {most}"
    expect(alive <= most, said, "memory")


def _judge_frozen(s: Seen) -> None:
    said = f"the number of frozen parameters on {s.where}, a bias of each expert,"
    same(s.more["frozen"], E // s.size, said)


@check("ExpertParallelMoE")
def expert_parallel_moe(answer, report):
    """The whole layer."""
    seen = report.on_groups(_layer, answer, cases=[SPREAD, AGAIN, SKEWED])
    again = seen.of(AGAIN)
    with report.property(
        "values and gradients equal the dense computation, 1 to 4 ranks, uneven tokens",
        hint="an expert's gradient is the SUM over all ranks' tokens, so it needs no scaling by "
        "the number of ranks; the weights of route_top_k carry the router's gradient",
    ):
        for members in seen.of(SPREAD).groups():
            _judge_group(members)
    again.holds(
        "the same call after call, without gradients, and for 1 and 3 choices a token",
        _judge_again,
        hint="route every call anew, by the k that was given, and keep nothing of a call: "
        "evaluation under no_grad takes the same way as training",
    )
    with report.property(
        "also where two experts get every token and most ranks get none",
        hint="a rank without tokens still takes part in every all-to-all, forward and backward",
    ):
        for members in seen.of(SKEWED).groups():
            _judge_group(members)
    seen.of(SPREAD).holds(
        "only routed rows travel and are computed, forward and backward",
        _judge_work,
        hint="dispatch the rows to their experts and combine what comes back; an all-gather of all "
        "tokens, or every expert on every token, gives the same values at E/k times the work",
    )
    with report.property(
        "a rank keeps the router and its own experts, no others",
        hint="E/P consecutive experts, as they were given, frozen ones too; do not register the "
        "full list, and do not keep it in a list or a closure either",
    ):
        seen.of(SPREAD).each(_judge_memory)
        again.each(_judge_frozen)
    report.on_groups(_refused, answer, rounds=WORLD).refused(
        "ValueError where the experts do not divide by the ranks", hint="say so when it is built"
    )
