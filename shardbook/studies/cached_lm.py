"""The small language model with a KV cache: one `KVCache` a layer, of all heads or of this rank's.

It is what `generate` calls: ``model(tokens, cache)`` and ``model.new_cache(batch, max_len)``. The
weights are a TinyLM's, as chapters 21 to 24 train it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..attention import attend
from ..attention.cache import KVCache, cached_attention
from ..basics.tiny import Attention, TinyLM, rotate
from ..parallel.tensor import Group, ParallelAttention
from .tensor_lm import tensor_parallel_


class LayerCaches:
    """A cache for each layer. All have the same lengths, so they are truncated together."""

    def __init__(self, layers: list[KVCache]):
        self.layers = layers

    @property
    def length(self) -> Tensor:
        """[B]: the tokens that each row holds, which is the position of its next one."""
        return self.layers[0].length

    def truncate(self, lengths: Tensor | int) -> None:
        """Forget what lies behind `lengths` ([B] or one for all) in every layer."""
        for layer in self.layers:
            layer.truncate(lengths)


def heads(attn: Attention | ParallelAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, D] -> q [B, H, S, d], k and v [B, Hkv, S, d]: the layer's heads, or this rank's."""
    if isinstance(attn, ParallelAttention):
        rows = torch.cat((attn.q(x), attn.kv(x)), dim=-1)
        sizes = [attn.heads, attn.kv_heads, attn.kv_heads]
    else:
        rows = attn.qkv(x)
        sizes = [attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
    return rows.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2).split(sizes, dim=1)


class CachedLM(nn.Module):
    """tokens [B, S] -> logits [B, S, V]; with a cache the tokens stand behind what it holds.

    Without a cache it is the model itself. Into an empty cache the new tokens attend to themselves
    alone, so prefill goes through the fused `attend` and no S x T matrix is made. `make_cache` and
    `attend` are the lab's places for its own KVCache and cached_attention.
    """

    def __init__(
        self, model: TinyLM, make_cache: Callable = KVCache, attend: Callable = cached_attention
    ):
        super().__init__()
        self.model, self.make_cache, self.attend = model, make_cache, attend

    def new_cache(self, batch: int, max_len: int) -> LayerCaches:
        """Empty caches of the weights' dtype and device, for the kv heads that are here."""
        weight = self.model.norm.weight
        layers = []
        for block in self.model.blocks:
            attn = block.attn
            parallel = isinstance(attn, ParallelAttention)
            kv_heads = attn.kv_heads if parallel else attn.num_kv_heads
            layers.append(
                self.make_cache(
                    batch, kv_heads, max_len, attn.head_dim, weight.dtype, weight.device
                )
            )
        return LayerCaches(layers)

    def forward(self, tokens: Tensor, cache: LayerCaches | None = None) -> Tensor:
        if cache is None:
            return self.model(tokens)
        offset = cache.length.clone()  # [B], before the first layer appends
        prefill = not bool(offset.any())  # nothing is cached yet
        new = torch.arange(tokens.shape[1], device=tokens.device)  # [S]
        positions = offset[:, None] + new  # [B, S]: every row has its own
        x = self.model.embed(tokens)  # [B, S, D]
        for block, layer in zip(self.model.blocks, cache.layers, strict=True):
            q, k, v = heads(block.attn, block.norm1(x))
            # keys are kept rotated: a token's position never changes
            keys, values = layer.append(rotate(k, positions), v)  # [B, Hkv, T, d]
            q = rotate(q, positions)
            if prefill and tokens.shape[1] > 1:
                y = attend(q, keys, values, causal=True)
            else:
                y = self.attend(q, keys, values, layer.length, offset)
            x = x + block.attn.out(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        return self.model.head(self.model.norm(x))  # [B, S, V]


def tensor_parallel_cached(model: TinyLM, group: Group = None) -> CachedLM:
    """The model cut over the group, in place, with every rank's cache holding its own kv heads.

    Every rank gets the whole logits, so every rank picks the same token.
    """
    model = tensor_parallel_(model, group)
    model.head.gather_output = True
    return CachedLM(model)


@torch.no_grad()
def generate_without_cache(model: CachedLM, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy decoding that computes the whole sequence again for every token. No padding.

    prompt [B, S] -> [B, S + max_new_tokens].
    """
    tokens = prompt
    for _ in range(max_new_tokens):
        token = model(tokens)[:, -1].argmax(dim=-1)  # [B]
        tokens = torch.cat((tokens, token[:, None]), dim=1)
    return tokens
