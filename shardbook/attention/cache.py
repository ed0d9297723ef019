"""The KV cache: keys and values of the tokens so far, so that a step computes one token.

Rows of a batch are independent: each has its own length and its own positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64  # queries that cached_attention takes at once


class KVCache:
    """Room for [B, Hkv, max_len, D] keys and values; `length` [B] says how much of it is used."""

    def __init__(
        self, batch: int, num_kv_heads: int, max_len: int, head_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | None = None,
    ):  # fmt: skip
        shape = (batch, num_kv_heads, max_len, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)  # [B]
        self.max_len = max_len

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k and v [B, Hkv, S, D] behind each row's own end; the keys and values so far.

        They come as [B, Hkv, T, D] with T the longest row; a row's first `length` are valid.
        ValueError where a row would pass max_len; nothing is written then.
        """
        batch, _, new, _ = k.shape
        longest = int(self.length.max()) + new if batch else new
        if longest > self.max_len:
            raise ValueError(
                f"the cache holds {self.max_len} positions a row and this append needs {longest}: "
                "make it larger, truncate it, or use a sliding window"
            )
        at = self.length[:, None] + torch.arange(new, device=k.device)  # [B, S]
        rows = torch.arange(batch, device=k.device)[:, None]  # [B, 1]
        self.keys[rows, :, at] = k.detach().transpose(1, 2).to(self.keys.dtype)  # [B, S, Hkv, D]
        self.values[rows, :, at] = v.detach().transpose(1, 2).to(self.values.dtype)
        self.length = self.length + new
        return self.keys[:, :, :longest], self.values[:, :, :longest]

    def truncate(self, lengths: Tensor | int) -> None:
        """Forget what lies behind `lengths` ([B] or one for all): after a rejected guess."""
        lengths = torch.as_tensor(lengths, device=self.length.device).expand_as(self.length)
        if bool((lengths > self.length).any()) or bool((lengths < 0).any()):
            raise ValueError(
                f"can't truncate rows of {self.length.tolist()} to {lengths.tolist()}: "
                "a row can only become shorter"
            )
        self.length = lengths.to(torch.int64).clone()


