"""Chapter 44: the port's real-valued rotary positions, the parallel block, and preference."""

import math

import torch
from torch import Tensor, nn

from .. import calls
from ..devices import device
from ..ranks.result import NotWritten, RankError
from .compare import close, expect, random, refuses, same, total, unchanged
from .diffusion import block_by_formula, fill, narrow, turn
from .groups import held, last_ranks, refusal, tensors_of
from .report import Report, check
from .tensors import told
from .wrong import Wrong, text_of

SIZES = (1, 2, 3, 4)  # group sizes; the groups are the last ranks, so their first is not rank 0


# ---- rotary positions


def _tables(positions: Tensor, split) -> tuple[Tensor, Tensor]:
    columns = []
    for axis, channels in enumerate(split):
        for pair in range(channels // 2):
            angle = positions[:, axis].double() * 10_000 ** (-2 * pair / channels)
            columns += [angle, angle]
    angles = torch.stack(columns, dim=1)
    return angles.cos().float(), angles.sin().float()


@check("rope_3d")
def rope_3d(answer, report):
    """Tables over frames, rows and columns."""
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(5))
    with report.property(
        "each axis turns its own block of channels, pair (2i, 2i+1) by one angle",
        hint="the angle is position * 10000^(-2i / channels of the axis); both channels of a pair "
        "hold it; the blocks stand in the order frame, row, column",
    ):
        for split in ((4, 6, 2), (2, 2, 8), (0, 6, 6), (12, 0, 0)):
            with unchanged("rope_3d", grid):
                cos, sin = answer(grid.to(device()), 12, split)
            wanted = _tables(grid, split)
            close(cos, wanted[0], f"cos for a split of {split}")
            close(sin, wanted[1], f"sin for a split of {split}")
    with report.property(
        "any positions, in any order: a rank's part of the tokens starts anywhere",
        hint="read the positions, do not count from 0",
    ):
        some = torch.tensor([[7, 4, 2], [3, 6, 3], [2, 9, 1], [5, 5, 8]])
        cos, sin = answer(some.to(device()), 8, (2, 4, 2))
        wanted = _tables(some, (2, 4, 2))
        close(cos, wanted[0], "cos")
        close(sin, wanted[1], "sin")
        again, wanted = (
            answer(some.flip(0).to(device()), 8, (2, 4, 2)),
            _tables(some.flip(0), (2, 4, 2)),
        )
        close(again[0], wanted[0], "cos of as many other positions, asked next,")
        one = torch.tensor([[3, 1, 2]])
        close(
            answer(one.to(device()), 2, (0, 2, 0))[1],
            _tables(one, (0, 2, 0))[1],
            "sin of one token",
        )
    with report.property(
        "fp32 tables from integer or fp32 positions; no float64, no complex numbers",
        hint="make the frequencies in fp32 on the positions' device",
    ):
        for positions in (grid, grid.float()):
            cos, sin = narrow(lambda p=positions: answer(p.to(device()), 12, (4, 4, 4)), "rope_3d")
            same((cos.dtype, sin.dtype), (torch.float32,) * 2, "the dtypes of the tables")
        tables = told(answer)(grid.to("meta"), 12, (4, 4, 4))
        where = [t.device.type for t in tables]
        same(where, ["meta"] * 2, "the devices of the tables for positions on meta")
    with report.property(
        "ValueError for an odd split, or one that does not sum to head_dim",
        hint="channels turn in pairs",
    ):
        refuses(answer, grid, 12, (5, 5, 2), what="a split of (5, 5, 2)")
        refuses(answer, grid, 12, (4, 4, 2), what="a split of 10 channels for a head of 12")


