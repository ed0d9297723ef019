# %% [markdown]
# # 32 · Lab: the KV cache
#
# You write what generates text: a cache with a length for each row, attention of new queries to old
# keys, the loop, a sliding window, and the two formulas that tell what it costs. Then a model that
# you train here speaks with your code.
#
# Time: about 2 hours. Exercises 1 to 3 are the heart. No exercise needs another one's code, only the
# cells called "your code speaks" do.

# %%
import shardbook as sb

import inspect

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook import plot
from shardbook.attention.cache import BLOCK
from shardbook.pictures.cache import draw_cache
from shardbook.studies.cached_lm import CachedLM, generate_without_cache
from shardbook.checks import kv_cache as check
from shardbook.memory import storage_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss

# %% [markdown]
# ## A model that counts
#
# It learns `start, start + k, start + 2k, …` modulo 64 and has two kv heads for four heads. Training
# takes some seconds; its first words come without a cache.


# %%
def train(steps=150):
    lm = tiny_lm(num_kv_heads=2).to(sb.device())
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step, batch=8))
        loss = token_loss(lm(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return lm


def text(start, k, n):
    """What the model should say: [n] numbers from start in steps of k."""
    return (start + k * torch.arange(n)) % 64


lm = train()
prompt = text(3, 2, 6)[None].to(sb.device())
print(*generate_without_cache(CachedLM(lm), prompt, 10)[0].tolist())

# %% [markdown]
# This is how it uses a cache. `make_cache` will be your `KVCache`, `attend` your `cached_attention`.

# %%
print(inspect.getsource(CachedLM.forward))

# %% [markdown]
# ## Exercise 1: the cache
#
# `KVCache(batch, num_kv_heads, max_len, head_dim, dtype, device)` has room for `max_len` tokens of
# each row, allocated once.
#
# - `append(k, v)`, [B, Hkv, S, D]: puts them behind each row's own end and returns the keys and values
#   so far, [B, Hkv, T, D] with T the length of the longest row. ValueError where a row would pass
#   `max_len`, before anything is written.
# - `length`, [B]: the tokens of each row.
# - `truncate(lengths)`, [B] or one number: forget what lies behind.
# - `keys`, `values` and `max_len`: names that exercise 4 uses.
#
# **Predict** first: how many bytes does a cache for 3 rows of 20 tokens take in bf16, with 2 kv heads
# of 16? (One layer.)

# %% predict="predicted"
predicted = 2 * 2 * 16 * 20 * 3 * 2  # keys and values, heads, numbers, tokens, rows, bytes

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Rows end at different places, so one slice for all rows does not do. Indexing with two tensors of
# positions does: `keys[rows, :, at]` with rows [B, 1] and at [B, S] is [B, S, Hkv, D].
# </details>
# <details><summary>Hint 2</summary>
#
# `self.length += n` changes a tensor that somebody may have kept from before. Make a new one.
# </details>
# <details><summary>Hint 3</summary>
#
# What is written must not carry a graph: `detach()`.
# </details>

# %% exercise="shardbook.attention.cache.KVCache"

# %%
check.kv_cache(KVCache)

# %%
room = KVCache(3, 2, 20, 16, torch.bfloat16, sb.device())
held = storage_bytes(t for t in vars(room).values() if torch.is_tensor(t) and t.dim() == 4)
sb.predict("bytes of keys and values", predicted, held)

# %% [markdown]
# ## Exercise 2: new queries, old keys
#
# q is [B, H, S, D]; keys and values [B, Hkv, T, D] are what `append` returned, `lengths` [B] are the
# valid ones of each row, `offset` (a number or [B]) is the position of a row's first new query.
# Query i stands at `offset + i` and sees the valid keys up to there. Scores are scaled by `D^-0.5`.
#
# Attention into an *empty* cache goes through the fused kernel; yours gets the few queries that come
# after. Where there are more than `BLOCK` (64) at once the reference takes them in parts, so that no
# S x T matrix is made.
#
# <details><summary>Hint 1</summary>
#
# Two conditions make the mask [B, S, T]: `key position <= offset + i` and `key position < lengths`.
# </details>
# <details><summary>Hint 2</summary>
#
# Head h reads kv head `h // (H / Hkv)`: neighbours share. `q.unflatten(1, (Hkv, -1))` is
# [B, Hkv, G, S, D] and meets `keys[:, :, None]`; nothing has to be repeated.
# </details>
# <details><summary>Hint 3</summary>
#
# A row that sees no key has scores of -inf only, and softmax makes nan of them.
# </details>

# %% exercise="shardbook.attention.cache.cached_attention"

# %%
check.cached_attention(cached_attention)

# %% [markdown]
# **A failure to read.** One new query against nine keys. torch's `is_causal` is aligned to the top
# left, as if the query were the first token. Yours knows where it stands.

# %%
q, keys, values = (
    torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)).to(sb.device())
    for n in (1, 9, 10)
)
values = values[:, :, :9]
first_only = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
print("torch's is_causal sees the first key only:", torch.allclose(first_only, values[:, :, :1]))
ours = cached_attention(q, keys, values, torch.tensor([9]).to(sb.device()), 8)
everything = F.scaled_dot_product_attention(q, keys, values)
print("yours sees all nine:", torch.allclose(ours, everything, atol=1e-6))