def sliding_window_append(
    cache: KVCache, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Append to a cache of max_len = window, keeping each row's last `window` tokens in order.

    k, v [B, Hkv, S, D], S may exceed the window. Returns what append returns.
    """
    if cache.max_len != window:
        raise ValueError(f"the cache holds {cache.max_len} positions, expected window = {window}")
    k, v = k[:, :, -window:], v[:, :, -window:]
    new = k.shape[2]
    # positions are kept by a gather, not a loop: row b loses its first drop[b] tokens
    drop = (cache.length + new - window).clamp(min=0)  # [B]
    kept = torch.arange(window, device=k.device) + drop[:, None]  # [B, window]
    index = kept.clamp(max=window - 1)[:, None, :, None].expand_as(cache.keys)
    cache.keys, cache.values = cache.keys.gather(2, index), cache.values.gather(2, index)
    cache.length = cache.length - drop
    return cache.append(k, v)


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, offset: Tensor | int
) -> Tensor:
    """New queries against all keys so far: [B, H, S, D], causal among the new tokens.

    keys, values [B, Hkv, T, D] as append returned them, lengths [B] the valid keys of a row after
    the append, offset (int or [B]) the position of the row's first new query. Query i of a row
    sees the valid keys at positions up to offset + i; one that sees none gives 0. Many queries go
    through in parts of BLOCK, so that the scores are [B, H, BLOCK, T], never [B, H, S, T].
    """
    heads, kv_heads = q.shape[1], keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide by {kv_heads} kv heads")
    new, total = q.shape[2], keys.shape[2]
    offset = torch.as_tensor(offset, device=q.device).expand(q.shape[0])  # [B]
    if new > BLOCK:
        parts = enumerate(q.split(BLOCK, dim=2))
        outs = [cached_attention(x, keys, values, lengths, offset + n * BLOCK) for n, x in parts]
        return torch.cat(outs, dim=2)
    at = offset[:, None] + torch.arange(new, device=q.device)  # [B, S]
    key_at = torch.arange(total, device=q.device)  # [T]
    sees = (key_at <= at[..., None]) & (key_at < lengths[:, None, None])  # [B, S, T]
    scores = q.float().unflatten(1, (kv_heads, -1)) @ keys.float()[:, :, None].transpose(-1, -2)
    scores = scores * q.shape[-1] ** -0.5  # [B, Hkv, G, S, T]
    weights = scores.masked_fill(~sees[:, None, None], -torch.inf).softmax(dim=-1)
    weights = weights.masked_fill(~sees.any(-1)[:, None, None, :, None], 0.0)  # no key: nan -> 0
    return (weights @ values.float()[:, :, None]).flatten(1, 2).to(q.dtype)  # [B, H, S, D]


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, max_new_tokens: int, eos: int | None = None
) -> Tensor:
    """Greedy decoding: prompt [B, S] -> [B, S + max_new_tokens].

    Prefill once, then one token a step. Negative ids on the left of a prompt are padding: such a
    row is moved to the left before it enters the model, so its tokens have the positions they
    would have alone. After eos a row is filled with eos. The model is called
    ``model(tokens, cache) -> logits [B, S, V]``, ``model.new_cache(batch, max_len)`` makes a cache.
    """
    batch, width = prompt.shape
    pad = (prompt < 0).sum(dim=1)  # [B]
    lengths = width - pad
    if batch and int(lengths.min()) < 1:
        raise ValueError("a row of the prompt is all padding: expected at least one token a row")
    if bool((prompt.roll(1, 1)[:, 1:] >= 0).logical_and(prompt[:, 1:] < 0).any()):
        raise ValueError("padding (a negative id) must be on the left of a row")
    if max_new_tokens == 0:
        return prompt.clone()
    # rows start at position 0 and have their padding on the right, where causal masking and the
    # rows' lengths hide it
    shift = torch.arange(width, device=prompt.device) + pad[:, None]  # [B, S]
    tokens = prompt.gather(1, shift.clamp(max=width - 1)).clamp(min=0)

    cache = model.new_cache(batch, width + max_new_tokens)
    logits = model(tokens, cache)  # [B, S, V]
    cache.truncate(lengths)
    last = logits[torch.arange(batch, device=prompt.device), lengths - 1]  # [B, V]
    done = torch.zeros(batch, dtype=torch.bool, device=prompt.device)
    new = []
    for step in range(max_new_tokens):
        token = last.argmax(dim=-1)  # [B]
        if eos is not None:
            token = torch.where(done, eos, token)
            done = done | (token == eos)
        new.append(token)
        if step == max_new_tokens - 1 or bool(done.all()):
            break
        last = model(token[:, None], cache)[:, -1]
    out = torch.cat([prompt, torch.stack(new, dim=1)], dim=1)
    missing = width + max_new_tokens - out.shape[1]
    return F.pad(out, (0, missing), value=eos if eos is not None else 0)


def kv_cache_bytes(
    layers: int, kv_heads: int, head_dim: int, seq_len: int, batch: int, bytes_per_value: int
) -> int:
    """Bytes of the keys and values of `batch` sequences: 2 L Hkv D S B bytes_per_value."""
    return 2 * layers * kv_heads * head_dim * seq_len * batch * bytes_per_value


def decode_intensity(
    num_params: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    seq_len: int, batch: int, bytes_per_value: int,
) -> float:  # fmt: skip
    """FLOPs per byte of one decode step: what it computes over what it must read.

    (2 num_params B + 4 L H D S B) over the bytes of the parameters and of the cache.
    """
    flops = 2 * num_params * batch + 4 * layers * heads * head_dim * seq_len * batch
    cache = kv_cache_bytes(layers, kv_heads, head_dim, seq_len, batch, bytes_per_value)
    return flops / (num_params * bytes_per_value + cache)