@check("apply_rope")
def apply_rope(answer, report):
    """Turn queries and keys."""
    angle = random(7, 5, seed=1).repeat_interleave(2, dim=1)
    cos, sin = angle.cos(), angle.sin()
    x = random(2, 3, 7, 10, seed=2)
    with report.property(
        "pair (a, b) becomes (a cos - b sin, b cos + a sin)",
        hint="neighbours 2i and 2i+1 are a pair here; other code pairs i with i + D/2",
    ):
        inputs = [t.to(device()) for t in (x, cos, sin)]
        with unchanged("apply_rope", *inputs):
            got = answer(*inputs)
        close(got, turn(x, cos, sin), "the turned x")
        one = [t.to(device()) for t in (x[:1, :1, :1, :2], cos[:1, :2], sin[:1, :2])]
        close(answer(*one), turn(*one), "the turned x of one sample, head and token")
        strided = x.transpose(1, 2).contiguous().transpose(1, 2).to(device())
        close(answer(strided, *inputs[1:]), turn(x, cos, sin), "the result for a strided x")
    with report.property(
        "lengths are kept, and scores depend on the distance of positions only",
        hint="cos and sin of the same angle for both channels of a pair",
    ):
        got = answer(x.to(device()), cos.to(device()), sin.to(device())).cpu()
        close(got.norm(dim=-1), x.norm(dim=-1), "the length of each vector")
    with report.property(
        "x gets its gradient", hint="queries and keys are learned: nothing may leave the graph"
    ):
        leaf, weight = x.to(device()).requires_grad_(), random(2, 3, 7, 10, seed=3)
        out = (answer(leaf, *inputs[1:]) * weight.to(device())).sum()
        expect(out.requires_grad, "the result has no graph")
        (got,) = torch.autograd.grad(out, leaf)
        close(got, turn(weight, cos, -sin), "the gradient of x")
    with report.property(
        "the result has x's dtype; no float64, no complex numbers",
        hint="compute in fp32, convert back",
    ):
        for dtype in (torch.float32, torch.bfloat16):
            low = x.to(dtype).to(device())
            got = narrow(lambda v=low: answer(v, cos.to(device()), sin.to(device())), "apply_rope")
            same(got.dtype, dtype, "the dtype")
        want = turn(x.bfloat16().float(), cos, sin)
        close(got.float(), want, "the result in bf16", 2e-2)
        rounding = want.abs() / 256 + 1e-6  # half of bf16's last place, at most
        more = int(((got.cpu().float() - want).abs() > 1.01 * rounding).sum())
        expect(not more, f"{more} of {want.numel()} results in bf16 were rounded more than once")


# ---- the block over ranks


def _block(heads: int = 12, hidden: float = 2.0) -> nn.Module:
    from ..models.dit import DiTBlock  # chapter 43's, whose formula is checked there

    return fill(DiTBlock(24, heads, hidden))


