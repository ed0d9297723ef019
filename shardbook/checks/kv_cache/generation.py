"""Chapter 32, what is computed with the cache: attention of new queries, and generation."""

import torch
from torch import Tensor, nn

from ...devices import device
from ..compare import close, expect, random, same, unchanged
from ..report import check

B, HKV, D = 3, 2, 5


def _rows(q, keys, values, lengths, offsets):
    """Row by row, query by query, in float64: what each query may see."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            see = min(int(lengths[b]), int(offsets[b]) + i + 1)
            for h in range(q.shape[1]):
                if see > 0:
                    k, v = (t[b, h // group, :see].double() for t in (keys, values))
                    w = (k @ q[b, h, i].double() * q.shape[-1] ** -0.5).softmax(0)
                    out[b, h, i] = w @ v
    return out.float()


@check("cached_attention")
def cached_attention(answer, report):
    """New queries, old keys."""

    def judge(
        heads: int, new: int, total: int, lengths, offset, what: str,
        kv: int = HKV, d: int = D, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        q = random(B, heads, new, d, seed=3, dtype=dtype)
        keys, values = (random(B, kv, total, d, seed=s, dtype=dtype) for s in (4, 5))
        offsets = offset if isinstance(offset, list) else [offset] * B
        want = _rows(q, keys, values, lengths, offsets)
        given = torch.tensor(offset).to(device()) if isinstance(offset, list) else offset
        args = [t.to(device()) for t in (q, keys, values, torch.tensor(lengths))]
        with unchanged("cached_attention", *args):
            got = answer(*args, given)
        close(got, want.to(dtype), what, 1e-5 if dtype == torch.float32 else 5e-2)

    with report.property(
        "one new token sees every key so far",
        hint="a causal mask aligned to the top left would let it see the first key only",
    ):
        judge(2, 1, 9, [9] * B, 8, "one query, 9 keys")
        judge(2, 1, 1, [1] * B, 0, "one query, one key")
        judge(2, 1, 9, [9] * B, 8, "one query, 9 keys in bf16", dtype=torch.bfloat16)
    with report.property(
        "new tokens are causal among themselves",
        hint="query i stands at position offset + i and sees keys up to it",
    ):
        judge(2, 4, 9, [9] * B, 5, "4 queries, 9 keys")
        judge(2, 6, 6, [6] * B, 0, "prefill of 6")
    with report.property(
        "grouped queries: head h reads kv head h // (H / Hkv)",
        hint="neighbouring query heads share a kv head",
    ):
        judge(6, 3, 8, [8] * B, 5, "6 heads on 2 kv heads")
        judge(6, 3, 8, [8] * B, 5, "6 heads of 8 channels on 3 kv heads", kv=3, d=8)
    with report.property(
        "every row has its own length and its own position",
        hint="one position for all rows lets short rows see keys that are not theirs",
    ):
        judge(4, 1, 9, [9, 4, 6], [8, 3, 5], "rows of 9, 4 and 6")
        judge(4, 3, 9, [9, 4, 6], [6, 1, 3], "rows of 9, 4 and 6, 3 new tokens")
    with report.property(
        "a row of which fewer keys are valid than there are new tokens",
        hint="lengths and offset are two limits: a key is seen below both",
    ):
        judge(4, 3, 9, [9, 7, 6], [6, 5, 5], "rows with 3, 2 and 1 valid new tokens")
    with report.property(
        "a row that sees no key gives 0",
        hint="a softmax over nothing is nan: what is masked in every place must become 0",
    ):
        judge(4, 1, 9, [0, 4, 6], [0, 3, 5], "a row of length 0")
    with report.property(
        "keys beyond a row's length are never seen, whatever stands there",
        hint="mask before the softmax; what is behind the length may be anything",
    ):
        q = random(B, 2, 1, D, seed=6)
        keys, values = (random(B, HKV, 7, D, seed=s) for s in (7, 8))
        want = _rows(q, keys, values, [3, 5, 7], [2, 4, 6])
        for row, length in ((0, 3), (1, 5)):
            keys[row, :, length:] = 1e4
            values[row, :, length:] = 1e4
        args = [t.to(device()) for t in (q, keys, values, torch.tensor([3, 5, 7]))]
        close(answer(*args, torch.tensor([2, 4, 6]).to(device())), want, "out")


# Generation


class _Toy(nn.Module):
    """A small causal model whose next token depends on all tokens and on their positions."""

    def __init__(self, vocab: int = 13, dim: int = 8, layers: int = 2, limit: int = 64):
        super().__init__()
        self.limit, self.calls = limit, []
        self.rooms: list = []  # the lengths of the caches that were asked for
        self.recorded = False  # whether a call would have recorded a graph

        def weight(*shape, seed):
            return nn.Parameter(random(*shape, seed=seed), requires_grad=False)

        self.embed, self.place = weight(vocab, dim, seed=11), weight(limit, dim, seed=12)
        self.mix = nn.ParameterList(weight(3, dim, dim, seed=20 + i) for i in range(layers))
        self.out = weight(dim, vocab, seed=13)

    def new_cache(self, batch: int, max_len: int):
        self.rooms.append(max_len)
        return _Room(len(self.mix), batch, max_len, self.embed.shape[1], self.embed.device)

    def forward(self, tokens: Tensor, cache=None) -> Tensor:
        self.calls.append(tuple(tokens.shape))
        self.recorded |= torch.is_grad_enabled()
        expect(int(tokens.min()) >= 0, "the model was given a -1, which is padding and no token")
        cache = cache or self.new_cache(*tokens.shape)
        start, new = cache.length.clone(), tokens.shape[1]
        if int(start.max()) + new > cache.max_len:
            raise ValueError("the cache of the check's model is full")
        at = start[:, None] + torch.arange(new, device=tokens.device)  # [B, S]
        x = self.embed[tokens] + self.place[at]
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        sees = torch.arange(cache.max_len, device=tokens.device) <= at[..., None]  # [B, S, T]
        for i, (wq, wk, wv) in enumerate(self.mix):
            cache.keys[i][rows, at], cache.values[i][rows, at] = x @ wk, x @ wv
            scores = (x @ wq) @ cache.keys[i].transpose(1, 2) / 3
            weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            x = x + torch.tanh(weights @ cache.values[i])
        cache.length = start + new
        return x @ self.out


class _Room:
    def __init__(self, layers: int, batch: int, max_len: int, dim: int, where):
        shape = (layers, batch, max_len, dim)
        self.keys, self.values = torch.zeros(shape, device=where), torch.zeros(shape, device=where)
        self.length = torch.zeros(batch, dtype=torch.int64, device=where)
        self.max_len = max_len

    def truncate(self, lengths):
        self.length = torch.as_tensor(lengths, device=self.length.device).expand_as(self.length)
        self.length = self.length.clone()


def _without_cache(model: _Toy, row: Tensor, new: int, eos: int | None) -> list[int]:
    """One row alone, the whole sequence again for every token."""
    tokens = row.tolist()
    out = []
    for _ in range(new):
        if eos is not None and eos in out:
            out.append(eos)
            continue
        logits = model(torch.tensor([tokens], device=row.device))[0, -1]
        out.append(int(logits.argmax()))
        tokens.append(out[-1])
    return out


def _prompt(rows: int, width: int, pads: list[int], seed: int) -> Tensor:
    prompt = (random(rows, width, seed=seed) * 100).long().abs() % 13
    for row, pad in enumerate(pads):
        prompt[row, :pad] = -1
    return prompt.to(device())


def _generates(answer, prompt: Tensor, new: int, eos: int | None = None, model=None) -> None:
    model = model or _Toy().to(device())
    with unchanged("generate", prompt):
        got = answer(model, prompt, new, eos)
    rows, width = prompt.shape
    same(tuple(got.shape), (rows, width + new), "the shape of the result")
    close(got[:, :width], prompt.cpu(), "the prompt's part of the result", 0.0)
    for row in range(rows):
        want = _without_cache(model, prompt[row][prompt[row] >= 0], new, eos)
        same(got[row, width:].tolist(), want, f"the new tokens of row {row}")


@check("generate")
def generate(answer, report):
    """Greedy, with a cache."""
    with report.property(
        "equals the run without a cache, token by token",
        hint="after prefill the model gets one token, at the position behind the last one",
    ):
        _generates(answer, _prompt(1, 5, [0], 1), 9)
        _generates(answer, _prompt(3, 4, [0, 0, 0], 2), 7)
        _generates(answer, _prompt(2, 1, [0, 0], 3), 6)
    with report.property(
        "left-padded rows equal the same rows alone",
        hint="a row's first real token stands at position 0: padding is neither seen nor counted",
    ):
        _generates(answer, _prompt(3, 6, [0, 2, 5], 4), 8)
        _generates(answer, _prompt(2, 4, [3, 1], 5), 5)
    with report.property(
        "after eos a row is filled with eos, the others go on",
        hint="keep a flag for each row",
    ):
        prompt = _prompt(4, 5, [0, 1, 0, 3], 6)
        model = _Toy().to(device())
        firsts = [_without_cache(model, row[row >= 0], 9, None) for row in prompt]
        for eos in (firsts[0][2], firsts[3][1]):
            _generates(answer, prompt, 9, eos)
        _generates(answer, _prompt(4, 5, [0, 1, 0, 3], 11), 9, 0)  # 0 is a token like others
    with report.property(
        "prefill once, then one token a step",
        hint="the cache is there so that old tokens are not computed again; it needs room for the "
        "prompt and the new tokens",
    ):
        model = _Toy().to(device())
        answer(model, _prompt(2, 5, [0, 0], 7), 6)
        expect(
            model.calls[0] == (2, 5) and all(s == 1 for _, s in model.calls[1:]),
            f"the model was called with lengths {[s for _, s in model.calls]}, expected 5, 1, 1, …",
        )
        for pads, eos in (([0, 0], None), ([0, 3], None), ([0, 0], 12)):
            model = _Toy().to(device())
            answer(model, _prompt(2, 5, pads, 7), 6, eos)
            seen, room = sum(b * s for b, s in model.calls), max(model.rooms, default=0)
            what = "for 2 rows of 5 and 6 tokens"
            expect(seen <= 22, f"the model computed {seen} positions {what}, expected at most 22")
            expect(room <= 12, f"it asked for a cache of {room} positions, expected at most 12")
    with report.property(
        "a second prompt starts anew",
        hint="ask the model for a new cache in every call: an old one is full of other tokens",
    ):
        model = _Toy().to(device())
        _generates(answer, _prompt(2, 5, [0, 1], 9), 4, model=model)
        _generates(answer, _prompt(2, 5, [1, 0], 10), 4, model=model)
    with report.property(
        "no gradient is recorded", hint="torch.no_grad: a graph over all steps fills the memory"
    ):
        model = _Toy().to(device())
        answer(model, _prompt(2, 5, [0, 1], 9), 4)
        expect(not model.recorded, "the model was called while gradients are recorded")
    with report.property(
        "no new tokens asked for: the prompt comes back", hint="a loop that runs zero times"
    ):
        prompt = _prompt(2, 4, [0, 1], 8)
        close(answer(_Toy().to(device()), prompt, 0), prompt.cpu(), "the result", 0.0)
