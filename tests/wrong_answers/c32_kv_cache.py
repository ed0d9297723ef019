"""Answers to chapter 32: mistakes engineers make with a KV cache, and right ones."""

import torch
import torch.nn.functional as F
from torch import nn

from shardbook.attention import cache
from tests.wrong_answers import right, wrong

for name in ("KVCache", "cached_attention", "generate", "sliding_window_append",
             "kv_cache_bytes", "decode_intensity"):  # fmt: skip
    right(name)(getattr(cache, name))


# KVCache


@right("KVCache")
class RowByRow:
    """A loop over rows instead of one indexed write."""

    def __init__(self, batch, num_kv_heads, max_len, head_dim, dtype=torch.float32, device=None):
        self.k = torch.empty(batch, num_kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self.length = torch.zeros(batch, dtype=torch.long, device=device)

    def append(self, k, v):
        n = k.shape[2]
        top = int(self.length.max()) + n
        if top > self.k.shape[2]:
            raise ValueError(f"{top} positions do not fit into {self.k.shape[2]}")
        for row, at in enumerate(self.length.tolist()):
            self.k[row, :, at : at + n] = k[row].detach()
            self.v[row, :, at : at + n] = v[row].detach()
        self.length = self.length + n
        return self.k[:, :, :top], self.v[:, :, :top]

    def truncate(self, lengths):
        self.length = torch.as_tensor(lengths, device=self.length.device).long().clone()


@right("KVCache")
class AModuleWithBuffers(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        for name, tensor in vars(RowByRow(*args, **kwargs)).items():
            self.register_buffer(name, tensor, persistent=False)

    append, truncate = RowByRow.append, RowByRow.truncate


@right("KVCache")
class AListOfTwo(RowByRow):
    k = property(lambda self: self.room[0], lambda self, t: setattr(self, "room", [t, None]))
    v = property(lambda self: self.room[1], lambda self, t: self.room.__setitem__(1, t))


@right("KVCache")
class WithSlots:
    __slots__ = ("k", "length", "v")
    __init__, append, truncate = RowByRow.__init__, RowByRow.append, RowByRow.truncate


@wrong("KVCache", says="bytes in torch.bfloat16")
class Fp32Inside(RowByRow):
    """Twice the memory in bf16, converted on the way out."""

    def __init__(self, batch, num_kv_heads, max_len, head_dim, dtype=torch.float32, device=None):
        super().__init__(batch, num_kv_heads, max_len, head_dim, torch.float32, device)
        self.dtype = dtype

    def append(self, k, v):
        return tuple(t.to(self.dtype) for t in super().append(k, v))


@wrong("KVCache", says="graph")
class KeepsTheGraphOfValues(RowByRow):
    def append(self, k, v):
        n, at = k.shape[2], int(self.length.max())
        keys, _ = super().append(k, v)
        if v.requires_grad:
            self.v = torch.cat([self.v[:, :, :at], v, self.v[:, :, at + n :]], dim=2)
        return keys, self.v[:, :, : at + n]


@wrong("KVCache", says="holds")
class KeepsWhatItWasGiven(RowByRow):
    def append(self, k, v):
        found = super().append(k, v)
        vars(self).setdefault("log", {})[int(self.length.max())] = (k.clone(), [v])
        return found


@wrong("KVCache", says="keys|shape|moved|holds")
class OverwritesTheStart(RowByRow):
    def append(self, k, v):
        self.length = self.length * 0
        return super().append(k, v)


@wrong("KVCache", says="shape|keys")
class ReturnsAllRoom(RowByRow):
    def append(self, k, v):
        super().append(k, v)
        return self.k, self.v


@wrong("KVCache", says="moved|holds")
class ConcatenatesEveryTime(RowByRow):
    def append(self, k, v):
        top = int(self.length.max()) + k.shape[2]
        if top > self.k.shape[2]:
            raise ValueError("the cache is full")
        if len(set(self.length.tolist())) == 1:
            self.k, self.v = self.k.clone(), self.v.clone()
        return super().append(k, v)


@wrong("KVCache", says="length|row|keys")
class OneLengthForAllRows(RowByRow):
    def truncate(self, lengths):
        lengths = torch.as_tensor(lengths)
        self.length = torch.full_like(self.length, int(lengths.max()))


@wrong("KVCache", says="accepted|expected ValueError|raised|refused")
class DropsWhatDoesNotFit(RowByRow):
    def append(self, k, v):
        room = self.k.shape[2] - int(self.length.max())
        return super().append(k[:, :, :room], v[:, :, :room])


@wrong("KVCache", says="refused|length")
class CountsBeforeItLooks(RowByRow):
    def append(self, k, v):
        n = k.shape[2]
        self.length = self.length + n
        if int(self.length.max()) > self.k.shape[2]:
            raise ValueError("the cache is full, sorry")
        self.length = self.length - n
        return super().append(k, v)


@wrong("KVCache", says="graph")
class KeepsTheGraph(RowByRow):
    def append(self, k, v):
        n, at = k.shape[2], int(self.length.max())
        if at + n > self.k.shape[2]:
            raise ValueError("the cache is full, sorry")
        if not k.requires_grad:
            return super().append(k, v)
        self.k = torch.cat([self.k[:, :, :at], k, self.k[:, :, at + n :]], dim=2)
        self.length = self.length + n
        return self.k[:, :, : at + n], self.v[:, :, : at + n]


@wrong("KVCache", says="values|off by")
class ValuesAreKeys(RowByRow):
    def append(self, k, v):
        return super().append(k, k)


@wrong("KVCache", says="dtype|bfloat16")
class AlwaysFp32(RowByRow):
    def __init__(self, batch, num_kv_heads, max_len, head_dim, dtype=torch.float32, device=None):
        super().__init__(batch, num_kv_heads, max_len, head_dim, torch.float32, device)


@wrong("KVCache", says="one row")
class LooksAtTheFirstRow(RowByRow):
    def append(self, k, v):
        n, room = k.shape[2], self.k.shape[2]
        if int(self.length[0]) + n > room:
            raise ValueError(f"{n} more positions do not fit into {room}")
        top = min(room, int(self.length.max()) + n)
        for row, at in enumerate(self.length.tolist()):
            self.k[row, :, at : at + n] = k[row, :, : room - at].detach()
            self.v[row, :, at : at + n] = v[row, :, : room - at].detach()
        self.length = (self.length + n).clamp(max=room)
        return self.k[:, :, :top], self.v[:, :, :top]


@wrong("KVCache", says="truncate was given|read before an append")
class CountsInTheCallersTensor(RowByRow):
    def append(self, k, v):
        length = self.length
        found = super().append(k, v)
        self.length = length.add_(k.shape[2])
        return found

    def truncate(self, lengths):
        self.length = lengths


@wrong("KVCache", says="append changed `length` in place.*make a new tensor")
class CountsInPlace(RowByRow):
    def append(self, k, v):
        length = self.length
        found = super().append(k, v)
        self.length = length.add_(k.shape[2])
        return found


@wrong("KVCache", says="truncate changed `length` in place")
class TruncatesInPlace(RowByRow):
    def truncate(self, lengths):
        self.length.copy_(torch.as_tensor(lengths))


@wrong("KVCache", says="kept the tensor of lengths that it was given")
class KeepsTheCallersLengths(RowByRow):
    def truncate(self, lengths):
        self.length = torch.as_tensor(lengths, device=self.length.device)


@wrong("KVCache", says="overwrote what it had given.*(?s:.*)copy k and v")
class KeepsTheCallersTensors(RowByRow):
    """The first tokens as they were given; what follows is written behind them."""

    def append(self, k, v):
        at, first = int(self.length.max()), getattr(self, "first", None)
        if at == 0:
            self.first = k.detach(), v.detach()
        elif first and self.length.tolist() == [at] * len(k):
            self.k[:, :, : first[0].shape[2]], self.v[:, :, : first[0].shape[2]] = first
        return super().append(k, v)


# cached_attention


def _attend(name, align="offset", group="near", rows=True, mask_length=True, scale=True):
    def answer(q, keys, values, lengths, offset):
        b, h, s, d = q.shape
        copies = h // keys.shape[1]
        if group == "near":
            keys, values = keys.repeat_interleave(copies, 1), values.repeat_interleave(copies, 1)
        else:
            keys, values = keys.repeat(1, copies, 1, 1), values.repeat(1, copies, 1, 1)
        offset = torch.as_tensor(offset, device=q.device).expand(b)
        if not rows:
            offset = offset.max().expand(b)
        start = {"offset": offset, "top left": offset * 0, "one late": offset + 1}[align]
        at = start[:, None] + torch.arange(s, device=q.device)
        places = torch.arange(keys.shape[2], device=q.device)
        sees = places <= at[..., None]
        if align == "none":
            sees = torch.ones_like(sees)
        if mask_length:
            sees = sees & (places < lengths[:, None, None])
        scores = q @ keys.transpose(-1, -2) * (d**-0.5 if scale else 1)
        weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
        return weights.nan_to_num(0.0) @ values

    answer.__name__ = name
    return answer


right("cached_attention")(_attend("with_repeated_kv_heads"))
wrong("cached_attention", says="off by")(_attend("top_left_causal", align="top left"))
wrong("cached_attention", says="off by")(_attend("sees_one_token_ahead", align="one late"))
wrong("cached_attention", says="heads|off by")(_attend("far_groups", group="far"))
wrong("cached_attention", says="rows|off by")(
    _attend("one_position_for_all_rows", rows=False, mask_length=False)
)
wrong("cached_attention", says="off by")(_attend("unscaled", scale=False))
wrong("cached_attention", says="valid new tokens")(_attend("ignores_lengths", mask_length=False))


@wrong("cached_attention", says="in bf16 are torch.float32")
def answers_in_fp32(q, keys, values, lengths, offset):
    return _attend("a")(q.float(), keys.float(), values.float(), lengths, offset)


@wrong("cached_attention", says="3 kv heads are off by")
def scaled_for_one_head_size(q, keys, values, lengths, offset):
    return _attend("a", scale=False)(q * 5**-0.5, keys, values, lengths, offset)


@wrong("cached_attention", says="sees no key.* is nan at")
def softmax_over_nothing(q, keys, values, lengths, offset):
    empty = (lengths == 0)[:, None, None, None]
    return _attend("a")(q, keys, values, lengths, offset).masked_fill(empty, torch.nan)


@wrong("cached_attention", says="off by")
def not_causal_inside(q, keys, values, lengths, offset):
    return _attend("a")(q, keys, values, lengths, torch.as_tensor(offset) + q.shape[2])


@wrong("cached_attention", says="off by|nan")
def fills_with_zero(q, keys, values, lengths, offset):
    """Masked scores become 0 instead of -inf."""
    b, h, s, d = q.shape
    copies = h // keys.shape[1]
    keys, values = keys.repeat_interleave(copies, 1), values.repeat_interleave(copies, 1)
    offset = torch.as_tensor(offset, device=q.device).expand(b)
    at = offset[:, None] + torch.arange(s, device=q.device)
    sees = torch.arange(keys.shape[2], device=q.device) <= at[..., None]
    scores = (q @ keys.transpose(-1, -2) * d**-0.5).masked_fill(~sees[:, None], 0.0)
    return scores.softmax(-1) @ values


# generate


def _generate(name, unpad=True, truncate=True, last="own", eos_stays=True, cached=True, sample=None,
              count=0, zero_ends=True, graph=False, least=0, room_for=1):  # fmt: skip
    @torch.set_grad_enabled(graph)
    def answer(model, prompt, max_new_tokens, eos=None):
        batch, width = prompt.shape
        if max_new_tokens == 0:
            return prompt.clone()
        pad = (prompt < 0).sum(1)
        lengths = width - pad
        tokens = prompt.clamp(min=least)
        if unpad:
            rows = [torch.cat([r[p:], r[:p]]) for r, p in zip(tokens, pad, strict=True)]
            tokens = torch.stack(rows)
        room = model.new_cache(batch, room_for * (width + max_new_tokens + 1))
        logits = model(tokens, room)
        if truncate and unpad:
            room.truncate(lengths)
        where = lengths - 1 if last == "own" and unpad else torch.full_like(lengths, width - 1)
        step = logits[torch.arange(batch, device=prompt.device), where]
        out, done = [], torch.zeros(batch, dtype=torch.bool, device=prompt.device)
        for i in range(max_new_tokens + count):
            token = step.argmax(-1) if sample is None else step.argmin(-1)
            if (eos is not None) if zero_ends else eos:
                if eos_stays:
                    token = torch.where(done, eos, token)
                done |= token == eos
            out.append(token)
            if i + 1 < max_new_tokens + count:
                step = model(token[:, None], room)[:, -1]
                if not cached:
                    model(tokens)  # computes the prompt again, for nothing
        return torch.cat([prompt, torch.stack(out, 1)], 1)

    answer.__name__ = name
    return answer


right("generate")(_generate("row_by_row_unpadding"))
wrong("generate", says="row|new tokens")(_generate("padding_is_seen", unpad=False))
wrong("generate", says="row|new tokens")(_generate("position_of_the_longest", truncate=False))
wrong("generate", says="row|new tokens")(_generate("logits_of_the_padding", last="end"))
wrong("generate", says="new tokens|eos")(_generate("goes_on_after_eos", eos_stays=False))
wrong("generate", says="row")(_generate("token_0_never_ends", zero_ends=False))
wrong("generate", says="called with")(_generate("prompt_again_every_step", cached=False))
wrong("generate", says="new tokens")(_generate("takes_the_least_likely", sample="min"))
wrong("generate", says="shape")(_generate("one_token_too_many", count=1))
wrong("generate", says="gradients are recorded")(_generate("with_a_graph", graph=True))
wrong("generate", says="padding and no token")(_generate("padding_goes_in", least=-1))
wrong("generate", says="asked for a cache of")(_generate("far_too_much_room", room_for=100))


@wrong("generate", says="second prompt.*(?s:.*)a new cache in every call")
def one_cache_for_all_prompts(model, prompt, max_new_tokens, eos=None):
    make = type(model).new_cache

    def kept(batch, max_len):
        return vars(model).setdefault("kept", make(model, batch, max_len))

    model.new_cache = kept
    try:
        return cache.generate(model, prompt, max_new_tokens, eos)
    finally:
        del model.new_cache  # the check's own run without a cache is none of its business


@wrong("generate", says="prefill once.*computed")
def padded_prompts_without_a_cache(model, prompt, max_new_tokens, eos=None):
    padded = bool((prompt < 0).any())
    answer = without_a_cache if padded else cache.generate
    return answer(model, prompt, max_new_tokens, eos)


@wrong("generate", says="called with")
def without_a_cache(model, prompt, max_new_tokens, eos=None):
    """Right tokens, the whole sequence every time."""
    rows = []
    for row in prompt:
        tokens = row[row >= 0]
        new = []
        for _ in range(max_new_tokens):
            if eos is not None and eos in new:
                new.append(eos)
                continue
            token = model(tokens[None])[0, -1].argmax()
            tokens = torch.cat([tokens, token[None]])
            new.append(int(token))
        rows.append(torch.cat([row, torch.tensor(new, dtype=row.dtype, device=row.device)]))
    return torch.stack(rows)


# sliding_window_append


@right("sliding_window_append")
def one_row_at_a_time(room, k, v, window):
    if room.max_len != window:
        raise ValueError(f"the cache holds {room.max_len} positions, not {window}")
    keep_k, keep_v, lengths = [], [], []
    for row, n in enumerate(room.length.tolist()):
        keep_k.append(torch.cat([room.keys[row, :, :n], k[row]], 1)[:, -window:])
        keep_v.append(torch.cat([room.values[row, :, :n], v[row]], 1)[:, -window:])
        lengths.append(keep_k[-1].shape[1])
    for row, n in enumerate(lengths):
        room.keys[row, :, :n], room.values[row, :, :n] = keep_k[row], keep_v[row]
    room.length = torch.tensor(lengths, device=room.length.device)
    return room.keys[:, :, : max(lengths)], room.values[:, :, : max(lengths)]


@wrong("sliding_window_append", says="raised|keys")
def simply_appends(room, k, v, window):
    return room.append(k, v)


@wrong("sliding_window_append", says="keys|length")
def starts_again_when_full(room, k, v, window):
    if int(room.length.max()) + k.shape[2] > window:
        room.truncate(0)
    return room.append(k[:, :, -window:], v[:, :, -window:])


@wrong("sliding_window_append", says="keys")
def ring_buffer_out_of_order(room, k, v, window):
    for i in range(k.shape[2]):
        at = getattr(room, "at", int(room.length.max()))
        room.keys[:, :, at % window] = k[:, :, i]
        room.values[:, :, at % window] = v[:, :, i]
        room.at = at + 1
    room.length = (room.length + k.shape[2]).clamp(max=window)
    n = int(room.length.max())
    return room.keys[:, :, :n], room.values[:, :, :n]


@wrong("sliding_window_append", says="holds|shape|keys")
def grows_past_its_window(room, k, v, window):
    n = int(room.length.max())
    room.keys = torch.cat([room.keys[:, :, :n], k], 2)
    room.values = torch.cat([room.values[:, :, :n], v], 2)
    room.length = room.length + k.shape[2]
    return room.keys, room.values


@wrong("sliding_window_append", says="keys|shape|raised")
def long_chunks_keep_their_start(room, k, v, window):
    return one_row_at_a_time(room, k[:, :, :window], v[:, :, :window], window)


@wrong("sliding_window_append", says="length|row|keys|raised")
def all_rows_alike(room, k, v, window):
    new = min(k.shape[2], window)
    k, v = k[:, :, -new:], v[:, :, -new:]
    drop = max(0, int(room.length.max()) + new - window)
    if drop:
        room.keys = F.pad(room.keys[:, :, drop:], (0, 0, 0, drop))
        room.values = F.pad(room.values[:, :, drop:], (0, 0, 0, drop))
        room.length = (room.length - drop).clamp(min=0)
    return room.append(k, v)


@wrong("sliding_window_append", says="length after")
def long_chunks_are_not_stored(room, k, v, window):
    if k.shape[2] >= window:
        return k[:, :, -window:], v[:, :, -window:]
    return one_row_at_a_time(room, k, v, window)


@wrong("sliding_window_append", says="values after 0 and 12")
def long_chunks_keep_the_start_of_values(room, k, v, window):
    if k.shape[2] >= window:
        room.truncate(0)
        return room.append(k[:, :, -window:], v[:, :, :window])
    return one_row_at_a_time(room, k, v, window)


@wrong("sliding_window_append", says="the values of row")
def values_slide_by_the_longest_row(room, k, v, window):
    top = int(room.length.max())
    moved = torch.stack(
        [
            row.roll(n - top, dims=1)
            for row, n in zip(room.values, room.length.tolist(), strict=True)
        ]
    )
    room.values = moved
    return one_row_at_a_time(room, k, v, window)


# formulas


@right("kv_cache_bytes")
def keys_plus_values(layers, kv_heads, head_dim, seq_len, batch, bytes_per_value):
    one = batch * seq_len * kv_heads * head_dim * bytes_per_value
    return layers * (one + one)


def _bytes(name, f):
    f.__name__ = name
    return wrong("kv_cache_bytes", says="bytes of")(f)


_bytes("keys_only", lambda n, h, d, s, b, w: n * h * d * s * b * w)
_bytes("one_layer", lambda n, h, d, s, b, w: 2 * h * d * s * b * w)
_bytes("one_sequence", lambda n, h, d, s, b, w: 2 * n * h * d * s * w)
_bytes("in_bits", lambda n, h, d, s, b, w: 16 * n * h * d * s * b * w)
_bytes("always_two_bytes", lambda n, h, d, s, b, w: 4 * n * h * d * s * b)


@right("decode_intensity")
def by_parts(num_params, layers, heads, kv_heads, head_dim, seq_len, batch, bytes_per_value):
    flops = batch * (2 * num_params + 4 * layers * heads * head_dim * seq_len)
    read = num_params + 2 * layers * kv_heads * head_dim * seq_len * batch
    return flops / (read * bytes_per_value)


def _intensity(name, f):
    f.__name__ = name
    return wrong("decode_intensity", says="expected")(f)


_intensity("weights_only", lambda p, n, h, kv, d, s, b, w: 2 * b / w)
_intensity(
    "parameters_read_for_each_sequence",
    lambda p, n, h, kv, d, s, b, w: (
        (2 * p * b + 4 * n * h * d * s * b) / ((p * b + 2 * n * kv * d * s * b) * w)
    ),
)
_intensity(
    "one_cache_for_the_batch",
    lambda p, n, h, kv, d, s, b, w: (
        (2 * p * b + 4 * n * h * d * s * b) / ((p + 2 * n * kv * d * s) * w)
    ),
)
_intensity(
    "cache_of_query_heads",
    lambda p, n, h, kv, d, s, b, w: (
        (2 * p * b + 4 * n * h * d * s * b) / ((p + 2 * n * h * d * s * b) * w)
    ),
)
_intensity(
    "attention_of_kv_heads",
    lambda p, n, h, kv, d, s, b, w: (
        (2 * p * b + 4 * n * kv * d * s * b) / ((p + 2 * n * kv * d * s * b) * w)
    ),
)
_intensity(
    "bytes_over_flops",
    lambda p, n, h, kv, d, s, b, w: (
        ((p + 2 * n * kv * d * s * b) * w) / (2 * p * b + 4 * n * h * d * s * b)
    ),
)
