# %% [markdown]
# # 32 · The KV cache
#
# After this chapter you can
# - generate text without computing any token twice, and prove that nothing changed,
# - give every row of a batch its own length and position, also after a rejected guess,
# - say how many bytes each token of context costs, and what grouped queries, a window and tensor
#   parallelism do to that number,
# - tell why decoding waits for memory on every device, and what helps.
#
# Time: 60 minutes to read, about two hours for the lab. Chapter 31 has the attention and the
# roofline, chapter 22 the layers that the last part cuts over ranks.
#
# Letters: a batch of B rows; S new tokens against T cached ones; L layers, H query heads and Hkv kv
# heads of size d, model width D, N parameters, a window of W.

# %%
import shardbook as sb

import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardbook import calls, plot
from shardbook.attention.cache import (
    KVCache,
    cached_attention,
    decode_intensity,
    generate,
    kv_cache_bytes,
    sliding_window_append,
)
from shardbook.attention.counting import operator_traffic
from shardbook.attention.flash import flash_attention_forward
from shardbook.attention.ring_cache import RingCache
from shardbook.parallel.context import merge_attention
from shardbook.pictures.cache import draw_cache
from shardbook.studies.cached_lm import CachedLM, generate_without_cache, tensor_parallel_cached
from shardbook.pictures.attention import DEVICES, draw_roofline
from shardbook.memory import storage_bytes
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss

# %% [markdown]
# ## A model that says something
#
# The small model of this book with two kv heads for its four heads, trained to count: a text is
# `start, start + k, start + 2k, …` modulo 64, with k from 1 to 4. Two numbers tell how it goes on.


