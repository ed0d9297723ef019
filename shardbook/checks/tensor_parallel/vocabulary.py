"""Chapter 22, the vocabulary over ranks: the embedding and the loss."""

import functools
import gc
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random
from ..groups import cut, held, refusal
from ..report import check
from ..seen import Here, Seen
from .layers import ALONE, step

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


EVEN, UNEVEN = "a vocabulary that divides", "a vocabulary that does not divide"


def _embedded(answer, here: Here, case: str) -> Seen:
    if case == UNEVEN:
        full, what = _embedding(50).to(device()), f"50 rows on {here.size} ranks"
        refused = here.size > 2 and refusal(answer, full, what=what, **here.options)
        return Seen(refused=refused or "")
    full = _embedding().to(device())
    layer = answer(full, **here.options)
    seen = step(here, layer, _text(), random(*TEXT, DIM, seed=32))
    layer.zero_grad()
    with torch.no_grad():
        low = answer(_embedding().bfloat16().to(device()), **here.options)
        seen.more["bf16"] = low(_text().to(device())).cpu()
    seen.more["kept"] = torch.equal(full.weight.cpu(), _embedding().weight)
    seen.held = held(layer)
    return seen


@check("VocabParallelEmbedding")
def vocab_parallel_embedding(answer, report):
    """Rows of the table over ranks."""
    grad = random(*TEXT, DIM, seed=32)
    oracle = step(ALONE, _embedding(), _text(), grad)

    def stepped(s: Seen) -> None:
        close(s.more["after"], oracle.more["after"], f"the output after one step on {s.where}")

    def low(s: Seen) -> None:
        want = oracle.value.bfloat16()  # one row and zeros: nothing is rounded
        close(s.more["bf16"], want, f"the output in bf16 on {s.where}", 0.0)

    def memory(s: Seen) -> None:
        limit, alone = 4 * VOCAB // s.size * DIM, s.size == 1
        said = f"the layer keeps {s.held} bytes on {s.where}, its rows have {limit}"
        expect(s.held <= limit + 64 or alone, said, "memory")  # a little bookkeeping
        said = "training the shard changed the embedding it was built from"
        expect(s.more["kept"] or alone, said, "kept")

    every = report.on_groups(_embedded, answer, cases=[EVEN, UNEVEN])
    seen = every.of(EVEN)
    seen.holds(
        "the rows of the full table on 1 to 4 ranks",
        lambda s: close(s.value, oracle.value, f"the output on {s.where}"),
        hint="shift the ids by this rank's first row; an id that is elsewhere must give zeros (not "
        "row 0, nor a clamped one); then sum over the ranks.",
    )
    seen.holds(
        "one training step changes it as it changes the full table",
        stepped,
        hint="mask after the look-up, and let the gradient pass the sum unchanged (g); the "
        "gradients of a token that occurs twice add up.",
    )
    seen.holds(
        "a table in bf16 gives bf16, without gradients",
        low,
        hint="what is elsewhere counts as zeros of the table's dtype: a mask in fp32 makes all "
        "fp32.",
    )
    seen.one_collective(
        "one all_reduce of the embeddings forward, nothing backward",
        "all_reduce",
        "",
        lambda s: grad.nbytes,
        hint="no gather of the table.",
    )
    seen.holds(
        "keeps its rows only, in memory of its own",
        memory,
        hint="clone this rank's rows; a view keeps the memory of the whole table.",
    )
    every.of(UNEVEN).refused(
        "ValueError where the vocabulary does not divide",
        hint="compare the vocabulary with the number of ranks when the layer is built.",
    )


LOGITS = {"ordinary": 3.0, "large": 4e4}  # scale of the random logits; exp(89) overflows fp32
CASES = [(kind, ignore) for kind in LOGITS for ignore in (False, True)]
HALF = "bf16"


def _targets(ignore: bool) -> Tensor:
    targets = _tokens().clone()
    if ignore:
        targets[0, 1:4] = -100
        targets[3] = -100  # a whole row
    return targets


def _half_logits() -> Tensor:
    return (random(TEXT[0] * TEXT[1], VOCAB, seed=42) * 3).bfloat16()  # [tokens, V]


