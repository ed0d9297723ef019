"""The DiT over ranks equals one rank, and what the port of chapter 44 is compared with."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardbook as sb
from shardbook.models.dit import DiT, DiTBlock
from shardbook.models.dit_parallel import TensorParallelDiTBlock, attending, ulysses_dit_forward
from shardbook.models.rope3d import rope_3d
from shardbook.parallel.ring import ring_attention
from shardbook.parallel.ulysses import ulysses_attention

CHAPTER = Path(__file__).parents[1] / "book/44_dit_port"


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(sb.device())


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=i).cpu() * 0.1)
    return model.to(sb.device())


def over_mesh(heads: int, tokens: int, ring: bool) -> tuple[float, float, float]:
    """Errors of output, gradient of x, and gradient of every whole parameter, on this rank."""
    mesh = init_device_mesh(sb.device().type, (heads, tokens), mesh_dim_names=("h", "t"))
    by_heads, by_tokens = mesh["h"].get_group(), mesh["t"].get_group()
    rank = dist.get_rank(by_tokens)
    whole, block = filled(DiTBlock(24, 4)), filled(DiTBlock(24, 4))
    block = TensorParallelDiTBlock(block, by_heads)
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4))  # 24 tokens
    rope = tuple(t.to(sb.device()) for t in rope_3d(grid, 6, (2, 2, 2)))
    x, c, weight = (random(*s, seed=i) for i, s in enumerate([(2, 24, 24), (2, 24), (2, 24, 24)]))
    x_all = x.clone().requires_grad_()
    expected = whole(x_all, c, rope=rope)
    (expected * weight).sum().backward()

    def own(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.chunk(tokens, dim)[rank]

    mine = own(x, 1).clone().requires_grad_()
    with attending(ring_attention if ring else ulysses_attention, by_tokens):
        out = block(mine, c, rope=tuple(own(t, 0) for t in rope))
    (out * own(weight, 1)).sum().backward()
    worst = 0.0
    for name, p in block.named_parameters():
        dist.all_reduce(p.grad, group=by_tokens)
        if name.startswith("adaLN") or name in ("attn.proj.bias", "mlp.fc2.bias"):
            wanted = whole.get_parameter(name).grad
            worst = max(worst, ((p.grad - wanted).abs().max() / wanted.abs().max()).item())
    return (
        (out - own(expected, 1)).abs().max().item(),
        (mine.grad - own(x_all.grad, 1)).abs().max().item(),
        worst,
    )


@pytest.mark.parametrize(
    ("heads", "tokens", "ring"),
    [(1, 1, False), (2, 1, False), (4, 1, False), (1, 3, True), (1, 4, False), (1, 4, True),
     (2, 2, False), (2, 2, True)],
)  # fmt: skip
def test_a_block_over_heads_and_tokens_equals_one_rank(heads, tokens, ring):
    results = sb.run(over_mesh, heads, tokens, ring, world_size=heads * tokens, timeout=120).values
    for errors in results:
        # fp32 sums of 24 to 96 addends in another order; parameter gradients relative to their size
        assert max(errors) < 1e-5, errors


def video_model() -> tuple[float, list]:
    model = filled(DiT(1, (4, 4, 4), 24, 2, 4, 3, patch=2))
    x, t = random(1, 1, 4, 4, 4, seed=1), torch.tensor([0.3]).to(sb.device())
    label = torch.tensor([1]).to(sb.device())
    with torch.no_grad():
        out = ulysses_dit_forward(model, x, t, label)
        return (out - model(x, t, label)).abs().max().item(), list(out.shape)


def test_a_video_model_by_tokens_equals_one_rank():
    for error, shape in sb.run(video_model, world_size=4, timeout=120).values:
        assert error < 1e-5
        assert shape == [1, 1, 4, 4, 4]


@pytest.fixture
def stubbed_libraries():
    """flash_attn and apex as stubs, and gone again: transformers asks whether they are there."""
    from shardbook.port.project import stub_cuda_libraries

    before = set(sys.modules)
    stub_cuda_libraries()
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("flash_attn", "apex"):
            del sys.modules[name]


def test_the_original_and_the_port_agree_on_the_cpu(stubbed_libraries):
    from shardbook.port.project import CudaAsCpu, modules

    port = modules(CHAPTER / "ported_project", "model", "ops")
    original = modules(CHAPTER / "cuda_project", "model", "ops")
    assert original.model is not port.model
    original.model.norm_modulate = port.ops.norm_modulate  # the fused op's contract
    original.model.attention = port.ops.attention  # without flash_attn's fp16
    generator = torch.Generator().manual_seed(0)
    with CudaAsCpu():
        reference = original.model.ClipDiT()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    ported = port.model.ClipDiT()
    ported.load_state_dict(port.model.from_original(reference.state_dict()))
    x = torch.randn(2, 1, 8, 16, 16, generator=generator)
    t, y = torch.tensor([30.0, 910.0]), torch.tensor([2, 12])
    expected, got = reference(x, t, y), ported(x, t, y)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)  # fp32 angles up to 910
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        original.ops.flash_attn_func(x, x, x)
