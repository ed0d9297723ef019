"""The KV cache beyond the checks: random histories, whole models, transformers, real ranks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardbook as sb
from shardbook import calls
from shardbook.attention.cache import (
    KVCache,
    cached_attention,
    decode_intensity,
    generate,
    kv_cache_bytes,
    sliding_window_append,
)
from shardbook.attention.counting import largest_tensor
from shardbook.attention.ring_cache import RingCache
from shardbook.basics.tiny import rotate, tiny_lm
from shardbook.memory import storage_bytes
from shardbook.studies.cached_lm import (
    CachedLM,
    LayerCaches,
    generate_without_cache,
    tensor_parallel_cached,
)

SIZES = {"vocab": 60, "dim": 40, "num_layers": 3, "num_heads": 4, "hidden": 72}
FEW = settings(max_examples=25, deadline=None)


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt_of(batch, width, seed=0, vocab=60):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (batch, width), generator=generator)


def small_lm(num_kv_heads=2):
    return CachedLM(tiny_lm(num_kv_heads=num_kv_heads, **SIZES).to(sb.device()))


# Histories: what a cache holds after any sequence of appends and truncations.


@FEW
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_a_cache_holds_what_a_list_would(data, batch, kv_heads, max_len):
    cache = KVCache(batch, kv_heads, max_len, 5)
    rows = [torch.zeros(kv_heads, 0, 5) for _ in range(batch)]
    for step in range(6):
        longest = max(r.shape[1] for r in rows)
        if data.draw(st.booleans()):
            new = data.draw(st.integers(0, max_len + 2 - longest))
            k = draw(batch, kv_heads, new, 5, seed=step)
            if longest + new > max_len:
                with pytest.raises(ValueError, match="the cache holds"):
                    cache.append(k, -k)
                continue
            rows = [torch.cat((r, k[b]), dim=1) for b, r in enumerate(rows)]
            keys, values = cache.append(k, -k)
            assert keys.shape == (batch, kv_heads, longest + new, 5)
            for b, row in enumerate(rows):
                assert torch.equal(keys[b, :, : row.shape[1]], row)
                assert torch.equal(values[b, :, : row.shape[1]], -row)
        else:
            lengths = [data.draw(st.integers(0, r.shape[1])) for r in rows]
            cache.truncate(torch.tensor(lengths))
            rows = [r[:, :n] for r, n in zip(rows, lengths, strict=True)]
        assert cache.length.tolist() == [r.shape[1] for r in rows]


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 7))
def test_a_window_holds_the_last_tokens_of_each_row(data, batch, window):
    cache = KVCache(batch, 2, window, 3)
    rows = [torch.zeros(2, 0, 3) for _ in range(batch)]
    for step in range(5):
        new = data.draw(st.integers(1, 2 * window + 1))
        k = draw(batch, 2, new, 3, seed=step)
        rows = [torch.cat((r, k[b]), dim=1)[:, -window:] for b, r in enumerate(rows)]
        keys, values = sliding_window_append(cache, k, -k, window)
        assert keys.shape[2] <= window and storage_bytes([cache.keys]) == batch * 2 * window * 3 * 4
        for b, row in enumerate(rows):
            assert torch.equal(keys[b, :, : row.shape[1]], row)
            assert torch.equal(values[b, :, : row.shape[1]], -row)
        lengths = [data.draw(st.integers(0, r.shape[1])) for r in rows]
        cache.truncate(torch.tensor(lengths))
        rows = [r[:, :n] for r, n in zip(rows, lengths, strict=True)]


def test_what_can_not_be_is_refused():
    cache = KVCache(2, 1, 4, 3)
    cache.append(draw(2, 1, 2, 3, seed=0), draw(2, 1, 2, 3, seed=1))
    for lengths in (3, -1, torch.tensor([2, 3])):
        with pytest.raises(ValueError, match="can only become shorter"):
            cache.truncate(lengths)
    with pytest.raises(ValueError, match="expected window"):
        sliding_window_append(cache, cache.keys, cache.values, 3)
    with pytest.raises(ValueError, match="do not divide"):
        cached_attention(
            draw(1, 3, 1, 4, seed=0), *[draw(1, 2, 5, 4, seed=1)] * 2, torch.ones(1), 0
        )
    with pytest.raises(ValueError, match="all padding"):
        generate(small_lm(), torch.tensor([[-1, -1], [3, 4]]), 1)
    with pytest.raises(ValueError, match="on the left"):
        generate(small_lm(), torch.tensor([[3, -1], [3, 4]]), 1)


# Attention, against SDPA with the row's own keys.


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([(1, 1), (4, 2), (6, 3), (6, 1), (4, 4)]),
)
def test_cached_attention_equals_sdpa_of_each_row(rows, new, head_counts):
    heads, kv_heads = head_counts
    old = [length for length, _ in rows]
    total = max(old) + new + 2  # room behind the longest row, with anything in it
    q = draw(len(rows), heads, new, 6, seed=1)
    keys, values = (draw(len(rows), kv_heads, total, 6, seed=s) * 10 for s in (2, 3))
    got = cached_attention(q, keys, values, torch.tensor(old) + new, torch.tensor(old))
    for b, length in enumerate(old):
        seen = length + new
        mask = torch.ones(new, seen, dtype=torch.bool).tril(length)
        want = F.scaled_dot_product_attention(
            q[b : b + 1], keys[b : b + 1, :, :seen], values[b : b + 1, :, :seen],
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        # values of size 10, summed in another order
        assert torch.allclose(got[b : b + 1], want, atol=2e-5, rtol=1e-5)


def test_many_queries_make_no_matrix():
    q, k = draw(1, 2, 300, 4, seed=1), draw(1, 1, 400, 4, seed=2)
    lengths = torch.tensor([400])
    assert largest_tensor(lambda: cached_attention(q, k, k, lengths, 100)) < 300 * 400
    mask = torch.ones(300, 400, dtype=torch.bool).tril(100)
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(cached_attention(q, k, k, lengths, 100), want, atol=1e-5)


@FEW
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 7))
def test_a_ring_attends_as_the_window_in_order(chunks, window):
    ring, cache = RingCache(2, 1, window, 4), KVCache(2, 1, window, 4)
    for step, new in enumerate(chunks):
        k, v = draw(2, 1, new, 4, seed=step), draw(2, 1, new, 4, seed=step + 50)
        keys, values, valid = ring.append(k, v)
        ordered = sliding_window_append(cache, k, v, window)
        q = draw(2, 3, 1, 4, seed=99)
        want = cached_attention(q, *ordered, cache.length, cache.length - 1)
        assert torch.allclose(cached_attention(q, keys, values, valid, valid - 1), want, atol=1e-5)
    assert ring.length.tolist() == [sum(chunks)] * 2


# Whole models.


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_generation_equals_the_run_without_a_cache(num_kv_heads):
    model, prompt = small_lm(num_kv_heads), prompt_of(3, 7).to(sb.device())
    want = generate_without_cache(model, prompt, 20)
    assert len(want[:, 7:].unique()) > 4, "the text says something"
    assert torch.equal(generate(model, prompt, 20), want)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 99))
def test_padded_rows_equal_rows_alone_and_stop_at_eos(lengths, new, seed):
    model, width = small_lm(), max(lengths)
    prompt = prompt_of(len(lengths), width, seed).to(sb.device())
    alone = [
        generate_without_cache(model, prompt[b : b + 1, width - n :], new)[0, n:].tolist()
        for b, n in enumerate(lengths)
    ]
    for b, n in enumerate(lengths):
        prompt[b, : width - n] = -1
    got = generate(model, prompt, new)
    assert torch.equal(got[:, :width], prompt)
    assert got[:, width:].tolist() == alone
    eos = alone[0][new // 2]
    for row, free in zip(generate(model, prompt, new, eos)[:, width:].tolist(), alone, strict=True):
        stop = free.index(eos) if eos in free else new
        assert row == free[:stop] + [eos] * (new - stop)


def test_chunks_and_a_rejected_guess_change_nothing():
    model, tokens = small_lm(), prompt_of(2, 12).to(sb.device())
    with torch.no_grad():
        want = model(tokens)
        cache = model.new_cache(2, 16)
        chunks = [model(t, cache) for t in tokens[:, :9].split([4, 1, 4], dim=1)]
        assert torch.allclose(torch.cat(chunks, 1), want[:, :9], atol=1e-5)
        guess = prompt_of(2, 5, seed=7).to(sb.device())
        model(guess, cache)
        cache.truncate(torch.tensor([9, 6], device=sb.device()))  # row 1 loses three good ones
        model(tokens[:, 9:10], cache)
        cache.truncate(torch.tensor([9, 6], device=sb.device()))
        rest = torch.stack((tokens[0, 9:12], tokens[1, 6:9]))
        got = model(rest, cache)
    assert torch.allclose(got, torch.stack((want[0, 9:], want[1, 6:9])), atol=1e-5)


def test_memory_and_work_of_a_step_are_the_closed_forms():
    batch, held = 3, 11
    model = small_lm()
    cache = model.new_cache(batch, held + 1)
    buffers = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert storage_bytes(buffers) == kv_cache_bytes(3, 2, 10, held + 1, batch, 4)
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n
    )
    with torch.no_grad():
        model(prompt_of(batch, held).to(sb.device()), cache)
        with FlopCounterMode(display=False) as counter:
            model(prompt_of(batch, 1).to(sb.device()), cache)
    flops = counter.get_total_flops()
    assert flops == 2 * weights * batch + 4 * 3 * 4 * 10 * (held + 1) * batch
    moved = weights * 4 + storage_bytes(buffers)
    assert decode_intensity(weights, 3, 4, 2, 10, held + 1, batch, 4) == pytest.approx(
        flops / moved
    )


# Against transformers' Llama, whose weights a model of a few lines takes over.


class CachedLlama(nn.Module):
    """Llama's forward pass from its parameters, with our cache and attention."""

    def __init__(self, llama):
        super().__init__()
        self.llama, self.config = llama, llama.config

    def new_cache(self, batch, max_len):
        c = self.config
        return LayerCaches(
            [
                KVCache(
                    batch, c.num_key_value_heads, max_len, c.hidden_size // c.num_attention_heads
                )
                for _ in range(c.num_hidden_layers)
            ]
        )

    def rms(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def forward(self, tokens, cache):
        w = dict(self.llama.named_parameters())
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        offset = cache.length.clone()
        positions = offset[:, None] + torch.arange(tokens.shape[1])
        x = F.embedding(tokens, w["model.embed_tokens.weight"])
        for i, layer in enumerate(cache.layers):
            p = f"model.layers.{i}."
            h = self.rms(x, w[p + "input_layernorm.weight"])
            q, k, v = (
                F.linear(h, w[f"{p}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, head_dim))
                for n in "qkv"
            )
            q, k = rotate(q.transpose(1, 2), positions), rotate(k.transpose(1, 2), positions)
            keys, values = layer.append(k, v.transpose(1, 2))
            y = cached_attention(q, keys, values, layer.length, offset)
            x = x + F.linear(y.transpose(1, 2).flatten(2), w[p + "self_attn.o_proj.weight"])
            h = self.rms(x, w[p + "post_attention_layernorm.weight"])
            gate, up = (F.linear(h, w[f"{p}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[p + "mlp.down_proj.weight"])
        return F.linear(self.rms(x, w["model.norm.weight"]), w["lm_head.weight"])


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_llama_of_transformers_says_the_same(llama):
    prompt = prompt_of(4, 8, seed=2, vocab=61)
    for row, pad in enumerate((0, 3, 7, 1)):
        prompt[row, :pad] = -1
    mine = CachedLlama(llama)
    want = llama.generate(
        prompt.clamp(min=0), attention_mask=(prompt >= 0).long(), max_new_tokens=15,
        do_sample=False, use_cache=True,
    )[:, 8:]  # fmt: skip
    assert len(want.unique()) > 8, "the text says something"
    assert torch.equal(generate(mine, prompt, 15)[:, 8:], want)

    eos = int(want[0, 5])
    stopped = llama.generate(
        prompt.clamp(min=0), attention_mask=(prompt >= 0).long(), max_new_tokens=15,
        do_sample=False, eos_token_id=eos, pad_token_id=eos,
    )[:, 8:]  # fmt: skip
    stopped = F.pad(stopped, (0, 15 - stopped.shape[1]), value=eos)
    assert torch.equal(generate(mine, prompt, 15, eos)[:, 8:], stopped)


# Real ranks.


def parallel_text(prompt, new, num_kv_heads):
    """Tokens, the collectives of the last step, bytes of the caches, of one rank."""
    model = tensor_parallel_cached(tiny_lm(num_kv_heads=num_kv_heads, **SIZES).to(sb.device()))
    made = []
    make = model.new_cache
    model.new_cache = lambda *sizes: made.append(make(*sizes)) or made[-1]
    tokens = generate(model, prompt.to(sb.device()), new)
    made[0].truncate(5)
    with torch.no_grad(), calls.record() as log:
        model(prompt[:, :1].clamp(min=0).to(sb.device()), made[0])
    held = storage_bytes(t for layer in made[0].layers for t in (layer.keys, layer.values))
    return tokens.cpu(), calls.summary(log), held


@pytest.mark.parametrize("world_size, num_kv_heads", [(2, 2), (4, 2), (4, 4)])
def test_tensor_parallel_decoding(world_size, num_kv_heads):
    prompt = prompt_of(3, 6)
    prompt[1, :4] = -1
    want = generate(small_lm(num_kv_heads), prompt.to(sb.device()), 9).cpu()
    values = sb.run(parallel_text, prompt, 9, num_kv_heads, world_size=world_size).values
    here = max(1, num_kv_heads // world_size)  # kv heads of a rank
    for tokens, log, held in values:
        assert torch.equal(tokens, want)
        assert held == kv_cache_bytes(3, here, 10, 15, 3, 4)
        # the embedding and two halves of three layers, one token a row; then the logits
        assert log == {"all_reduce": (7, 7 * 3 * 40 * 4), "all_gather": (1, 3 * 60 * 4)}