# %%
def train(steps=150):
    lm = tiny_lm(num_kv_heads=2).to(sb.device())
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses = []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step, batch=8))
        loss = token_loss(lm(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return lm, losses


lm, losses = train()
model = CachedLM(lm)  # model(tokens) without a cache, model(tokens, cache) with one


def text(start, k, n):
    """What the model should say: [n] numbers from start in steps of k."""
    return (start + k * torch.arange(n)) % 64


prompt = text(3, 2, 6)[None].to(sb.device())  # [1, 6]
print("prompt:", *prompt[0].tolist())
print("model: ", *generate(model, prompt, 16)[0, 6:].tolist())

# %% tags=["nbval-ignore-output"]
plot.curves({"loss": losses}, "step", "loss")
plt.show()

# %% [markdown]
# ## What is computed twice?
#
# A model maps S tokens to S predictions, and generation wants the last one. The simplest loop
# gives the whole text to the model again for every new token. How many tokens go through it for a
# prompt of 6 and 50 new ones? And how many must, at least?

# %% predict="again once"
again = sum(range(6, 56))  # 6 tokens, then 7, … up to 55
once = 6 + 49  # each token once; the last new one is never put in


# %%
def tokens_seen(generator):
    """Tokens that pass through the model while it generates 50."""
    seen = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    out = generator(model, prompt, 50)
    hook.remove()
    return sum(seen), out


seen_again, plain = tokens_seen(generate_without_cache)
seen_once, cached = tokens_seen(generate)
sb.predict("tokens without a cache", again, seen_again)
sb.predict("tokens with a cache", once, seen_once)
print("the same text:", torch.equal(plain, cached))

# %% [markdown]
# What must be remembered of the old tokens? Attention is causal, so nothing that an old token
# computes depends on a new one. A new token needs their keys and values in every layer, and
# nothing else of them: not their queries, not their outputs, not their logits. Check the first
# claim: the keys of the last layer, before and after more tokens come.


# %%
@torch.no_grad()
def keys_of_last_layer(tokens):
    cache = model.new_cache(len(tokens), 64)
    model(tokens, cache)
    return cache.layers[-1].keys[:, :, : tokens.shape[1]]  # [B, Hkv, S, d]


short, long = keys_of_last_layer(cached[:, :20]), keys_of_last_layer(cached[:, :40])
print("keys of 20 tokens:", tuple(short.shape))
print("unchanged by 20 more:", bool((short - long[:, :, :20]).abs().max() < 1e-5))

# %% [markdown]
# ## Prefill and decode
#
# So generation has two phases. **Prefill** puts the prompt through the model at once and fills the
# cache. **Decode** puts one token through, appends its key and value, and attends with one query to
# everything in the cache. A layer does this:
#
# ```python
# keys, values = cache.append(rotate(k, positions), v)   # [B, Hkv, T, d], T tokens so far
# y = cached_attention(rotate(q, positions), keys, values, cache.length, offset)
# ```
#
# Count the work of a decode step: 2 FLOPs per weight and row of the batch, and
# `4 H d T` for the scores and the weighted sum, per layer and row. Predict it for 3 rows that hold 40
# tokens with the new one (2 layers, 4 heads of 16), and measure with PyTorch's counter.

# %% predict="predicted"
weights = sum(p.numel() for n, p in lm.named_parameters() if p.dim() == 2 and "embed" not in n)
predicted = 2 * weights * 3 + 2 * 4 * 4 * 16 * 40 * 3  # products; then 4 H d T a layer and row

# %%
rows = torch.stack([text(s, k, 40) for s, k in ((3, 2), (10, 3), (60, 4))]).to(sb.device())
with torch.no_grad():
    cache = model.new_cache(3, 64)
    model(rows[:, :39], cache)
    with FlopCounterMode(display=False) as counter:
        model(rows[:, 39:], cache)
sb.predict("FLOPs of a decode step", predicted, counter.get_total_flops())

# %% [markdown]
# ### The trace, side by side
#
# Two ranks say the same text after the same prompt of 192 tokens. Rank 0 has a cache, rank 1 has none.
# Their first slices are alike: prefill attends through the fused kernel as a run without a cache does.
# Then come 24 tokens. Compare a decode step with what rank 1 does for the same token, and see when each
# is finished.


# %% tags=["nbval-ignore-output"]
@torch.no_grad()
def talk(weights):
    lm = tiny_lm(num_kv_heads=2).to(sb.device())
    lm.load_state_dict(weights)
    model, cached = CachedLM(lm), dist.get_rank() == 0
    tokens = text(3, 2, 192).repeat(6, 1).to(sb.device())
    model(tokens[:, :8], model.new_cache(6, 8)), model(tokens)  # first calls are slow
    dist.barrier()
    start = time.perf_counter()
    with sb.trace() as t:
        cache = model.new_cache(6, 220) if cached else None
        with sb.mark("prefill" if cached else "192 tokens"):
            token = model(tokens, cache)[:, -1:].argmax(-1)
        for _ in range(24):
            tokens = torch.cat((tokens, token), 1)
            with sb.mark("decode" if cached else f"{tokens.shape[1]} tokens"):
                token = model(token if cached else tokens, cache)[:, -1:].argmax(-1)
    return t, tokens.cpu(), time.perf_counter() - start


from shardbook.tracing import merge

state = {name: p.cpu() for name, p in lm.state_dict().items()}
(trace0, said0, took0), (trace1, said1, took1) = sb.run(talk, state, world_size=2).values
assert torch.equal(said0, said1) and took0 < took1
merge([trace0, trace1], title="rank 0 with a cache, rank 1 without")

# %% [markdown]
# ### How fast?
#
# Time for one more token, four rows, behind texts of growing length. (It is this machine's time,
# and a tiny model's: calling the operators costs more than their arithmetic.)


# %% tags=["nbval-ignore-output"]
@torch.no_grad()
def seconds_a_token(length, with_cache):
    tokens = text(3, 2, length).repeat(4, 1).to(sb.device())
    cache, fed = None, tokens
    if with_cache:
        cache, fed = model.new_cache(4, length + 8), tokens[:, -1:]
        model(tokens[:, :-1], cache)
    best = float("inf")
    for _ in range(30 if cache else 4):  # the best of some: other work disturbs the short ones
        if cache:
            cache.truncate(length - 1)
        start = time.perf_counter()
        model(fed, cache)[:, -1].argmax(-1).tolist()  # tolist waits for the device
        best = min(best, time.perf_counter() - start)
    return best


lengths = (64, 128, 256, 512, 1024)
measured = {c: [seconds_a_token(n, c) for n in lengths] for c in (False, True)}
assert measured[True][-1] < measured[False][-1]
fig, (ax,) = plot.figure(7, 3.2)
for (with_cache, times), colour in zip(measured.items(), plot.COLOURS, strict=False):
    name = "with the cache" if with_cache else "without"
    ax.loglog(lengths, [4 / t for t in times], "o-", label=name, color=colour)
    print(f"{name:15}", [f"{4 / t:,.0f}" for t in times], "tokens per second after", lengths)
ax.set(xlabel="tokens so far", ylabel="tokens per second")
ax.set_xticks(lengths, lengths)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# ## A position for each row
#
# A batch has prompts of different lengths, so its shorter rows are padded, by custom on the left.
# The text of a row must not depend on its company: padding is not seen, and not counted. The first
# real token has position 0.
#
# `generate` takes negative ids for padding. It moves each row to the left edge, where padding is
# behind the row, and prefills. Then it *truncates* each row to its own length: the keys of the
# padding are forgotten, the next token goes to the row's own end.

# %%
prompts = torch.full((3, 8), -1)
truth = [text(3, 2, 30), text(10, 3, 30), text(60, 4, 30)]
own = (8, 5, 3)  # real tokens of each row
for row, n in enumerate(own):
    prompts[row, 8 - n :] = truth[row][:n]
prompts = prompts.to(sb.device())
said = generate(model, prompts, 10)
for row, n in enumerate(own):
    alone = generate(model, prompts[row : row + 1, 8 - n :], 10)[0, n:]
    print(prompts[row].tolist(), "->", said[row, 8:].tolist())
    print("   as alone:", torch.equal(said[row, 8:], alone))

# %%
# ten were said, nine were put in: nobody asked what comes after the last one
draw_cache({f"row {r}": [("prompt", n), ("new", 9)] for r, n in enumerate(own)}, 8 + 10)
plt.show()

# %% [markdown]
# ### A failure: one position for all rows
#
# Forget the truncation. Every row's length is then the width of the batch: the padding's keys stay
# in the cache and are seen, and new tokens stand too far behind. The shapes are right.


# %%
@torch.no_grad()
def first_steps(own_lengths, steps=8):
    """Tokens [3, steps] and the second step's logits, with or without a length for each row."""
    lengths = torch.tensor(own).to(sb.device())
    tokens = torch.stack([F.pad(truth[r][:n], (0, 8 - n)) for r, n in enumerate(own)])
    cache = model.new_cache(3, 8 + steps)
    logits = model(tokens.to(sb.device()), cache)  # [3, 8, V]
    if own_lengths:
        cache.truncate(lengths)
    token = logits[torch.arange(3, device=sb.device()), lengths - 1].argmax(-1)
    new, second = [token], None
    for _ in range(steps - 1):
        last = model(token[:, None], cache)[:, -1]
        second = last if second is None else second
        token = last.argmax(-1)
        new.append(token)
    return torch.stack(new, 1), second.cpu()


(good, want), (bad, got) = first_steps(True), first_steps(False)
for row in range(3):
    error = (got[row] - want[row]).abs().max()
    print(f"row {row}, {own[row]} of 8 real tokens: logits within 1e-3: {bool(error < 1e-3)}")

# %% tags=["nbval-ignore-output"]
for row in range(3):
    print(f"row {row}: own lengths {good[row].tolist()}\n       one length  {bad[row].tolist()}")

# %% [markdown]
# Only the longest row computes what it should. Its neighbours may still say the right number, by luck,
# which is why a test should compare logits and not texts. The same in public code:
# [unsloth#3699](https://github.com/unslothai/unsloth/issues/3699) (one position for all rows of a batch), [tiny-llm#46](https://github.com/skyzh/tiny-llm/pull/46) (after the first
# new token the offset grew by the prompt's length once more).
#
# A batch of one shows none of this. Test a cache with rows of different lengths.
#
# ## After a rejected guess
#
# A decode step reads all weights for one token. It could check several guessed tokens with the
# same reading: put them in at once, and see how many the model would have said itself (speculative
# decoding makes a method of it). The rejected ones are already in the cache.

# %%
guess = [19, 21, 40, 11]  # two right ones, two wrong
with torch.no_grad():
    cache = model.new_cache(1, 24)
    model(text(3, 2, 7)[None].to(sb.device()), cache)  # 3 … 15
    check = torch.tensor([[17, *guess]]).to(sb.device())
    answers = model(check, cache)[0].argmax(-1).tolist()  # after 17, after 19, …
accepted = next(i for i, (g, a) in enumerate(zip(guess, answers, strict=False)) if g != a)
print("guessed:", guess, " model after each:", answers[:3], " accepted:", accepted)
print("in the cache:", cache.length.tolist(), " should be:", [7 + 1 + accepted])

# %%
draw_cache(
    {
        "after the guess": [("prompt", 7), ("said", 1), ("accepted", 2), ("stale", 2)],
        "truncated, next token": [("prompt", 7), ("said", 1), ("accepted", 2), ("next", 1)],
    },
    16,
)
plt.show()


# %%
@torch.no_grad()
def after_the_guess(truncate):
    """The logits of the next token, 23, with the rejected two forgotten or not."""
    cache = model.new_cache(1, 24)
    model(text(3, 2, 7)[None].to(sb.device()), cache)
    model(check, cache)
    if truncate:
        cache.truncate(7 + 1 + accepted)
    return model(torch.tensor([[23]]).to(sb.device()), cache)[0, -1].cpu()


fresh = model(text(3, 2, 11)[None].to(sb.device()))[0, -1].detach().cpu()
for truncate in (True, False):
    logits = after_the_guess(truncate)
    same = bool((logits - fresh).abs().max() < 1e-3)
    print("truncated" if truncate else "stale    ", "equals a run without guesses:", same)
print("after 23 comes", int(after_the_guess(True).argmax()))

# %% [markdown]
# Truncating costs nothing: the lengths change, the memory is overwritten later. In a batch each row
# accepts another number of tokens: one more reason for a length per row. Not everything can be
# truncated: a recurrent state cannot, and rejected guesses stayed in it
# ([mlx-lm#1109](https://github.com/ml-explore/mlx-lm/pull/1109)). And the *draft* model has a cache
# as well, which can hold tokens that are not in the text: with more than one guess per step, that of
# vLLM did ([vllm#9730](https://github.com/vllm-project/vllm/pull/9730)).
#
# ## What a token costs
#
# Keys and values, of each layer, of the **kv heads**: `2 L Hkv d` numbers per token. Predict the bytes
# of this model's cache for 3 rows of 64 tokens in fp32, and what it would be with a kv head for
# every head.

# %% predict="grouped full"
grouped = 2 * 2 * 2 * 16 * 64 * 3 * 4  # 2 L Hkv d T B, 4 bytes
full = grouped * 4 // 2  # 4 kv heads instead of 2


# %%
def cache_bytes(cache):
    return storage_bytes(t for layer in cache.layers for t in (layer.keys, layer.values))


sb.predict("bytes, 2 kv heads", grouped, cache_bytes(model.new_cache(3, 64)))
ungrouped = CachedLM(tiny_lm().to(sb.device()))
sb.predict("bytes, 4 kv heads", full, cache_bytes(ungrouped.new_cache(3, 64)))

# %% [markdown]
# In large models (shapes from their published configurations, bf16):

# %%
shapes = {  # layers, kv heads, head size
    "Llama 2 7B": (32, 32, 128),
    "Llama 3 8B": (32, 8, 128),
    "Llama 3 70B": (80, 8, 128),
}
for name, (layers, kv_heads, head_dim) in shapes.items():
    token = kv_cache_bytes(layers, kv_heads, head_dim, 1, 1, 2)
    row = kv_cache_bytes(layers, kv_heads, head_dim, 8192, 1, 2)
    print(f"{name:12} {token // 1024:4} KiB per token, {row / 2**30:.1f} GiB for 8,192 tokens")

# %% [markdown]
# Grouped queries (arXiv 2305.13245) divide by `H / Hkv`, which is 4 from the first line to the
# second. Head h reads kv head `h // (H / Hkv)`: neighbours share. Read with `h % Hkv` instead, all
# shapes fit and the text is noise.
#
# How far can the heads be shared? DeepSeek-V2 caches no heads at all: one latent vector of d_c = 4 d
# numbers per token and layer, from which all keys and values are computed, and d / 2 for the rotated
# part of the key, which all heads share (MLA, arXiv 2405.04434). Its sizes: 60 layers, 128 heads of 128.

# %%
layers, heads, d = 60, 128, 128
numbers = {
    "MHA, 128 kv heads": 2 * heads * d,
    "GQA, 8 kv heads": 2 * 8 * d,
    "MLA, 4 d + d / 2": 4 * d + d // 2,
    "MQA, 1 kv head": 2 * d,
}
for name, n in numbers.items():
    print(
        f"{name:18} {n * layers * 2 / 1024:7.1f} KiB per token in bf16, as {n / (2 * d):6.2f} kv heads"
    )

# %% [markdown]
# ### A window
#
# If a layer attends to the last W tokens only, older ones need no room: the cache holds W positions
# for a text of any length. One layer, 30 tokens one at a time, W = 8, against full attention whose
# mask hides what is too old:

# %%
W, n = 8, 30
q, k, v = (
    torch.randn(2, heads, n, 16, generator=torch.Generator().manual_seed(s)).to(sb.device())
    for s, heads in enumerate((4, 2, 2))
)
at = torch.arange(n, device=sb.device())
band = (at[None] <= at[:, None]) & (at[None] > at[:, None] - W)  # [n, n], True = look
wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True)

window = KVCache(2, 2, W, 16, q.dtype, q.device)
whole = KVCache(2, 2, n, 16, q.dtype, q.device)
worst, held = 0.0, {"whole": [], "window": []}
for i in range(n):
    step = slice(i, i + 1)
    keys, values = sliding_window_append(window, k[:, :, step], v[:, :, step], W)
    out = cached_attention(q[:, :, step], keys, values, window.length, window.length - 1)
    worst = max(worst, (out - wanted[:, :, step]).abs().max().item())
    whole.append(k[:, :, step], v[:, :, step])
    for name, c in (("whole", whole), ("window", window)):
        held[name].append(int(c.length[0]))
print("equals attention with a band mask within 1e-5:", worst < 1e-5)
print("tokens held after 30:", {name: h[-1] for name, h in held.items()})
plot.curves(held, "token", "tokens held per row")
plt.show()

# %% [markdown]
# Ours keeps the window in order, which is easy to check and to read, and so moves all W entries at each
# token. Mistral's rolling buffer writes position i to slot i mod W and moves nothing (arXiv 2310.06825):
# attention does not care in which order keys lie, since each carries its position. Elements read and
# written for one more token in a window of 4,096 (one layer, 2 kv heads of 16), and the same output:

# %%
big = torch.randn(1, 2, 4100, 16, generator=torch.Generator().manual_seed(3)).to(sb.device())
ordered, ring = (
    KVCache(1, 2, 4096, 16, device=sb.device()),
    RingCache(1, 2, 4096, 16, device=sb.device()),
)
sliding_window_append(ordered, big[:, :, :-1], big[:, :, :-1], 4096)
ring.append(big[:, :, :-1], big[:, :, :-1])
last = big[:, :, -1:]
moved = {  # beside the new token's own write, which is in place in both
    "in order": operator_traffic(lambda: sliding_window_append(ordered, last, last, 4096)),
    "ring": operator_traffic(lambda: ring.append(last, last)),
}
print("the ring moves less than a thousandth:", moved["ring"] < moved["in order"] / 1000)
print(f"in order: at least 4 x 4,096 x 2 x 16 elements: {moved['in order'] >= 4 * 4096 * 2 * 16}")
q, full = last.repeat(1, 2, 1, 1), torch.tensor([4096]).to(sb.device())
a, b = (cached_attention(q, c.keys, c.values, full, 4095) for c in (ordered, ring))
print("the same output:", bool((a - b).abs().max() < 1e-5))

# %% [markdown]
# Two things to mind. A key is kept as it was rotated, with its true position, while its place in the
# window moves: the position of a new token is not the cache's length any more, somebody has to
# count. And a *chunk* of several queries sees with its first query keys that its last one pushes
# out: prefill attends with the mask first and fills the window after.
#
# ### Attention sinks
#
# A window forgets the first tokens, and large models break when it does. Their softmax has to put its
# weight somewhere, and where no key fits it goes to the first tokens, which every query has seen; keep
# the keys of four of them beside the window and the model goes on (arXiv 2309.17453). Our model is too
# small and too briefly trained to count on such a sink, so here is a *constructed* one: key 0 has a
# large score and a value of zero, which is how a head says "nothing".

# %%
scores = torch.cat((torch.tensor([4.0]), torch.zeros(15)))  # the sink, and keys that don't matter
values = torch.cat((torch.zeros(1, 1), torch.ones(15, 1)))
kept = {
    "all 16 keys": range(16),
    "window of 8": range(8, 16),
    "sink and window of 7": [0, *range(9, 16)],
}
for name, keys in kept.items():
    keys = list(keys)
    weights = scores[keys].softmax(0)
    out = (weights @ values[keys]).item()
    print(f"{name:21} weight of key 0: {weights[0] if 0 in keys else 0:.2f}, output {out:.2f}")

# %% [markdown]
# The window makes a loud head out of a silent one: its output is several times as large, though the
# forgotten value was zero. With the sink the head stays quiet.
#
# ## Why decoding waits for memory
#
# A decode step reads every weight and every key and value, and uses a weight once for each row. Its
# arithmetic intensity is `(2 N B + 4 L H d T B)` FLOPs over the bytes of weights and cache. (The input
# embedding is an exception, only one row per token is read of it. It is counted whole here.) For
# Llama 3 8B in bf16 with 4,096 tokens of context:

# %%
layers, heads, kv_heads, head_dim, N, S = 32, 32, 8, 128, 8.03e9, 4096
intensity = partial(decode_intensity, N, layers, heads, kv_heads, head_dim)
for batch in (1, 8, 64, 512, 4096):
    print(f"{batch:5} rows: {intensity(S, batch, 2):5.1f} FLOPs per byte")
cache_only = 4 * heads / (2 * kv_heads * 2)
print(f"scores and weighted sums alone, any batch: {cache_only:.1f} FLOPs per byte")
embedding = 128_256 * heads * head_dim  # the vocabulary, from the published configuration
print(f"the input embedding is {embedding / 1e9:.1f} of {N / 1e9:.1f} billion parameters")

# %%
prefill = (2 * N * S + 2 * layers * heads * head_dim * S**2) / (
    2 * N + kv_cache_bytes(layers, kv_heads, head_dim, S, 1, 2)
)
draw_roofline(
    {
        "decode, 1 row": intensity(S, 1, 2),
        "decode, 64 rows": intensity(S, 64, 2),
        "decode, 64 rows of 512": intensity(512, 64, 2),
        "prefill of 4,096": prefill,
    }
)
plt.show()

# %% [markdown]
# The corner of every device lies at more than a hundred FLOPs per byte. A batch shares the reading of
# the weights, so it helps, until the cache is larger than the weights: a row's cache is shared with
# nobody. With contexts of 4,096 this model never leaves the sloped part, with any batch. Prefill of
# the same length is far on the flat part. The two phases want different things, and large
# installations give them different devices.
#
# On the slope, time is bytes over bandwidth. The most that one row can reach:

# %%
step_bytes = 2 * N + kv_cache_bytes(layers, kv_heads, head_dim, S, 1, 2)
for name, (peak, bandwidth) in DEVICES.items():
    corner = peak / bandwidth
    print(
        f"{name:13} corner {corner:4.0f} FLOPs per byte, at most {bandwidth * 1e12 / step_bytes:4.0f} tokens per second"
    )

# %% [markdown]
# ### One query, many cores: split the keys
#
# A decode step has one query per head, so tiles of queries give a device with a hundred cores nothing to
# share. But the keys can be cut: each core takes a part and gives its output and log-sum-exp, and
# chapter 24's merge adds them up (Flash-Decoding). The same lines serve ranks that hold parts of
# one long row.


# %%
def split_decode(q, keys, values, parts):
    """q [B, H, 1, d] against keys in `parts` parts, each as a core would see it."""
    merged = None
    for k, v in zip(keys.chunk(parts, 2), values.chunk(parts, 2), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        part = flash_attention_forward(q, k, v)  # out [B, H, 1, d], lse [B, H, 1]
        merged = part if merged is None else merge_attention(*merged, *part)
    return merged[0]


whole = cached_attention(q, ring.keys, ring.values, full, 4095)
for parts in (1, 4, 16):
    error = (split_decode(q, ring.keys, ring.values, parts) - whole).abs().max()
    print(f"{parts:2} parts: within 1e-5 of all keys at once: {bool(error < 1e-5)}")

# %% [markdown]
# ## Decoding on several ranks
#
# More devices have more bandwidth together. Tensor parallelism (chapter 22) cuts weights and heads,
# and the cache with the heads: a rank keeps keys and values of its own kv heads and nobody sends
# any. What travels is the activations, one token per row. Predict the bytes all-reduced in a step
# with 3 rows (2 layers, D = 64, fp32), and each rank's cache of 24 positions on 1, 2 and 4 ranks.

# %% predict="reduced caches"
reduced = (1 + 2 * 2) * 3 * 64 * 4  # the embedding and two halves a layer, of [3, 1, 64]
one = 2 * 2 * 2 * 16 * 24 * 3 * 4  # two kv heads
caches = [one, one // 2, one // 2]  # two kv heads on four ranks: each is held twice


# %%
def parallel(weights, prompts):
    lm = tiny_lm(num_kv_heads=2).to(sb.device())
    lm.load_state_dict(weights)
    model = tensor_parallel_cached(lm)
    said = generate(model, prompts.to(sb.device()), 10)
    cache = model.new_cache(3, 24)
    with torch.no_grad():
        model(prompts[:, -3:].to(sb.device()), cache)
        with calls.record() as log:
            model(prompts[:, -1:].to(sb.device()), cache)
    return said.cpu(), calls.summary(log), cache_bytes(cache)


measured = []
for world in (1, 2, 4):
    values = sb.run(parallel, state, prompts.cpu(), world_size=world).values
    equal = all(torch.equal(tokens, said.cpu()) for tokens, _, _ in values)
    measured.append(values[0][2])
    print(f"{world} ranks: the same text on every rank: {equal}")
log = values[0][1]
sb.predict("bytes all-reduced per step, 4 ranks", reduced, log["all_reduce"][1])
sb.predict("bytes of a rank's cache", caches, measured)
print("a step on 4 ranks:", log)

# %% [markdown]
# From two ranks to four the cache of a rank does not shrink: there are two kv heads, and a rank has
# at least one. Grouped queries make the cache small and hard to cut. Beyond that one cuts the
# sequence (chapter 24's merge works for one query as well) or gives whole rows to ranks.
#
# The all-reduces are tiny, and `2 L + 1` of them lie on the path of every token (the one is the
# embedding's), before the gather of the logits. Their latency, not their bytes, is what limits how
# many ranks help.
#
# ## On a real cluster
#
# - **NPU.** `torch_npu.npu_fused_infer_attention_score` serves both phases: with one query it takes its
#   decode branch. `actual_seq_lengths_kv` is our `length`, a number for each row, as a list on the
#   host. Its defaults are traps for a port: `num_heads=1`, `num_key_value_heads=0`, a scale of 1 and
#   `input_layout="BSH"` (torch_npu's API reference; the scale is called `scale_value` up to 6.0 and
#   `scale` in 7.0). Shapes that change at every step cost compilation in graph mode: a cache of a
#   fixed `max_len` with lengths beside it does not change shape. (Ours does: `append` returns keys and
#   values up to the longest row, and asks the device for that length in each layer.) Ranks inside a host talk over HCCS.
# - **CUDA.** `flash_attn_with_kvcache` appends and attends in one kernel, with `cache_seqlens` [B]. One
#   query gives few tiles, so kernels cut the *keys* over the chip's cores and merge by log-sum-exp
#   (Flash-Decoding). A step of small kernels is captured in a graph, or Python is the limit, as in our
#   picture above.
# - **Many hosts.** Prefill and decode run on different devices and the cache travels between them over
#   RDMA or the unified bus, once per request: for the 8,192 tokens of Llama 3 8B above, 1 GiB.
#
# | published | figure | source |
# |---|---|---|
# | OPT-13B, a token in the cache | 800 KB | arXiv 2309.06180 |
# | cache memory that held tokens, in systems before vLLM | 20.4 % to 38.2 % | arXiv 2309.06180 |
# | PaLM 540B, int8 weights, a token at small batch | 29 ms on 64 TPU v4 | arXiv 2211.05102 |
# | Mistral 7B, window of 4,096, at 32k tokens | 8x less cache | arXiv 2310.06825 |
# | DeepSeek-V2 as deployed (latent attention, about 6 bits per number) against DeepSeek 67B | cache 93.3 % smaller | arXiv 2405.04434 |
# | DeepSeek-R1 on CloudMatrix384, an NPU | prefill 6,688, decode 1,943 tokens/s | arXiv 2506.12708 |
#
# The first line with this chapter's formula, OPT-13B having 40 layers and 40 heads of 128 in fp16:

# %%
print(kv_cache_bytes(40, 40, 128, 1, 1, 2) // 1024, "KiB")

# %% [markdown]
# ## What comes next
#
# - **Blocks.** A cache of `max_len` is room mostly unused. Cut into blocks that are handed out when
#   needed, as pages are, it holds more rows, and rows that begin alike can share.
# - **Batching.** Rows end at different times. With a length for each row, a finished one can be replaced in
#   the middle of the others.
# - **Speculation.** The truncation above, with a small model that guesses and a rule that keeps the
#   distribution of the large one.
#
# <details><summary>Questions, answered</summary>
#
# - *Why are queries not cached?* No later token asks for them: a query serves its own position only.
# - *Why truncate after a left-padded prefill?* The padding's keys are in the cache, behind the row's end;
#   with its own length a row neither sees them nor counts them.
# - *Why does a larger batch not always help?* It shares the weights' bytes, never the cache's.
# </details>
#
# First write the cache itself: [the lab](../labs/32_kv_cache.ipynb). Then
# [chapter 43](43_diffusion.ipynb) trains a diffusion transformer.