def _rope(tokens: int, channels: int):
    angle = random(tokens, channels // 2, seed=3).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


X, C = (2, 12, 24), (2, 24)


def _tensor_parallel(answer):
    results = []
    for size, group, rank in last_ranks():
        full = _block().to(device())
        block = answer(full, group)
        own = {n: p.detach().cpu() for n, p in block.named_parameters()}
        theirs = {p.untyped_storage().data_ptr(): n for n, p in full.named_parameters()}
        kept = {t.untyped_storage().data_ptr() for t in tensors_of(block)}
        shared, nbytes = [n for at, n in theirs.items() if at in kept], held(block)
        x, c = random(*X, seed=1).to(device()), random(*C, seed=2).to(device())
        x.requires_grad_(), c.requires_grad_()
        rope = tuple(r.to(device()) for r in _rope(X[1], 2))
        with calls.record() as log:
            out = block(x, c, rope=rope)
        forward = list(log)
        with calls.record() as log:
            (out * random(*X, seed=4).to(device())).sum().backward()
        grads = {n: p.grad for n, p in block.named_parameters()}
        grads = {n: None if g is None else g.cpu() for n, g in grads.items()}
        backward = list(log)
        with torch.no_grad():
            again = block(x.flip(1), random(*C, seed=6).to(device()))
        tensors = [t.detach().cpu() for t in (out, x.grad, c.grad, again)]
        results.append((size, rank, tensors, grads, own, shared, nbytes, forward, backward))
    return results


def _cut(name: str, g: Tensor, size: int, rank: int) -> Tensor:
    """This rank's part of a full parameter or gradient."""
    if name.startswith("attn.qkv"):
        return torch.cat([part.chunk(size)[rank] for part in g.chunk(3)])
    if name.startswith("mlp.fc1"):
        return g.chunk(size)[rank]
    if name in ("attn.proj.weight", "mlp.fc2.weight"):
        return g.chunk(size, dim=1)[rank]
    return g


@check("TensorParallelDiTBlock")
def tensor_parallel_dit_block(answer, report):
    """By heads and hidden channels."""
    full = _block()
    x, c = random(*X, seed=1).requires_grad_(), random(*C, seed=2).requires_grad_()
    out = full(x, c, rope=_rope(X[1], 2))
    (out * random(*X, seed=4)).sum().backward()
    oracle = block_by_formula(full, x.detach(), c.detach(), 12, _rope(X[1], 2))
    second = block_by_formula(full, x.detach().flip(1), random(*C, seed=6), 12)
    wanted = {n: p.grad for n, p in full.named_parameters()}
    with report.property(
        "the output equals the full block's on 1 to 4 ranks",
        hint="a fused qkv is three matrices: cut q, k and v apart, each by head. Sum proj and fc2 "
        "over ranks BEFORE the gate, and add their bias once, after the sum",
    ):
        values = report.ranks(_tensor_parallel, 4, answer)
        for results in values:
            for size, rank, tensors, *_ in results:
                where = f"on rank {rank} of {size}"
                close(tensors[0], oracle, f"the output {where}", 3e-5)
                what = "the output of a second call, with another c and without rope,"
                close(tensors[3], second, f"{what} {where}", 3e-5)
    with report.property(
        "gradients of x and c, and of what is whole (adaLN, biases of proj and fc2), are full",
        hint="x enters qkv and fc1 on every rank: its gradient must be summed there (f), right "
        "after the modulation, so that the modulation's gradient is full as well",
    ):
        for results in values:
            for size, rank, tensors, grads, *_ in results:
                where = f"on rank {rank} of {size}"
                close(tensors[1], x.grad, f"the gradient of x {where}", 1e-4)
                close(tensors[2], c.grad, f"the gradient of c {where}", 1e-4)
                for name in ("adaLN_modulation.1.weight", "attn.proj.bias", "mlp.fc2.bias"):
                    expect(grads.get(name) is not None, f"{name} has no gradient {where}")
                    # sums over tokens of values of tens, in another order on every device
                    close(grads[name], wanted[name], f"the gradient of {name} {where}", 5e-4)
    with report.property(
        "every shard is that part of the full block's parameter, unscaled",
        hint="the same names as the full block; a bias that is added once is held whole: divided "
        "by the ranks it would learn another step than the block's",
    ):
        for results in values:
            for size, rank, _, _, own, *_ in results:
                where = f"on rank {rank} of {size}"
                same(set(own), set(wanted), f"the parameter names {where}")
                for name, p in full.named_parameters():
                    part = _cut(name, p.detach(), size, rank)
                    close(own[name], part, f"{name} {where}", 0.0)
    with report.property(
        "every shard's gradient is that shard of the full gradient",
        hint="the same names as the full block; weights are cut, not copied",
    ):
        for results in values:
            for size, rank, _, grads, *_ in results:
                where = f"on rank {rank} of {size}"
                for name, g in wanted.items():
                    close(
                        grads[name], _cut(name, g, size, rank), f"gradient of {name} {where}", 5e-4
                    )
    with report.property(
        "a rank holds its shards only, in memory of their own",
        hint="a slice of the full weight keeps the whole weight alive: clone it; keep no reference "
        "to the full block and no full copies",
    ):
        for results in values:
            for size, rank, _, _, _, shared, nbytes, *_ in results:
                want = 4 * sum(_cut(n, g, size, rank).numel() for n, g in wanted.items())
                where = f"rank {rank} of {size}"
                expect(not shared, f"{where} shares memory with {shared[:1]} of the full block")
                expect(nbytes <= want, f"{where} holds {nbytes} bytes, expected at most {want}")
    with report.property(
        "two all-reduces of B S D forward, two backward, nothing else",
        hint="one after proj, one after fc2; backward one before each of qkv and fc1",
    ):
        nbytes = 4 * math.prod(X)
        for results in values:
            for size, rank, *_, forward, backward in results:
                for name, log in (("forward", forward), ("backward", backward)):
                    count, moved = total(log, "all_reduce")
                    where = f"rank {rank} of {size}, {name}:"
                    other = [c.op for c in log if c.op != "all_reduce"]
                    expect(not other, f"{where} used {other[:1]}")
                    if size > 1:
                        same(count, 2, f"{where} the number of all-reduces")
                        same(moved, 2 * nbytes, f"{where} bytes")
    with report.property(
        "ValueError where heads or hidden channels do not divide", hint="say so when it is built"
    ):
        for problem in report.ranks(_tp_refused, 4, answer):
            expect(problem is None, problem or "")


def _tp_refused(answer) -> str | None:
    try:
        refuses(answer, _block(heads=6).to(device()), what="6 heads on 4 ranks")
        refuses(answer, _block(hidden=1.25).to(device()), what="30 hidden channels on 4 ranks")
    except AssertionError as error:
        return str(error)
    return None


# ---- the model over ranks


class _Model(nn.Module):
    """blocks and final_layer as the contract has them; rope where asked."""

    def __init__(self, tokens: int = 24, heads: int = 12, rope: bool = True):
        from ..models.dit import DiTBlock, FinalLayer

        super().__init__()
        self.embed = nn.Linear(5, 24)
        self.time, self.label = nn.Linear(1, 24), nn.Embedding(7, 24)
        self.blocks = nn.ModuleList(DiTBlock(24, heads, 1.5) for _ in range(2))
        self.final_layer = FinalLayer(24, 5)
        fill(self)
        self.rope = rope
        cos, sin = _rope(tokens, 24 // heads)
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


def _ulysses(answer, rope: bool):
    results = []
    for size, group, rank in last_ranks():
        model = _Model(rope=rope).to(device())
        before = _state(model)
        x, t, labels = (v.to(device()) for v in _model_inputs())
        leaves = [*model.parameters(), x.requires_grad_(), t.requires_grad_()]
        with calls.record() as log:
            out = answer(model, x, t, labels, group)
        forward = list(log)
        (out * random(2, 24, 5, seed=5).to(device())).sum().backward()
        grads = [torch.zeros(p.shape) if p.grad is None else p.grad.cpu() for p in leaves]
        clean = _state(model) == before
        model.zero_grad()
        again = model(*[v.to(device()) for v in _model_inputs()])
        results.append(
            (size, rank, out.detach().cpu(), grads, forward, clean, again.detach().cpu())
        )
    return results


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


@check("ulysses_dit_forward")
def ulysses_dit_forward(answer, report):
    """By tokens."""
    with report.property(
        "the full output on every rank, equal to model(x, t, labels), 1 to 4 ranks",
        hint="cut the tokens before the first block, gather them behind the final layer; inside, "
        "attention needs all tokens of some heads",
    ):
        values = report.ranks(_ulysses, 4, answer, False)
        want = _Model(rope=False)(*_model_inputs()).detach()
        for results in values:
            for size, rank, out, *_ in results:
                close(out, want, f"the output on rank {rank} of {size}")
    with report.property(
        "and with rotary positions: a rank turns its tokens by THEIR positions",
        hint="rank r's tokens start at r S/P: cut the tables as you cut the tokens",
    ):
        roped = report.ranks(_ulysses, 4, answer, True)
        want = _Model()(*_model_inputs()).detach()
        for results in roped:
            for size, rank, out, *_ in results:
                close(out, want, f"the output on rank {rank} of {size}")
    with report.property(
        "the ranks' parameter gradients sum to the full ones",
        hint="every rank has the whole output; the gradient that goes back through the gather is a "
        "rank's own tokens only, and the final layer must see its own tokens only too",
    ):
        model = _Model(rope=False)
        x, t, labels = _model_inputs()
        leaves = dict(model.named_parameters()) | {"x": x.requires_grad_(), "t": t.requires_grad_()}
        (model(x, t, labels) * random(2, 24, 5, seed=5)).sum().backward()
        by_rank = {(r[0], r[1]): r[3] for results in values for r in results}
        for size in SIZES:
            parts = [by_rank[size, rank] for rank in range(size)]
            for (name, p), *grads in zip(leaves.items(), *parts, strict=True):
                close(sum(grads), p.grad, f"the gradient of {name}, summed over {size}", 5e-5)
    with report.property(
        "at most four all-to-alls a block, of a rank's own tokens",
        hint="q, k, v in, the output back; a gather of all tokens is not Ulysses",
    ):
        for results in values:
            for size, rank, _, _, forward, *_ in results:
                count, moved = total(forward, "all_to_all")
                where = f"rank {rank} of {size}"
                most = 2 * 4 * (2 * 24 // size * 24 * 4)
                if size > 1:
                    expect(0 < count <= 8, f"{where} made {count} all-to-alls for two blocks")
                    expect(moved <= most, f"{where} handed them {moved} bytes, expected {most}")
                rest = sum(c.nbytes for c in forward if c.op != "all_to_all")
                expect(rest <= 2 * 24 * 24 * 4, f"{where} moved {rest} bytes by other calls")
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
        want = _Model(rope=False)(*_model_inputs()).detach()
        for results in values:
            for size, rank, *_, clean, again in results:
                expect(clean, f"something is left on the model on rank {rank} of {size}")
                close(again, want, f"model(x, t, labels) afterwards on rank {rank} of {size}")
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


# ---- preference


@check("video_dpo_loss")
def video_dpo_loss(answer, report):
    """Diffusion-DPO."""
    errors = [random(6, seed=s).abs() for s in (1, 2, 3, 4)]

    def exact(win, lose, ref_win, ref_lose, beta):
        inside = -beta * ((win - ref_win) - (lose - ref_lose))
        return (1 + torch.exp(-inside)).log().mean()  # -log sigmoid

    with report.property(
        "mean of -logsigmoid(-beta ((win - ref win) - (lose - ref lose)))",
        hint="errors, not log-likelihoods: a SMALLER error on the winner is better",
    ):
        for beta in (0.1, 1.0, 5.0):
            got = answer(*[e.to(device()) for e in errors], beta)
            want = exact(*[e.double() for e in errors], beta).float()
            same(tuple(got.shape), (), "the shape of the loss")
            close(got, want, f"the loss at beta {beta}")
    with report.property(
        "log 2 where the model equals its reference", hint="then nothing is preferred yet"
    ):
        a, b = (e.to(device()) for e in errors[:2])
        close(answer(a, b, a, b, 3.0), torch.tensor(math.log(2.0)), "the loss")
    with report.property(
        "its gradient lowers the winner's error and raises the loser's",
        hint="the reference is a constant",
    ):
        leaves = [e.to(device()).requires_grad_() for e in errors[:2]]
        loss = answer(*leaves, *[e.to(device()) for e in errors[2:]], 2.0)
        win, lose = torch.autograd.grad(loss, leaves)
        expect(bool((win > 0).all() and (lose < 0).all()), "the gradients point the wrong way")
        exact_leaves = [e.double().requires_grad_() for e in errors[:2]]
        want = torch.autograd.grad(
            exact(*exact_leaves, *[e.double() for e in errors[2:]], 2.0), exact_leaves
        )
        close(win, want[0].float(), "the gradient of the winner's error")
        close(lose, want[1].float(), "the gradient of the loser's error")
    with report.property(
        "large differences do not overflow", hint="logsigmoid, not log of sigmoid"
    ):
        big = [torch.full((3,), v, device=device()) for v in (5e3, 0.0, 0.0, 0.0)]
        close(answer(*big, 1.0), torch.tensor(5e3), "the loss for a difference of 5000")