def _vocab_loss(answer, here: Here, case) -> Seen:
    call = functools.partial(answer, **here.options)
    if case == HALF:
        half = here.part(_half_logits(), -1)
        with torch.no_grad():
            return here.see(call, z=half, targets=_targets(True).flatten().to(device()))
    kind, ignore = case
    given = []
    for _ in range(2):  # two calls: what is kept of the first shows after the second
        z = here.part(random(*TEXT, VOCAB, seed=40) * LOGITS[kind], -1)  # not contiguous
        z = z.detach()
        given.append(weakref.ref(z))
        grad = random(*TEXT, seed=41).to(device())
        seen = here.see(call, grad, z=z, targets=_targets(ignore).to(device()))
        del z
    gc.collect()
    seen.held = sum(ref() is not None for ref in given)
    return seen


@functools.cache
def _exact(kind: str, ignore: bool) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of all logits."""
    z = (random(*TEXT, VOCAB, seed=40) * LOGITS[kind]).requires_grad_()
    targets = _targets(ignore).flatten()
    loss = F.cross_entropy(z.flatten(0, 1), targets, reduction="none").view(TEXT)
    loss.backward(random(*TEXT, seed=41))
    return loss.detach(), z.grad


def _equal(s: Seen) -> None:
    loss, dz = _exact(*s.case)
    close(s.value, loss, f"the loss on {s.where}")
    want = cut(dz, -1, s.size, s.place)
    close(s.grads["z"], want, f"the gradient of the logits on {s.where}")


def _three_sums(s: Seen) -> None:
    nbytes = 4 * TEXT[0] * TEXT[1]
    made = [(c.op, c.nbytes) for c in s.forward]
    said = ", ".join(f"{op} of {b} bytes" for op, b in made) or "no collective"
    three = made == [("all_reduce", nbytes)] * 3 or s.size == 1
    asked = f"expected three all_reduces of {nbytes} bytes"
    expect(three, f"forward makes {said}; {asked}", "traffic")
    expect(not s.backward or s.size == 1, "backward communicates", "traffic")


def _half(s: Seen) -> None:
    want = F.cross_entropy(_half_logits().float(), _targets(True).flatten(), reduction="none")
    close(s.value.float(), want, f"the loss of bf16 logits on {s.where}", 0.05)


@check("vocab_parallel_cross_entropy")
def vocab_parallel_cross_entropy(answer, report):
    """Cross-entropy from logits cut along the vocabulary."""
    every = report.on_groups(_vocab_loss, answer, cases=[*CASES, HALF])
    seen = every.of(*CASES)
    every.of(("ordinary", False)).holds(
        "F.cross_entropy per token and its gradient on 1 to 4 ranks",
        _equal,
        hint="log of the sum of exp over all ranks, minus the target's logit, which one rank has: "
        "sum both over the group; backward is softmax minus one-hot on this rank's columns.",
    )
    every.of(("large", False)).holds(
        "the same for logits of 100,000",
        _equal,
        hint="subtract the largest logit of all ranks (ReduceOp.MAX), not of this rank, before "
        "exp.",
    )
    every.of(("ordinary", True), ("large", True)).holds(
        "targets of -100 give 0",
        _equal,
        hint="a target of -100 belongs to no rank: loss 0 and gradient 0.",
    )
    every.of(("ordinary", False)).holds(
        "three all_reduces of one value a token, nothing backward",
        _three_sums,
        hint="one value a token: the maximum, the sum of exp and the target's logit.",
    )
    every.of(HALF).holds(
        "the same for bf16 logits [tokens, V/P], under no_grad",
        _half,
        hint="targets have any number of dimensions; compute in fp32, whatever the logits are.",
    )
    seen.at_most(
        "lets go of the logits with the loss",
        "keeps the logits of {} of 2 calls in memory",
        lambda s: s.held,
        lambda s: 1,
        hint="what backward needs is freed with the loss: keep no logits in a list or an "
        "attribute.",
    )
    seen.keeps_input(
        hint="z -= largest and masked_fill_ write into the caller's tensors.",
        name="leaves logits and targets as they were",
    )
