"""Chapter 22, what is built of the parallel layers: attention, vocabulary, sequence parallel."""

import gc
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...calls import record, summary
from ...devices import device
from ..compare import close, expect, random, same
from ..groups import cut, each, held, in_groups, only_call, refusal
from ..report import check
from .layers import linear, on_ranks, step

# Attention

ATTENTION_IN = 11  # the model's width differs from heads x head size
TOKENS = (5, 7)  # [B, S]


def _head(heads: int, kv_heads: int) -> int:
    return 4 if heads == kv_heads else 6  # the size of a head is for qkv to say


def _attention_layers(heads: int, kv_heads: int) -> tuple[nn.Linear, nn.Linear]:
    """No bias with equal numbers of heads (Llama), qkv's alone with 2 kv heads (Qwen2), or both."""
    head = _head(heads, kv_heads)
    qkv = linear(ATTENTION_IN, (heads + 2 * kv_heads) * head, heads != kv_heads, seed=20)
    return qkv, linear(heads * head, ATTENTION_IN, kv_heads in (1, 4), seed=22)


class _FullAttention(nn.Module):
    """The oracle: softmax(q k / sqrt(d)) v written out, each kv head repeated for its queries."""

    def __init__(self, qkv, out, heads, kv_heads):
        super().__init__()
        self.qkv, self.out, self.heads, self.kv_heads = qkv, out, heads, kv_heads

    def forward(self, x: Tensor) -> Tensor:
        h, kv = self.heads, self.kv_heads
        head = _head(h, kv)
        by_head = self.qkv(x).unflatten(-1, (-1, head))  # [B, S, H+2Hkv, d]
        q, k, v = by_head[..., :h, :], by_head[..., h : h + kv, :], by_head[..., h + kv :, :]
        k, v = (t.repeat_interleave(h // kv, dim=2) for t in (k, v))  # [B, S, H, d]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def _attention(answer, group, place, size, shapes) -> dict:
    found = {}
    for heads, kv_heads in shapes:
        qkv, out = (layer.to(device()) for layer in _attention_layers(heads, kv_heads))
        if heads % size or (kv_heads % size and size % kv_heads):
            what = f"{heads} heads with {kv_heads} kv heads {on_ranks(size)}"
            found[heads, kv_heads] = refusal(answer, qkv, out, heads, kv_heads, group, what=what)
            continue
        layer = answer(qkv, out, heads, kv_heads, group)
        x = random(*TOKENS, ATTENTION_IN, seed=24)
        result = step(layer, x, random(*TOKENS, ATTENTION_IN, seed=25))
        layer.zero_grad()
        with torch.no_grad():
            low = answer(qkv.bfloat16(), out.bfloat16(), heads, kv_heads, group)
            low = low(x.bfloat16().to(device())).cpu()
        found[heads, kv_heads] = result | {"held": held(layer), "bf16": low}
    return found


@check("ParallelAttention")
def parallel_attention(answer, report):
    """Heads over ranks, kv heads replicated where there are fewer of them than ranks."""
    split, shared, odd = [(12, 12), (12, 4)], [(12, 1), (12, 2)], [(10, 10)]
    x = random(*TOKENS, ATTENTION_IN, seed=24)
    grad = random(*TOKENS, ATTENTION_IN, seed=25)
    oracle = {
        shape: step(_FullAttention(*_attention_layers(*shape), *shape), x, grad)
        for shape in split + shared
    }

    def works(size, heads, kv_heads):
        return not heads % size and not (kv_heads % size and size % kv_heads)

    def ran(shapes, *sizes):
        for size, _, found in each(values, *sizes):
            for shape in shapes:
                if works(size, *shape):
                    yield (
                        size,
                        shape,
                        found[shape],
                        f"with {shape[1]} kv head{'s' * (shape[1] > 1)} {on_ranks(size)}",
                    )

    def equal(shapes):
        for _, shape, v, where in ran(shapes):
            close(v["y"], oracle[shape]["y"], f"the output {where}")
            close(v["dx"], oracle[shape]["dx"], f"the input gradient {where}", 2e-5)

    values: list = []
    hint = (
        "qkv holds q, then k, then v: cut the three apart, each by whole heads; then f, this "
        "rank's heads, its columns of out, g, and the bias once. Either layer may have none, and "
        "the size of a head is that of its part of qkv."
    )
    name = "full attention's output and input gradient, heads and kv heads split"
    with report.property(name, hint=hint):
        values += report.ranks(in_groups, 4, _attention, answer, split + shared + odd)
        equal(split)
    if not values:
        return
    hint = "with fewer kv heads than ranks a whole kv head goes to each of the ranks that need it."
    with report.property("the same where ranks share a kv head", hint=hint):
        equal(shared)
    hint = "a gradient of q, k, v or out is lost, scaled, or does not reach the parameters."
    with report.property("one training step changes it as it changes the full layer", hint=hint):
        for _, shape, v, where in ran(split):
            close(v["after"], oracle[shape]["after"], f"the output after one step {where}", 5e-5)
    hint = (
        "every rank that holds a copy of a kv head sees the gradient of its own queries only: sum "
        "it over those ranks, and over no others."
    )
    with report.property("the same where ranks share a kv head, copies in step", hint=hint):
        for _, shape, v, where in ran(shared):
            close(v["after"], oracle[shape]["after"], f"the output after one step {where}", 5e-5)
    hint = "no factor in fp32: layers of bf16 take and give bf16."
    with report.property("keeps bf16, without gradients", hint=hint):
        for _, shape, v, where in ran(split + shared):
            same(v["bf16"].dtype, torch.bfloat16, f"the output's dtype {where}")
            # weights, sums over heads and P addends are rounded to 8 bits each
            close(v["bf16"].float(), oracle[shape]["y"], f"the output in bf16 {where}", 0.05)
    hint = "one g forward, one f backward; the gradients of the copies of a kv head travel in f's "
    hint += "all-reduce or in collectives of their own."
    name = "one all_reduce forward and one backward, beside the sum for shared kv heads"
    with report.property(name, hint=hint):
        for size, (heads, kv_heads), v, where in ran(split + shared, 2, 3, 4):
            only_call(v["forward"], "all_reduce", x.nbytes, f"forward {where}")
            if kv_heads >= size:
                only_call(v["backward"], "all_reduce", x.nbytes, f"backward {where}")
                continue
            count = sum(n for n, _ in v["backward"].values())
            nbytes = sum(b for _, b in v["backward"].values())
            extra = (
                size * 4 * 2 * _head(heads, kv_heads) * (ATTENTION_IN + 1)
            )  # of every rank's k and v rows
            expect(
                1 <= count <= 5 and nbytes <= x.nbytes + extra,
                f"backward {where} makes {count} collectives of {nbytes} bytes; expected one of "
                f"{x.nbytes} and the shared kv heads' {extra}, in it or in at most four more",
            )
    hint = "clone the rows and columns of this rank's heads; keep no reference to the full layers."
    with report.property("keeps its heads only, in memory of its own", hint=hint):
        for size, (heads, kv_heads), v, where in ran(split + shared, 2, 3, 4):
            mine = heads // size + 2 * max(1, kv_heads // size)  # heads of q, k and v
            limit = (
                4
                * _head(heads, kv_heads)
                * (mine * (ATTENTION_IN + 1) + heads // size * ATTENTION_IN)
            )
            limit += 4 * ATTENTION_IN  # the whole bias of out
            slack = 256  # small tensors of bookkeeping
            expect(
                v["held"] <= limit + slack,
                f"the layer keeps {v['held']} bytes {where}, its heads have {limit}",
            )
    hint = "heads must divide by the ranks; kv heads by the ranks, or the ranks by the kv heads."
    with report.property("ValueError where heads can be neither split nor copied", hint=hint):
        for size, _, found in each(values):
            for shape in split + shared + odd:
                if not works(size, *shape):
                    expect(not found[shape], str(found[shape]))


# Vocabulary

VOCAB, DIM = 48, 7
TEXT = (5, 9)  # tokens [5, 9]


def _tokens() -> Tensor:
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(31))
    return order[: TEXT[0] * TEXT[1]].view(TEXT)  # nearly all of the vocabulary, so every rank's


def _text() -> Tensor:
    tokens = _tokens().clone()
    tokens[1] = tokens[0]  # as in any text, tokens come again
    return tokens


def _embedding(vocab: int = VOCAB) -> nn.Embedding:
    return nn.Embedding(vocab, DIM, _weight=random(vocab, DIM, seed=30))


def _embedded(answer, group, place, size) -> dict:
    full = _embedding().to(device())
    layer = answer(full, group=group)
    found = step(layer, _text(), random(*TEXT, DIM, seed=32))
    kept = torch.equal(full.weight.cpu(), _embedding().weight) or size == 1
    layer.zero_grad()
    found |= {"held": held(layer), "kept": kept}
    with torch.no_grad():
        low = answer(_embedding().bfloat16().to(device()), group=group)
        found["bf16"] = low(_text().to(device())).cpu()
    if size in (3, 4):
        full = _embedding(50).to(device())
        found["refused"] = refusal(answer, full, group=group, what=f"50 rows {on_ranks(size)}")
    return found


@check("VocabParallelEmbedding")
def vocab_parallel_embedding(answer, report):
    """Rows of the table over ranks."""
    grad = random(*TEXT, DIM, seed=32)
    oracle = step(_embedding(), _text(), grad)
    values: list = []
    hint = (
        "shift the ids by this rank's first row; an id that is elsewhere must give zeros (not row "
        "0, nor a clamped one); then sum over the ranks."
    )
    with report.property("the rows of the full table on 1 to 4 ranks", hint=hint):
        values += report.ranks(in_groups, 4, _embedded, answer)
        for size, _, found in each(values):
            close(found["y"], oracle["y"], f"the output {on_ranks(size)}")
    if not values:
        return
    hint = "mask after the look-up, and let the gradient pass the sum unchanged (g); the gradients "
    hint += "of a token that occurs twice add up."
    with report.property("one training step changes it as it changes the full table", hint=hint):
        for size, _, found in each(values):
            close(found["after"], oracle["after"], f"the output after one step {on_ranks(size)}")
    hint = "what is elsewhere counts as zeros of the table's dtype: a mask in fp32 makes all fp32."
    with report.property("a table in bf16 gives bf16, without gradients", hint=hint):
        for size, _, found in each(values):
            want = oracle["y"].bfloat16()  # one row and zeros: nothing is rounded
            close(found["bf16"], want, f"the output in bf16 {on_ranks(size)}", 0.0)
    with report.property(
        "one all_reduce of the embeddings forward, nothing backward", hint="no gather of the table."
    ):
        for _, _, found in each(values, 2, 3, 4):
            only_call(found["forward"], "all_reduce", grad.nbytes, "forward")
            only_call(found["backward"], "", 0, "backward")
    hint = "clone this rank's rows; a view keeps the memory of the whole table."
    with report.property("keeps its rows only, in memory of its own", hint=hint):
        for size, _, found in each(values, 2, 3, 4):
            limit = 4 * VOCAB // size * DIM
            expect(
                found["held"] <= limit + 64,  # a little bookkeeping
                f"the layer keeps {found['held']} bytes {on_ranks(size)}, its rows have {limit}",
            )
            expect(found["kept"], "training the shard changed the embedding it was built from")
    hint = "compare the vocabulary with the number of ranks when the layer is built."
    with report.property("ValueError where the vocabulary does not divide", hint=hint):
        for _, _, found in each(values, 3, 4):
            expect(not found["refused"], found["refused"])


LOGITS = {"ordinary": 3.0, "large": 4e4}  # scale of the random logits; exp(89) overflows fp32


def _targets(ignore: bool) -> Tensor:
    targets = _tokens().clone()
    if ignore:
        targets[0, 1:4] = -100
        targets[3] = -100  # a whole row
    return targets


def _vocab_loss(answer, group, place, size) -> dict:
    found, given = {}, []
    for kind, scale in LOGITS.items():
        for ignore in (False, True):
            full = random(*TEXT, VOCAB, seed=40) * scale
            z = cut(full, -1, size, place).to(device()).requires_grad_()  # not contiguous
            given.append(weakref.ref(z))
            before, targets = z.detach().clone(), _targets(ignore).to(device())
            with record() as forward:
                loss = answer(z, targets, group=group)
            with record() as backward:
                loss.backward(random(*TEXT, seed=41).to(device()))
            found[kind, ignore] = {
                "loss": loss.detach().cpu(),
                "dz": z.grad.cpu(),
                "forward": [(c.op, c.nbytes) for c in forward],
                "backward": summary(backward),
                "kept": torch.equal(before, z.detach())
                and bool((targets.cpu() == _targets(ignore)).all()),
            }
    del z, loss
    gc.collect()
    found["alive"] = sum(ref() is not None for ref in given)
    return found


def _half_loss(answer, group, place, size) -> dict:
    half = cut(_half_logits(), -1, size, place).to(device())
    with torch.no_grad():
        loss = answer(half, _targets(True).flatten().to(device()), group=group)
    return {"loss": loss.float().cpu()}


def _half_logits() -> Tensor:
    return (random(TEXT[0] * TEXT[1], VOCAB, seed=42) * 3).bfloat16()  # [tokens, V]


@check("vocab_parallel_cross_entropy")
def vocab_parallel_cross_entropy(answer, report):
    """Cross-entropy from logits cut along the vocabulary."""
    oracle = {}
    for kind, scale in LOGITS.items():
        for ignore in (False, True):
            z = (random(*TEXT, VOCAB, seed=40) * scale).requires_grad_()
            targets = _targets(ignore).flatten()
            loss = F.cross_entropy(z.flatten(0, 1), targets, reduction="none").view(TEXT)
            loss.backward(random(*TEXT, seed=41))
            oracle[kind, ignore] = loss.detach(), z.grad

    def equal(kind: str, ignore: bool):
        loss, dz = oracle[kind, ignore]
        for size, place, found in each(values):
            mine, where = found[kind, ignore], f"{on_ranks(size)}"
            close(mine["loss"], loss, f"the loss {where}")
            close(mine["dz"], cut(dz, -1, size, place), f"the gradient of the logits {where}")

    values: list = []
    hint = (
        "log of the sum of exp over all ranks, minus the target's logit, which one rank has: sum "
        "both over the group; backward is softmax minus one-hot on this rank's columns."
    )
    with report.property("F.cross_entropy per token and its gradient on 1 to 4 ranks", hint=hint):
        values += report.ranks(in_groups, 4, _vocab_loss, answer)
        equal("ordinary", False)
    if not values:
        return
    hint = "subtract the largest logit of all ranks (ReduceOp.MAX), not of this rank, before exp."
    with report.property("the same for logits of 100,000", hint=hint):
        equal("large", False)
    hint = "a target of -100 belongs to no rank: loss 0 and gradient 0."
    with report.property("targets of -100 give 0", hint=hint):
        equal("ordinary", True)
        equal("large", True)
    hint = "one value a token: the maximum, the sum of exp and the target's logit."
    with report.property("three all_reduces of one value a token, nothing backward", hint=hint):
        nbytes = 4 * TEXT[0] * TEXT[1]
        for _, _, found in each(values, 2, 3, 4):
            v = found["ordinary", False]
            said = ", ".join(f"{op} of {b} bytes" for op, b in v["forward"]) or "no collective"
            expect(
                v["forward"] == [("all_reduce", nbytes)] * 3,
                f"forward makes {said}; expected three all_reduces of {nbytes} bytes",
            )
            only_call(v["backward"], "", 0, "backward")
    hint = "targets have any number of dimensions; compute in fp32, whatever the logits are."
    with report.property("the same for bf16 logits [tokens, V/P], under no_grad", hint=hint):
        want = F.cross_entropy(_half_logits().float(), _targets(True).flatten(), reduction="none")
        for size, _, found in each(report.ranks(in_groups, 4, _half_loss, answer)):
            close(found["loss"], want, f"the loss of bf16 logits {on_ranks(size)}", 0.05)
    hint = "what backward needs is freed with the loss: keep no logits in a list or an attribute."
    with report.property("lets go of the logits with the loss", hint=hint):
        for _, _, found in each(values):
            alive = found["alive"]
            expect(alive <= 1, f"the logits of {alive} of 4 calls are still in memory")
    hint = "z -= largest and masked_fill_ write into the caller's tensors."
    with report.property("leaves logits and targets as they were", hint=hint):
        for _, _, found in each(values):
            for kind in oracle:
                expect(found[kind]["kept"], "logits or targets were changed")


# Sequence parallel

SEQ, WIDTH, HIDDEN = 24, 10, 36  # x is [5, 24 / ranks, 10]


def _sequence_layers(kind: str) -> tuple[nn.Module, nn.Linear, nn.Linear]:
    bias = kind == "LayerNorm"
    norm = nn.LayerNorm(WIDTH) if bias else nn.RMSNorm(WIDTH, eps=1e-5)
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_(1 - i + random(WIDTH, seed=60 + i) / 3)
    up, down = linear(WIDTH, HIDDEN, bias, seed=62), linear(HIDDEN, WIDTH, bias, seed=64)
    return norm, up, down


class _FullBlock(nn.Module):
    def __init__(self, norm, mlp_up, mlp_down):
        super().__init__()
        self.norm, self.mlp_up, self.mlp_down = norm, mlp_up, mlp_down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp_down(F.gelu(self.mlp_up(self.norm(x))))


def _sequence(answer, group, place, size) -> dict:
    found = {}
    for kind in ("LayerNorm", "RMSNorm"):
        layers = [layer.to(device()) for layer in _sequence_layers(kind)]
        before = [p.detach().clone() for layer in layers for p in layer.parameters()]
        block = answer(*layers, group=group)
        x = cut(random(5, SEQ, WIDTH, seed=66), 1, size, place)
        grad = cut(random(5, SEQ, WIDTH, seed=67), 1, size, place)
        result = step(block, x, grad, rate=0.0)
        once = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
        block(x.to(device())).backward(grad.to(device()))  # accumulates, as micro-batches do
        for n, p in block.named_parameters():
            if n in once:
                result[f"twice {n}"] = (p.grad - once[n]).cpu()
        with torch.no_grad():
            for p in block.parameters():
                p -= 0.1
        after = [p.detach() for layer in layers for p in layer.parameters()]
        block.zero_grad()
        kept = all(map(torch.equal, before, after)) or size == 1
        found[kind] = result | {"held": held(block), "kept": kept}
        with torch.no_grad():
            layers = [layer.bfloat16().to(device()) for layer in _sequence_layers(kind)]
            found[kind]["bf16"] = answer(*layers, group=group)(x.bfloat16().to(device())).cpu()
    if size in (3, 4):
        layers = (nn.LayerNorm(WIDTH), linear(WIDTH, 10), linear(10, WIDTH))
        layers = [layer.to(device()) for layer in layers]
        found["refused"] = refusal(answer, *layers, group=group, what=f"10 {on_ranks(size)}")
    return found


@check("SequenceParallelBlock")
def sequence_parallel_block(answer, report):
    """Norm and residual on S/P tokens, the MLP on hidden/P."""
    x, grad = random(5, SEQ, WIDTH, seed=66), random(5, SEQ, WIDTH, seed=67)
    kinds = ("LayerNorm", "RMSNorm")
    oracle = {k: step(_FullBlock(*_sequence_layers(k)), x, grad, rate=0.0) for k in kinds}
    cuts = {"mlp_up.weight": 0, "mlp_up.bias": 0, "mlp_down.weight": 1}

    def ran(*sizes):
        for size, place, found in each(values, *sizes):
            for kind in kinds:
                yield size, place, kind, found[kind]

    def full_grad(kind, name, size, place):
        g = oracle[kind]["grads"][name]
        return cut(g, cuts[name], size, place) if name in cuts else g

    values: list = []
    hint = (
        "norm this rank's tokens, all-gather the sequence (dim 1), up and gelu, down, then "
        "reduce-scatter the partial sums along dim 1; the bias and x are added after it, once."
    )
    with report.property("the full block's output for this rank's tokens", hint=hint):
        values += report.ranks(in_groups, 4, _sequence, answer)
        for size, place, kind, v in ran():
            y = cut(oracle[kind]["y"], 1, size, place)
            close(v["y"], y, f"the output with {kind} {on_ranks(size)}")
    if not values:
        return
    hint = "without gradients, and in evaluation, the block computes the same."
    with report.property("the same output under no_grad", hint=hint):
        for size, place, kind, v in ran():
            y = cut(oracle[kind]["y"], 1, size, place)
            close(v["after"], y, f"the output under no_grad with {kind} {on_ranks(size)}")
    with report.property("and in bf16", hint="layers and tokens of bf16 give bf16."):
        for size, place, kind, v in ran():
            where = f"with {kind} {on_ranks(size)}"
            same(v["bf16"].dtype, torch.bfloat16, f"the output's dtype {where}")
            # tokens, products and P addends are rounded to 8 bits each
            y = cut(oracle[kind]["y"], 1, size, place)
            close(v["bf16"].float(), y, f"the output in bf16 {where}", 0.05)
    hint = "backward mirrors forward: the all-gather's gradient is reduce-scattered, and back."
    with report.property("the full block's input gradient for this rank's tokens", hint=hint):
        for size, place, kind, v in ran():
            dx = cut(oracle[kind]["dx"], 1, size, place)
            close(v["dx"], dx, f"the input gradient with {kind} {on_ranks(size)}", 2e-5)
    hint = "every rank sees all tokens in the MLP: these gradients are whole without a sum."
    with report.property("the full block's gradients of mlp_up and mlp_down.weight", hint=hint):
        for size, place, kind, v in ran():
            for name in cuts:
                if name in oracle[kind]["grads"]:
                    g = full_grad(kind, name, size, place)
                    expect(name in v["grads"], f"{name} has no gradient {on_ranks(size)}")
                    close(v["grads"][name], g, f"{name}.grad {on_ranks(size)}", 2e-5)
    hint = (
        "norm and mlp_down.bias act on this rank's tokens only, so each rank has a part of their "
        "gradient: sum it over the group (sum, not mean), of every backward pass, once."
    )
    with report.property("gradients of norm and mlp_down.bias summed over the group", hint=hint):
        for size, place, kind, v in ran():
            for name in sorted(oracle[kind]["grads"].keys() - cuts.keys()):
                g = full_grad(kind, name, size, place)
                expect(name in v["grads"], f"{name} has no gradient {on_ranks(size)}")
                close(v["grads"][name], g, f"{name}.grad {on_ranks(size)}", 2e-5)
    hint = (
        "sum each backward pass's gradient, not what .grad has accumulated: a hook after "
        "accumulation sums the first pass again."
    )
    with report.property("a second backward pass adds the same gradients again", hint=hint):
        for size, place, kind, v in ran():
            for name in oracle[kind]["grads"]:
                g = full_grad(kind, name, size, place)
                close(v[f"twice {name}"], g, f"what the second pass adds to {name}.grad", 4e-5)
    hint = "an all-gather and a reduce-scatter each way: an all_reduce of [B, S, D] moves the same "
    hint += "bytes but leaves the norm's tokens whole on every rank."
    name = "all_gather and reduce_scatter of [B, S, D] each way, beside sums of D values"
    with report.property(name, hint=hint):
        for _, _, kind, v in ran(2, 3, 4):
            pair = {"all_gather": (1, x.nbytes), "reduce_scatter": (1, x.nbytes)}
            large = {op: b for op, b in v["backward"].items() if op != "all_reduce"}
            expect(v["forward"] == pair, f"forward makes {v['forward']}, expected {pair}")
            expect(large == pair, f"backward makes {large}, expected {pair}")
            count, nbytes = v["backward"].get("all_reduce", (0, 0))
            limit = 3 if kind == "LayerNorm" else 1  # norm.weight, norm.bias, mlp_down.bias
            expect(
                count <= limit and nbytes <= 4 * WIDTH * limit,
                f"backward sums {nbytes} bytes in {count} calls, expected {4 * WIDTH * limit}",
            )
    hint = "clone the slices; only the norm and mlp_down.bias are whole on every rank."
    with report.property("keeps its shard only, in memory of its own", hint=hint):
        for size, _, kind, v in ran(2, 3, 4):
            limit = 8 * WIDTH * HIDDEN // size + (
                4 * (HIDDEN // size + 3 * WIDTH) if kind == "LayerNorm" else 4 * WIDTH
            )
            expect(
                v["held"] <= limit + 64,
                f"the block keeps {v['held']} bytes {on_ranks(size)}, its shard has {limit}",
            )
            expect(v["kept"], "training the block changed the layers it was built from")
    hint = "compare the hidden size with the number of ranks when the block is built."
    with report.property("ValueError where the hidden size does not divide", hint=hint):
        for _, _, found in each(values, 3, 4):
            expect(not found["refused"], found["refused"])
