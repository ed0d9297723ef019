"""What an NPU refuses is refused on the stand-in, with the Python line that asked for it."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardbook as sb

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(sb.device().type != "npu", reason="runs on the stand-in: make test-npu"),
]


def planted_cuda():
    model = nn.Linear(3, 3)
    return model.cuda()  # planted


def planted_cuda_string():
    return torch.ones(3, device="cuda")  # planted


def planted_to_cuda():
    return torch.ones(3).to("cuda:0")  # planted


def planted_float64():
    return torch.ones(3, device=sb.device(), dtype=torch.float64)  # planted


def planted_float64_moved():
    frequencies = torch.arange(4, dtype=torch.float64)
    return frequencies.to(sb.device())  # planted


def planted_float64_cast():
    return torch.ones(3, device=sb.device()).double()  # planted


def planted_complex():
    x = torch.ones(3, device=sb.device())
    return torch.polar(x, x)  # planted


def planted_complex_product():
    x = torch.view_as_complex(torch.ones(3, 2, device=sb.device()))
    return x * x  # planted


def planted_fft():
    return torch.fft.rfft(torch.ones(8, device=sb.device()))  # planted


def planted_nccl():
    dist.init_process_group("nccl", rank=0, world_size=1)  # planted


def planted_nccl_keyword():
    dist.init_process_group(backend="cpu:gloo,cuda:nccl", rank=0, world_size=1)  # planted


def planted_mix():
    x = torch.ones(3, device=sb.device())
    return x + torch.ones(3)  # planted


def planted_mix_in_a_layer():
    layer = nn.Linear(3, 3)
    return layer(torch.ones(2, 3, device=sb.device()))  # planted


def planted_missing_device():
    return torch.ones(3, device="npu:15")  # planted


def planted_generator():
    return torch.randn(3, device=sb.device(), generator=torch.Generator())  # planted


PLANTED = {
    planted_cuda: "cuda",
    planted_cuda_string: "cuda",
    planted_to_cuda: "cuda",
    planted_float64: "Double",
    planted_float64_moved: "Double",
    planted_float64_cast: "Double",
    planted_complex: "Complex",
    planted_complex_product: "Complex",
    planted_fft: "Complex",
    planted_nccl: "nccl",
    planted_nccl_keyword: "nccl",
    planted_mix: "same device.*npu:0 and cpu",
    planted_mix_in_a_layer: "same device.*npu:0 and cpu",
    planted_missing_device: "npu:15",
    planted_generator: "generator",
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda f: f.__name__)
def test_the_message_names_the_line(planted):
    source, first = inspect.getsourcelines(planted)
    line = first + next(i for i, text in enumerate(source) if "# planted" in text)
    with pytest.raises(RuntimeError) as caught:
        planted()
    message = str(caught.value)
    assert re.search(PLANTED[planted], message, re.DOTALL), message
    assert f"test_standin_refusals.py:{line}: " in message, message
    # in the book NotImplementedError means "not written yet": a refusal must not pass for that
    assert not isinstance(caught.value, NotImplementedError)


def a_rank(planted):
    if planted == "cpu tensor":
        dist.all_reduce(torch.ones(2))
    elif planted == "float64":
        torch.ones(2).to(sb.device(), torch.float64)
    elif planted == "nccl":
        dist.new_group([0, 1], backend="nccl")


@pytest.mark.parametrize("planted", ["cpu tensor", "float64", "nccl"])
def test_ranks_name_the_line_too(planted):
    with pytest.raises(sb.RankError, match=r"test_standin_refusals\.py:\d+") as caught:
        sb.run(a_rank, planted, world_size=2, timeout=30)
    assert not isinstance(caught.value, sb.NotWritten)
    words = {"cpu tensor": "cpu", "float64": "Double", "nccl": "nccl"}
    assert words[planted] in str(caught.value)


A = torch.ones(3, 3)
MIXES = {
    "add": lambda x: x + A,
    "add the other way": lambda x: A + x,
    "matmul": lambda x: A @ x,
    "cat": lambda x: torch.cat([x, A]),
    "stack": lambda x: torch.stack([A, x]),
    "in place": lambda x: x.add_(A),
    "in place on the cpu": lambda x: A.clone().add_(x),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    "layer norm": lambda x: nn.LayerNorm(3).to(x.device)(A),
    "mse": lambda x: F.mse_loss(x, A),
    "where": lambda x: torch.where(x > 0, x, A),
    "conv": lambda x: nn.Conv2d(3, 3, 1).to(x.device)(torch.ones(1, 3, 4, 4)),
    "masked fill": lambda x: x.masked_fill(A > 0, 0.0),
    "attention mask": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=A > 0
    ),
    "npu indices into a cpu tensor": lambda x: A[torch.tensor([0, 1], device=x.device)],
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixing_with_the_cpu_is_refused(mix):
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        MIXES[mix](torch.ones(3, 3, device=sb.device()))


def test_mixing_two_npus_is_refused_but_copies_are_not():
    if torch.npu.device_count() < 2:
        pytest.skip("one device")
    x, y = torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")
    with pytest.raises(RuntimeError, match="npu:0 and npu:1"):
        x + y
    x.copy_(y * 2)
    assert x.tolist() == [2, 2, 2]


def test_what_mixes_on_a_real_device_mixes_here():
    x = torch.ones(3, device=sb.device())
    assert (x * torch.tensor(2.0, dtype=torch.float64)).tolist() == [2, 2, 2]  # a 0-dim number
    assert x[torch.tensor([0, 2])].tolist() == [1, 1]  # cpu indices
    with pytest.raises(TypeError, match="can't convert npu"):
        x.numpy()


def test_strict_mode_can_be_left():
    from tests import standin

    standin.strict(False)
    try:
        assert torch.ones(2, device=sb.device()).double().dtype == torch.float64
    finally:
        standin.strict()