# %% [markdown]
# ### Your code speaks
#
# One prefill of six tokens, then one decode step, with your cache and your attention in every layer.


# %%
@torch.no_grad()
def two_phases():
    model = CachedLM(lm, KVCache, cached_attention)
    cache = model.new_cache(1, 12)
    token = model(prompt, cache)[:, -1:].argmax(-1)
    following = model(token, cache)[:, -1].argmax(-1)
    return [*prompt[0].tolist(), int(token), int(following)], cache.length.tolist()


said, length = two_phases()
print(*said, "  tokens in the cache:", length)

# %% [markdown]
# ## Exercise 3: generate
#
# Greedy: always the most likely token. Prefill once, then one token per step. Negative ids on the left
# of a prompt are padding, and a row says what it would say alone: its first real token has position
# 0. After `eos` a row is filled with `eos` while the others go on.
#
# `model(tokens, cache)` gives logits [B, S, V], `model.new_cache(batch, max_len)` a cache that has
# `truncate(lengths)`. Return [B, S + max_new_tokens], the prompt as it came.
#
# **Predict**: a prompt of 6 and 20 new tokens. How many tokens go through the model in all, and how
# many without a cache?

# %% predict="with_cache without"
with_cache = 6 + 19  # the last new token is never put in
without = sum(range(6, 26))  # 6, 7, … 25

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Move each row to the left before the model sees it (`gather`), so that padding stands on the right.
# There causal attention hides it from the real tokens.
# </details>
# <details><summary>Hint 2</summary>
#
# Prefill put the padding's keys into the cache, too. Truncate each row to its own length. Its first
# prediction stands at `logits[row, length - 1]`, not at `-1`.
# </details>
# <details><summary>Hint 3</summary>
#
# How much room? The widest prompt and the new tokens. And mind `max_new_tokens = 0`.
# </details>

# %% exercise="shardbook.attention.cache.generate"

# %%
check.generate(generate)


# %%
def tokens_seen(generator, model):
    """Tokens that pass through the model while it generates 20."""
    seen = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    try:
        generator(model, prompt, 20)
    finally:
        hook.remove()
    return sum(seen)


plain = CachedLM(lm)
sb.predict("tokens without a cache", without, tokens_seen(generate_without_cache, plain))
sb.predict("tokens with your loop", with_cache, tokens_seen(generate, plain))

# %% [markdown]
# ### Your code speaks to three at once

# %%
prompts = torch.full((3, 8), -1)
own = (8, 5, 3)  # real tokens of each row
for row, (start, k) in enumerate(((3, 2), (10, 3), (60, 4))):
    prompts[row, 8 - own[row] :] = text(start, k, own[row])
speaker = CachedLM(lm, KVCache, cached_attention)
for line, row in zip(prompts.tolist(), generate(speaker, prompts.to(sb.device()), 10), strict=True):
    print(line, "->", row[8:].tolist())

# %%
# ten were said, nine were put in: nobody asked what comes after the last one
draw_cache({f"row {r}": [("prompt", n), ("new", 9)] for r, n in enumerate(own)}, 8 + 10)
plt.show()

# %% [markdown]
# ### A trace to read
#
# Your `generate` with 96 tokens of prompt. Which slices are the prefill? A decode step has a hundredth
# of its arithmetic and takes more than a hundredth of its time: which modules are to blame?


# %%
def traced():
    model = CachedLM(lm, KVCache, cached_attention)
    generate(model, prompt, 2)  # first calls are slow: leave them out
    with sb.trace(model) as t, sb.mark("generate"):
        generate(model, text(3, 2, 96)[None].to(sb.device()), 4)
    return t


# %% tags=["nbval-ignore-output"]
traced()

# %% [markdown]
# ### A failure to provoke: the stale guess
#
# Seven tokens are in the cache. Four tokens are guessed and put in with the next one, two of them are
# right. Forget to truncate, and compare the logits of the token after with a run that never guessed.


# %%
@torch.no_grad()
def after_a_guess(truncate):
    model = CachedLM(lm, KVCache, cached_attention)
    cache = model.new_cache(1, 24)
    model(text(3, 2, 7)[None].to(sb.device()), cache)  # 3 … 15
    model(torch.tensor([[17, 19, 21, 40, 11]]).to(sb.device()), cache)
    if truncate:
        cache.truncate(10)
    logits = model(torch.tensor([[23]]).to(sb.device()), cache)[0, -1]
    fresh = lm(text(3, 2, 11)[None].to(sb.device()))[0, -1]
    return bool((logits - fresh).abs().max() < 1e-3)


