"""The stand-in npu in one process: what runs on it gives what the CPU gives.

`make test-npu` runs these; on another device they are skipped.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardbook as sb
from shardbook.basics.tiny import TinyLM, counting_batch, tiny_lm, token_loss

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(sb.device().type != "npu", reason="runs on the stand-in: make test-npu"),
]
NPU = "npu"


def on_npu(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(NPU).requires_grad_(grad)


def close(actual, expected, tolerance=1e-5):
    # 1e-5: the same cpu kernels, only the order of a few sums differs
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=tolerance)


# Training


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_training_matches_the_cpu(optimizer):
    here, there = tiny_lm(num_kv_heads=2), tiny_lm(num_kv_heads=2).to(NPU)
    steps = [optimizer(m.parameters(), lr=1e-2) for m in (here, there)]
    for step in range(3):
        tokens, targets = counting_batch(step, batch=2, seq=16)
        losses = []
        for model, opt, device in zip((here, there), steps, ("cpu", NPU), strict=True):
            loss = token_loss(model(tokens.to(device)), targets.to(device))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            losses.append(loss)
        close(losses[1], losses[0])
    for a, b in zip(there.parameters(), here.parameters(), strict=True):
        # eps 1e-8 in AdamW turns rounding of near-zero gradients into steps of up to lr
        close(a, b, 1e-3)
        assert a.device == torch.device("npu:0")


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_adamw_variants_agree(how):
    plain, other = nn.Linear(4, 3).to(NPU), nn.Linear(4, 3).to(NPU)
    other.load_state_dict(plain.state_dict())
    for layer, kwargs in ((plain, {"foreach": False}), (other, how)):
        opt = torch.optim.AdamW(layer.parameters(), lr=0.1, **kwargs)
        layer(on_npu(2, 4)).pow(2).sum().backward()
        opt.step()
    close(other.weight, plain.weight)


def test_tied_weights_stay_tied():
    model = TinyLM()
    model.head.weight = model.embed.weight
    model.to(NPU)
    assert model.head.weight is model.embed.weight


def test_convolutions_match_the_cpu():
    down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.BatchNorm2d(8))
    up = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.Upsample(scale_factor=2))
    here = nn.Sequential(down, up)
    there = copy.deepcopy(here).to(NPU)
    x = on_npu(2, 3, 16, 16)
    a, b = here(x.cpu()), there(x)
    a.pow(2).mean().backward()
    b.pow(2).mean().backward()
    close(b, a)
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        close(q.grad, p.grad)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Conv1d, (2, 3, 9)), (nn.Conv3d, (2, 3, 5, 6, 7))])
def test_convolutions_of_one_and_three_dimensions(layer, shape):
    here = layer(3, 4, 3)
    there = copy.deepcopy(here).to(NPU)
    close(there(on_npu(*shape)), here(on_npu(*shape).cpu()))


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_match_the_cpu(layer):
    here = layer(4, 5, batch_first=True)
    there = copy.deepcopy(here).to(NPU)
    x = on_npu(2, 3, 4)
    a, b = here(x.cpu())[0], there(x)[0]
    close(b, a)
    a.sum().backward()
    b.sum().backward()
    close(there.weight_hh_l0.grad, here.weight_hh_l0.grad)


def test_autocast_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    layer, x = nn.Linear(8, 8).to(NPU), on_npu(2, 8, grad=True)
    with torch.autocast(NPU, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert F.softmax(y, -1).dtype == torch.float32
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    close(x.grad, layer.weight.sum(0).expand(2, 8))


# Operators


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(8, 8, dtype=torch.bool, device=q.device).tril()
        ),
    ],
)
def test_attention_matches_the_cpu(attend):
    q, k, v = (on_npu(2, 4, 8, 16, seed=i, grad=True) for i in range(3))
    q_, k_, v_ = (t.detach().cpu().requires_grad_() for t in (q, k, v))
    a, b = attend(q, k, v), attend(q_, k_, v_)
    a.pow(2).sum().backward()
    b.pow(2).sum().backward()
    close(a, b)
    close(q.grad, q_.grad)


def test_views_indexing_and_in_place():
    x = torch.arange(24.0, device=NPU).view(4, 6)
    y = torch.arange(24.0).view(4, 6)
    for t in (x, y):
        t[1:3, ::2].mul_(2)
        t[t > 20] = 0
        t[torch.tensor([0, 1])] += 1  # cpu indices are allowed
        t.index_add_(0, torch.tensor([0, 1], device=t.device), torch.ones(2, 6, device=t.device))
        t.scatter_(1, torch.zeros(4, 1, dtype=torch.long, device=t.device), 5.0)
    close(x, y)
    assert x.t().data_ptr() == x.data_ptr()
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for op in (
        lambda t: t.unfold(1, 2, 2),
        lambda t: t.sort(descending=True).indices,
        lambda t: t.topk(2).values,
        lambda t: torch.einsum("ij,kj->ik", t, t),
        lambda t: torch.stack(t.split([1, 3])[1].chunk(3)),
        lambda t: t.std(0),
        lambda t: F.one_hot(t.argmax(1), 6),
        lambda t: torch.where(t > 1, t, 0.0),
        lambda t: t.bfloat16() @ t.bfloat16().T,
        lambda t: torch.logsumexp(t, 0),
        lambda t: t.unique(),
    ):
        close(op(x), op(y))


def test_out_and_resize():
    a, out = on_npu(3, 3), torch.empty(0, device=NPU)
    torch.mm(a, a, out=out)
    close(out, a.cpu() @ a.cpu())
    storage = out.untyped_storage()
    storage.resize_(0)
    storage.resize_(36)
    assert out.set_(a).data_ptr() == a.data_ptr()


def test_functional_transforms():
    from torch.func import grad, vmap

    w, x = on_npu(3), on_npu(5, 3)
    per_row = vmap(grad(lambda w, x: (x @ w).sin()), (None, 0))(w, x)
    close(per_row, (x @ w).cos()[:, None] * x)


def test_compile_with_eager_and_aot():
    layer, x = nn.Linear(4, 4).to(NPU), on_npu(2, 4)
    for how in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=how)
        layer.zero_grad()
        compiled(x).sum().backward()
        close(layer.weight.grad, x.sum(0).expand(4, 4))


# Random numbers


def test_generators_are_the_devices_own():
    torch.manual_seed(1)
    first = torch.randn(5, device=NPU)
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(5, device=NPU))
    torch.manual_seed(1)
    assert not torch.equal(first.cpu(), torch.randn(5))  # as on a real one: another algorithm
    state = torch.npu.get_rng_state()
    x = torch.rand(3, device=NPU)
    torch.npu.set_rng_state(state)
    assert torch.equal(x, torch.rand(3, device=NPU))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=NPU, generator=torch.Generator())
    own = torch.Generator(NPU).manual_seed(3)
    x = torch.randn(3, device=NPU, generator=own)
    assert torch.equal(x, torch.randn(3, device=NPU, generator=own.manual_seed(3)))


def test_dropout_follows_the_devices_seed():
    x = torch.ones(1000, device=NPU)
    torch.manual_seed(2)
    a, b = F.dropout(x, 0.25), F.dropout(x, 0.25)
    torch.manual_seed(2)
    assert torch.equal(a, F.dropout(x, 0.25)) and not torch.equal(a, b)
    # 1000 draws of p 0.25: 5 standard deviations are 0.07
    assert abs((a == 0).float().mean().item() - 0.25) < 0.07
    close(a[a > 0], torch.full_like(a[a > 0], 1 / 0.75))


# Memory, streams, events


def test_memory_is_counted_per_device():
    before = torch.npu.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, device=NPU)
    y = x.view(10, 100)[2:]  # a view costs nothing
    assert torch.accelerator.memory_allocated() - before == 4000
    z = x * 2
    assert torch.npu.memory_allocated() - before == 8000
    del x, y, z
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before == 8000
    free, total = torch.npu.mem_get_info()
    assert total - free == before


def test_several_devices():
    if torch.npu.device_count() < 2:
        pytest.skip("one device: SHARDBOOK_STANDIN=1")
    before = torch.npu.memory_allocated(1)
    x = torch.ones(8, device="npu:1")
    assert torch.npu.memory_allocated(1) - before == 32
    assert (x * 2).device == torch.device("npu:1")
    with torch.npu.device(1):
        assert torch.empty(2, device=NPU).device.index == 1
    assert torch.empty(2, device=NPU).device.index == 0
    close(x.to("npu:0"), torch.ones(8))
    torch.npu.manual_seed_all(5)
    assert torch.equal(torch.rand(3, device="npu:0").cpu(), torch.rand(3, device="npu:1").cpu())


def test_events_measure_time_and_streams_order():
    import time

    start, end = (torch.Event(NPU, enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 2000  # ms; the upper end allows for a busy machine
    side = torch.Stream(NPU)
    with side:
        assert torch.accelerator.current_stream() == side
        x = torch.ones(3, device=NPU)
        x.record_stream(side)
    torch.accelerator.current_stream().wait_stream(side)
    torch.npu.Event(enable_timing=True).record()
    torch.accelerator.synchronize()


def test_the_accelerator_api():
    accelerator = torch.accelerator
    assert accelerator.current_accelerator(check_available=True).type == NPU
    assert accelerator.device_count() == torch.npu.device_count()
    assert torch.get_device_module(NPU) is torch.npu
    assert "stand-in" in torch.npu.get_device_name()


# Leaving and coming back


def test_saving_and_loading():
    model, file = tiny_lm().to(NPU), io.BytesIO()
    torch.save({"model": model.state_dict(), "rng": torch.npu.get_rng_state()}, file)
    for location, device in ((None, "npu:0"), ("cpu", "cpu"), ("npu:0", "npu:0")):
        file.seek(0)
        weights = torch.load(file, map_location=location, weights_only=True)["model"]
        assert weights["embed.weight"].device == torch.device(device)
        close(weights["embed.weight"], model.embed.weight)
    copied = pickle.loads(pickle.dumps(model.embed.weight))
    assert copied.device == torch.device("npu:0")
    with torch.device("meta"):
        empty = TinyLM()
    empty.to_empty(device=NPU).load_state_dict(model.state_dict())
    close(empty.head.weight, model.head.weight)


def test_a_loader_with_pinned_memory():
    from torch.utils.data import DataLoader, TensorDataset

    data = torch.arange(24.0).view(8, 3)
    loader = DataLoader(TensorDataset(data), batch_size=4, pin_memory=True)
    got = [x.to(NPU, non_blocking=True) for (x,) in loader]
    close(torch.cat(got), data)


def test_operators_are_counted():
    from tests import standin

    standin.reset_op_counts()
    (on_npu(2, 2) @ on_npu(2, 2)).add_(1)
    counts = standin.op_counts()
    assert counts["aten::mm"] == 1 and counts["aten::add_.Tensor"] == 1


def test_pinned_memory_is_told_from_other_memory():
    x = torch.arange(8.0)
    assert x.pin_memory().is_pinned() and x.pin_memory()[3:].is_pinned()
    assert not x.is_pinned() and not x.to(NPU).is_pinned()
    close(x.pin_memory().to(NPU), x)
