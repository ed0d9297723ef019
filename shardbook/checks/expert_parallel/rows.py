"""Chapter 25, rows on ranks: out to their experts, and home again."""

import dataclasses
import functools
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ...calls import Call
from ...devices import device
from ..compare import all_close, close, expect, random, same, widest
from ..groups import refusal
from ..report import check
from ..seen import WORLD, Here, Seen
from ..wrong import hints

E, D, K = 12, 5, 2  # experts, width, choices
TOKENS = (3, 7, 0, 2)  # tokens of each rank in a group: uneven, one rank has none


@dataclasses.dataclass(frozen=True)
class Case:
    """How rows are routed, of which dtype they are, and whether a gradient is wanted."""

    k: int = K
    skew: bool = False  # everything to the first rank
    train: bool = False
    dtype: torch.dtype | None = torch.float32  # None: the widest that the ranks' device has

    def __str__(self) -> str:
        kind = str(self.dtype or "the widest dtype").removeprefix("torch.")
        plain = "" if self.train else ", without gradients"
        return f"{kind}, {self.k} choices{plain}{', all to one rank' if self.skew else ''}"

    def experts(self, place: int) -> Tensor:
        """[T, k]: the choices of one rank's tokens; one of them is dropped."""
        many = TOKENS[place]
        first = (random(many, 1, seed=20 + place) * 100).long().abs() % E
        second = first + 1 + torch.arange(many)[:, None]
        chosen = torch.cat([first, second, second + 3], dim=1) % E
        chosen = torch.tensor([[0, 1, 2]]).repeat(many, 1) if self.skew else chosen
        chosen[many // 2 : many // 2 + 1, 1] = -1
        return chosen[:, : self.k]

    def inputs(self, here: Here, seed: int = 0) -> dict[str, Tensor]:
        """Tokens, weights and experts on a rank."""
        dtype = self.dtype or widest()
        x, weights = tokens(here.place, seed), _weights(here.place, self.k, seed)
        x, weights = (t.to(device(), dtype) for t in (x, weights))
        return {"x": x, "weights": weights, "experts": self.experts(here.place).to(device())}


SPREAD, SKEWED = Case(train=True), Case(train=True, skew=True)
PLAIN = [Case(), Case(dtype=torch.bfloat16), Case(1), Case(3, dtype=None)]
CASES = [SPREAD, *PLAIN, SKEWED]


def tokens(place: int, seed: int = 0) -> Tensor:
    """[T, D]: what a rank brings; other tokens for another seed."""
    return random(TOKENS[place], D, seed=seed + 10 + place)


def _weights(place: int, k: int, seed: int = 0) -> Tensor:
    return random(TOKENS[place], k, seed=seed + 30 + place)


def pull(place: int) -> Tensor:
    """The gradient of what a rank's tokens become."""
    return random(TOKENS[place], D, seed=40 + place)


def _scale(expert: int) -> float:
    """What an expert does to a row: it tells them apart."""
    return 1.0 + 0.5 * expert


# On a rank


def _scales(rows: Tensor, counts: list[int], here: Here) -> Tensor:
    """The factor of every row received, by its expert."""
    expect(len(rows) == sum(counts), f"state.counts is {counts} for {len(rows)} rows received")
    first = here.place * (E // here.size)
    each = [_scale(first + i) for i, n in enumerate(counts) for _ in range(n)]
    return torch.tensor(each, dtype=rows.dtype, device=rows.device)[:, None]


def _out(answer, here: Here, case: Case) -> Seen:
    """Rows go out; the gradient that comes back depends on the expert they went to."""
    counts: list[int] = []

    def call(x: Tensor, experts: Tensor) -> Tensor:
        received, state = answer(x, experts, E, **here.options)
        counts[:] = [int(c) for c in state.counts]
        return received

    def back(rows: Tensor) -> Tensor:
        return _scales(rows, counts, here).expand_as(rows)

    given, other = case.inputs(here), case.inputs(here, seed=60)["x"]
    del given["weights"]
    if case.train:
        seen = here.see(call, back, **given)
    else:
        with torch.no_grad():
            again = functools.partial(answer, other, given["experts"], E, **here.options)
            seen = here.see(call, then=again, **given)
    seen.more["counts"] = counts
    return seen


def _home(answer, here: Here, case: Case, dispatch) -> Seen:
    """Rows go out, are scaled by their expert's number, and come home."""

    def call(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        rows, state = dispatch(x, experts, E, **here.options)
        rows = rows * _scales(rows, [int(c) for c in state.counts], here)
        return answer(rows, weights, state, **here.options)

    given = case.inputs(here)
    if case.train:
        return here.see(call, pull(here.place).to(device()), **given)
    with torch.no_grad():
        other = case.inputs(here, seed=60)
        return here.see(call, then=lambda: call(*other.values()), **given)


def _refused(answer, here: Here) -> Seen:
    x, experts = random(3, D).to(device()), torch.tensor([[0], [1], [2]], device=device())
    uneven = refusal(answer, x, experts, 6, what="6 experts on 4 ranks")
    return Seen(refused=uneven or refusal(answer, x, experts + 6, 8, what="expert 8 of 8"))


# In the check


def _arrivals(s: Seen) -> list[Tensor]:
    """The rows of each expert of this rank, by source."""
    rows: list[list[Tensor]] = [[] for _ in range(E)]
    for source in range(s.size):
        for row, chosen in zip(tokens(source), s.case.experts(source).tolist(), strict=True):
            for e in filter(lambda e: e >= 0, chosen):
                rows[e].append(row)
    mine = E // s.size
    own = rows[s.place * mine : (s.place + 1) * mine]
    return [torch.stack(found) if found else torch.empty(0, D) for found in own]


def _sorted(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()] if len(rows) else rows


def _judge_arrivals(s: Seen) -> None:
    want, counts = _arrivals(s), s.more["counts"]
    where = f"on {s.where}, {s.case}"
    same(counts, [len(w) for w in want], f"state.counts {where}")
    same(tuple(s.value.shape), (sum(counts), D), f"the shape received {where}")
    for i, (got, expected) in enumerate(zip(s.value.split(counts), want, strict=True)):
        wanted = expected.to(s.case.dtype or s.value.dtype)
        close(_sorted(got), _sorted(wanted), f"the rows of local expert {i} {where}")
    if s.case.train:
        scales = [sum(_scale(e) for e in c if e >= 0) for c in s.case.experts(s.place).tolist()]
        dx = torch.tensor(scales)[:, None].expand(-1, D)
        close(s.grads["x"], dx.reshape(-1, D), f"the gradient of the tokens {where}")
    expect(s.kept, f"{s.where} changed `experts` or the tokens", "kept")


def _judge_home(s: Seen) -> None:
    """y, and the gradients of tokens and weights, are those of a dense loop in float64."""
    x, weights = tokens(s.place).double(), _weights(s.place, s.case.k).double()
    experts = s.case.experts(s.place)
    share = torch.where(experts >= 0, 1 + 0.5 * experts, 0.0).double()  # [T, k]
    grad = pull(s.place).double()
    want = {"y": (weights * share).sum(-1, keepdim=True) * x}
    got = {"y": s.value}
    if s.case.train and len(x):
        want["the gradient of the tokens"] = (weights * share).sum(-1, keepdim=True) * grad
        want["the gradient of the weights"] = share * (x * grad).sum(-1, keepdim=True)
        got |= dict(zip(list(want)[1:], (s.grads["x"], s.grads["weights"]), strict=True))
    dtype = s.case.dtype or s.value.dtype
    rough = 0.05 if dtype == torch.bfloat16 else 1e-5
    pairs = {name: (got[name], w.to(dtype)) for name, w in want.items()}
    all_close(pairs, f"on {s.where}, {s.case}", rough)


def _moves(s: Seen, home: bool) -> Iterator[tuple[str, list[Call], int]]:
    """(way, calls, rows that a rank may send) of dispatch alone, or of dispatch and combine."""
    routed = int((s.case.experts(s.place) >= 0).sum())
    held = sum(map(len, _arrivals(s)))
    yield "forward", s.forward, routed + home * held
    yield "backward", s.backward, held + home * routed


def only_rows(s: Seen, way: str, log: list[Call], rows: int, width: int = D, most: int = 1) -> None:
    """Routed rows by all-to-all, and `most` exchanges of counts."""
    where = f"{s.where}, {way},"
    large = [c for c in log if c.dtype.is_floating_point]
    other = [c.op for c in large if c.op not in ("all_to_all", "send", "recv")]
    expect(not other, f"{where} moved rows with {other[:1]}, expected an all-to-all", "traffic")
    sent = sum(c.nbytes for c in large if c.op != "recv")
    said = f"{where} sent {sent} bytes of rows, expected {rows * D * 4}: only routed rows travel"
    expect(sent <= rows * width * 4, said, "traffic")
    expect(sent > 0 or s.size == 1 or rows == 0, f"{where} sent no rows", "traffic")
    small = sum(c.nbytes for c in log if not c.dtype.is_floating_point)
    expect(small <= 8 * E * s.size * most, f"{where} sent {small} bytes of counts", "traffic")


@check("dispatch")
def dispatch(answer, report):
    """Rows to their experts."""
    seen = report.on_groups(_out, answer, cases=CASES)
    seen.of(SPREAD).holds(
        "received holds the routed rows, ordered by local expert, on 1 to 4 ranks",
        _judge_arrivals,
        hint=hints(
            "sort the choices by expert, so rows for one rank lie together; exchange counts; "
            "what arrives is ordered by source rank and must be sorted by local expert. The "
            "gradient takes the same way back: an all-to-all with the sizes exchanged",
            hang="every rank takes part in every all-to-all, also one that has no tokens, and "
            "gives and takes as many rows as the counts say",
        ),
    )
    seen.of(*PLAIN).holds(
        "the same without gradients, in bf16 and float64, and for 1 and 3 choices a token",
        _judge_arrivals,
        hint=hints(
            "experts.shape[1] is k; evaluation runs under no_grad and needs the same rows",
            dtype="a buffer takes the dtype of the tokens: x.new_empty, not torch.empty",
        ),
    )
    seen.of(*PLAIN).second_call(
        "a second call leaves the first rows as they were",
        hint="a buffer kept for the next call is overwritten by it: receive into a new one",
    )
    seen.of(SKEWED).holds(
        "also where all tokens go to one rank, and others get none",
        _judge_arrivals,
        hint="all-to-all takes empty pieces; the shapes must still be right",
    )
    seen.of(SPREAD).holds(
        "only routed rows travel, once each way; a dropped choice (-1) sends nothing",
        lambda s: [only_rows(s, *moved) for moved in _moves(s, home=False)],
        hint="no padding, no all-gather of all tokens; the gradient goes back as the rows came",
    )
    report.on_groups(_refused, answer, rounds=WORLD).refused(
        "ValueError where the experts do not divide by the ranks, or one does not exist",
        hint="each rank owns num_experts / P consecutive experts; -1 is the only index below 0",
    )


@check("combine")
def combine(answer, report):
    """Rows come home; checked with the dispatch of the same file or notebook."""
    seen = report.on_groups(_home, answer, _its_dispatch(answer), cases=CASES)
    seen.of(SPREAD).holds(
        "every token gets the weighted sum of its experts' outputs, 1 to 4 ranks",
        _judge_home,
        hint="undo the sort by local expert, send the rows back the way they came, multiply by the "
        "weight of the choice, add up by token; a dropped choice adds 0",
    )
    seen.of(*PLAIN).holds(
        "the same without gradients, in bf16 and float64, and for 1 and 3 choices a token",
        _judge_home,
        hint="weights.shape[1] is k; y has the dtype of the rows",
    )
    seen.of(*PLAIN).second_call(
        "a second call leaves the first result as it was",
        hint="a buffer kept for the next call is overwritten by it: add up in a new one",
    )
    seen.of(SKEWED).holds(
        "also where all tokens go to one rank",
        _judge_home,
        hint="the rank that computes most sends most rows back",
    )
    seen.of(SPREAD).holds(
        "each row comes back once, its gradient goes out once, and nothing else moves",
        lambda s: [only_rows(s, *moved, most=2) for moved in _moves(s, home=True)],
        hint="the sizes are known since dispatch: the same all-to-all, the other way round",
    )


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