for truncate in (True, False):
    print("truncated:" if truncate else "stale:    ", "equals", after_a_guess(truncate))

# %% [markdown]
# No shape was wrong and nothing was raised.
#
# ## Exercise 4: a window
#
# `sliding_window_append(cache, k, v, window)` appends to a `KVCache` of `max_len = window` so that it
# holds the last `window` tokens of each row, in order. A chunk may be longer than the window, and
# rows may have different lengths. It returns what `append` returns. A cache has `append`, `truncate`,
# `length` and `max_len` as in exercise 1, and its room in `keys` and `values`, [B, Hkv, max_len, D].
#
# <details><summary>Hint 1</summary>
#
# Of k and v only the last `window` tokens can survive: cut them first.
# </details>
# <details><summary>Hint 2</summary>
#
# Row b loses its first `max(0, length + new - window)` tokens. Move what remains to the front, make
# the row shorter by as much, and `append` does the rest.
# </details>
# <details><summary>Hint 3</summary>
#
# "Row b takes its positions `drop[b], drop[b] + 1, …`" is a `gather` along the dimension of positions,
# with an index clamped to what exists.
# </details>

# %% exercise="shardbook.attention.cache.sliding_window_append"

# %%
check.sliding_window_append(sliding_window_append)


# %%
def held_tokens(window, tokens=24):
    cache, held = KVCache(1, 1, window, 2, torch.float32, sb.device()), []
    for i in range(tokens):
        k = torch.full((1, 1, 1, 2), float(i)).to(sb.device())
        keys, _ = sliding_window_append(cache, k, k, window)
        held.append(int(cache.length[0]))
    return held, keys[0, 0, :, 0].int().tolist()


held, last = held_tokens(8)
print("after token 23 the window holds", last)
plot.curves({"window of 8": held}, "token", "tokens held per row")
plt.show()

# %% [markdown]
# ## Exercise 5: what it costs
#
# - `kv_cache_bytes(layers, kv_heads, head_dim, seq_len, batch, bytes_per_value)`
# - `decode_intensity(num_params, layers, heads, kv_heads, head_dim, seq_len, batch, bytes_per_value)`:
#   FLOPs of one decode step over the bytes it reads. A parameter costs 2 FLOPs for each row and is
#   read once for all; scores and weighted sum are `4 H D S` FLOPs in each layer for each row; the
#   whole cache is read.
#
# **Predict** before you write: for a batch that grows without end, at which intensity does a decode
# step of Llama 3 8B end (8.03e9 parameters, 32 layers, 32 heads, 8 kv heads of 128, 4,096 tokens,
# bf16)? Round to a whole number.

# %% predict="limit"
# the weights' bytes no longer count: FLOPs of a row over the bytes of its cache
limit = round((2 * 8.03e9 + 4 * 32 * 32 * 128 * 4096) / (2 * 32 * 8 * 128 * 4096 * 2))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The cache holds keys *and* values, of every layer and kv head.
# </details>
# <details><summary>Hint 2</summary>
#
# Queries have H heads, the cache Hkv: FLOPs count the one, bytes the other.
# </details>
# <details><summary>Hint 3</summary>
#
# The bytes of the parameters do not grow with the batch; both terms of the FLOPs do.
# </details>

# %% exercise="shardbook.attention.cache.kv_cache_bytes shardbook.attention.cache.decode_intensity"

# %%
check.kv_cache_bytes(kv_cache_bytes)

# %%
check.decode_intensity(decode_intensity)

# %%
sizes = (8.03e9, 32, 32, 8, 128, 4096)
sb.predict("FLOPs per byte at most", limit, round(decode_intensity(*sizes, 10**6, 2)))
batches = (1, 4, 16, 64, 256, 1024)
print({b: round(decode_intensity(*sizes, b, 2), 1) for b in batches})
print(f"{kv_cache_bytes(32, 8, 128, 4096, 64, 2) / 2**30:.0f} GiB of cache for 64 rows")

# %% [markdown]
# ## On a real cluster
#
# - Devices need 150 to 300 FLOPs per byte to be busy with arithmetic (the lesson's roofline has the
#   sources). You just computed that this decode step never gets there: buy bandwidth, not FLOP/s, or
#   read fewer bytes (fewer kv heads, a window, eight bits).
# - With tensor parallelism each rank makes *your* `KVCache` with its own kv heads, and nothing else
#   changes: the lesson runs it on four ranks.
# - On an NPU `npu_fused_infer_attention_score` takes your `length` as `actual_seq_lengths_kv`, on a CUDA
#   device `flash_attn_with_kvcache` takes it as `cache_seqlens`. Compare either with your
#   `cached_attention` on rows of different lengths before you trust its arguments.
# - What is missing for a server: room by blocks, rows that come and go, guesses that pay.
