"""Chapter 44, the model over ranks: by tokens."""

import functools

import torch
from torch import Tensor, nn

from ...devices import device
from ...ranks.result import NotWritten, RankError
from ..compare import close, expect, random, total
from ..diffusion import fill
from ..groups import refusal
from ..report import Report, check
from ..seen import Here, Seen
from ..wrong import Wrong, text_of
from .block import rope as tables


class _Model(nn.Module):
    """blocks and final_layer as the contract has them; rope where asked."""

    def __init__(self, tokens: int = 24, heads: int = 12, rope: bool = True):
        from ...models.dit import DiTBlock, FinalLayer

        super().__init__()
        self.embed = nn.Linear(5, 24)
        self.time, self.label = nn.Linear(1, 24), nn.Embedding(7, 24)
        self.blocks = nn.ModuleList(DiTBlock(24, heads, 1.5) for _ in range(2))
        self.final_layer = FinalLayer(24, 5)
        fill(self)
        self.rope = rope
        cos, sin = tables(tokens, 24 // heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        c = self.time(t[:, None]) + self.label(labels)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, c, rope=(self.cos, self.sin) if self.rope else None)
        return self.final_layer(h, c).tanh()


def _model_inputs(tokens: int = 24):
    return random(2, tokens, 5, seed=1), torch.tensor([0.3, 0.8]), torch.tensor([4, 1])


PLAIN, ROTARY = "without positions", "with rotary positions"


def _ulysses(answer, here: Here, kind: str) -> Seen:
    model = _Model(rope=kind == ROTARY).to(device())
    before = _state(model)
    x, t, labels = (v.to(device()) for v in _model_inputs())
    pull = random(2, 24, 5, seed=5).to(device())

    def call(x: Tensor, t: Tensor) -> Tensor:
        return answer(model, x, t, labels, **here.options)

    seen = here.see(call, pull, module=model, x=x, t=t)
    seen.more["clean"] = _state(model) == before
    model.zero_grad()
    again = model(*[v.to(device()) for v in _model_inputs()])
    seen.more["again"] = again.detach().cpu()
    return seen


def _state(model: nn.Module) -> list:
    """What a call could leave on any module: hooks, its mode, attributes and replaced methods."""
    return [
        (
            *(len(vars(m)[f"_{k}_hooks"]) for k in ("forward", "forward_pre", "backward")),
            m.training,
            sorted(vars(m)),
            n,
        )
        for n, m in model.named_modules()
    ]


@functools.cache
def _alone(kind: str) -> Tensor:
    return _Model(rope=kind == ROTARY)(*_model_inputs()).detach()


def _output(s: Seen) -> None:
    close(s.value, _alone(s.case), f"the output on {s.where}")


def _summed(members: list[Seen]) -> None:
    """The gradients of all ranks together are those of the whole model."""
    model = _Model(rope=False)
    x, t, labels = _model_inputs()
    leaves = {"x": x.requires_grad_(), "t": t.requires_grad_()} | dict(model.named_parameters())
    (model(x, t, labels) * random(2, 24, 5, seed=5)).sum().backward()
    for name, p in leaves.items():
        got = [s.grads.get(name) for s in members]
        summed = sum((g for g in got if g is not None), torch.zeros_like(p))
        close(summed, p.grad, f"the gradient of {name}, summed over {len(members)}", 5e-5)


def _few_tokens(s: Seen) -> None:
    count, moved = total(s.forward, "all_to_all")
    most = 2 * 4 * (2 * 24 // s.size * 24 * 4)
    if s.size > 1:
        said = f"{s.where} made {count} all-to-alls for two blocks"
        expect(0 < count <= 8, said, "traffic")
        said = f"{s.where} handed them {moved} bytes, expected {most}"
        expect(moved <= most, said, "traffic")
    rest = sum(c.nbytes for c in s.forward if c.op != "all_to_all")
    expect(rest <= 2 * 24 * 24 * 4, f"{s.where} moved {rest} bytes by other calls", "traffic")


def _clean(s: Seen) -> None:
    expect(s.more["clean"], f"something is left on the model on {s.where}", "kept")
    close(s.more["again"], _alone(PLAIN), f"model(x, t, labels) afterwards on {s.where}")


@check("ulysses_dit_forward")
def ulysses_dit_forward(answer, report):
    """By tokens."""
    every = report.on_groups(_ulysses, answer, cases=[PLAIN, ROTARY])
    seen = every.of(PLAIN)
    seen.holds(
        "the full output on every rank, equal to model(x, t, labels), 1 to 4 ranks",
        _output,
        hint="cut the tokens before the first block, gather them behind the final layer; inside, "
        "attention needs all tokens of some heads",
    )
    every.of(ROTARY).holds(
        "and with rotary positions: a rank turns its tokens by THEIR positions",
        _output,
        hint="rank r's tokens start at r S/P: cut the tables as you cut the tokens",
    )
    with report.property(
        "the ranks' parameter gradients sum to the full ones",
        hint="every rank has the whole output; the gradient that goes back through the gather is a "
        "rank's own tokens only, and the final layer must see its own tokens only too",
    ):
        for members in seen.groups():
            _summed(members)
    seen.holds(
        "at most four all-to-alls a block, of a rank's own tokens",
        _few_tokens,
        hint="q, k, v in, the output back; a gather of all tokens is not Ulysses",
    )
    refused = False
    with report.property(
        "ValueError where tokens or heads do not divide",
        hint="compare the sizes before anything is sent: all-to-all needs equal parts, and ends "
        "the process where they are not",
    ):
        _refused_on_ranks(report, answer, "10 tokens")
        _refused_on_ranks(report, answer, "6 heads")
        refused = True
    with report.property(
        "the model is left as it was: no hooks, no replaced methods, same result alone",
        hint="remove what you put in, also when the model raises",
    ):
        seen.each(_clean)
        for problem in report.ranks(_ulysses_left, 4, answer, refused):
            expect(problem is None, problem or "")


class _Broken(nn.Module):
    """In place of a block: it raises, as a block out of memory does."""

    def forward(self, x: Tensor, c: Tensor, rope=None) -> Tensor:
        raise RuntimeError("the check's second block raises")


def _ulysses_left(answer, refused: bool) -> str | None:
    """What a call that raises leaves behind; refused: it raises for sizes that don't divide."""
    broken = _Model(rope=False).eval()
    broken.blocks[1] = _Broken().eval()
    inputs, few = _model_inputs(), _model_inputs(10)
    cases = [
        (broken, inputs, "the second block raised"),
        (_Model(10), few, "it was given 10 tokens for 4 ranks"),
        (_Model(heads=6), inputs, "it was given 6 heads for 4 ranks"),
    ]
    for model, given, what in cases if refused else cases[:1]:
        before = _state(model.to(device()))
        try:
            answer(model, *[v.to(device()) for v in given])
        except NotImplementedError:
            raise
        except Exception:
            pass
        if _state(model) != before:
            return f"something is left on the model after {what}"
        alone = _Model(rope=False).to(device())(*[v.to(device()) for v in inputs])
        try:
            want = _Model(rope=False)(*inputs).detach()
            close(alone, want, f"another model's output after {what}")
        except AssertionError as error:
            return str(error)
    return None


def _refused_on_ranks(report: Report, answer, what: str) -> None:
    """Every rank raises ValueError; an end in the collectives is no refusal either."""
    what_on = f"{what} on 4 ranks"
    try:
        problems = report.ranks(_ulysses_refused, 4, answer, what)
    except NotWritten:
        raise
    except RankError as error:
        how = "hung" if getattr(error, "hung", False) else text_of(error).splitlines()[0]
        raise Wrong(f"{what_on} raised no ValueError: {how}", "refusal") from error
    for problem in problems:
        expect(problem is None, problem or "", "refusal")


def _ulysses_refused(answer, what: str) -> str | None:
    model = _Model(10) if what == "10 tokens" else _Model(heads=6)
    inputs = _model_inputs(10) if what == "10 tokens" else _model_inputs()
    inputs = [v.to(device()) for v in inputs]
    return refusal(answer, model.to(device()), *inputs, what=f"{what} on 4 ranks") or None
