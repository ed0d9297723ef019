"""The trace on the stand-in npu: device times, device memory, kernels, and recorded files."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from shardbook.tracing.validate import validate

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(sb.device().type != "npu", reason="runs on the stand-in: make test-npu"),
]


def slices(trace) -> list[dict]:
    return [e for e in trace.chrome()["traceEvents"] if e["ph"] == "X"]


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.02)
        return self.linear(x)


def test_modules_carry_the_devices_time():
    model = Slow().to(sb.device())
    with sb.trace(model) as t:
        model(torch.ones(2, 4, device=sb.device())).sum().backward()
    assert validate(t.chrome()) == []
    timed = {e["name"]: e for e in slices(t) if "device ms" in e.get("args", {})}
    slow = next(e for name, e in timed.items() if "Slow" in str(e) and "linear" not in name)
    # the stand-in's events are host times, so they agree with the slice to a millisecond or so
    assert 20 <= slow["args"]["device ms"] <= slow["dur"] / 1000 + 5
    assert any("linear" in name for name in timed)


def test_memory_is_the_devices():
    x = torch.ones(1_000_000, device=sb.device())  # 4 MB
    with sb.trace() as t:
        sb.mark("nothing")
    counters = [e for e in t.chrome()["traceEvents"] if e["ph"] == "C"]
    assert counters and all("device memory" in json.dumps(e) for e in counters)
    assert max(max(e["args"].values()) for e in counters) >= x.nbytes / 1e6


def ranks():
    x = torch.ones(3, device=sb.device())
    if dist.get_rank() == 1:
        time.sleep(0.05)
    dist.all_reduce(x)
    other = 1 - dist.get_rank()
    send, receive = dist.isend(x, other), dist.irecv(torch.empty_like(x), other)
    send.wait()
    receive.wait()


def test_collectives_of_ranks_carry_the_devices_time():
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device")
    t = sb.run(ranks, world_size=2, trace=True).trace
    assert validate(t.chrome()) == []
    reduces = {e["pid"]: e for e in slices(t) if e["name"] == "all_reduce"}
    times = sorted(e["args"]["device ms"] for e in reduces.values())
    assert len(times) == 2 and times[1] >= 40, "the rank that came early waited on its device"
    moved = [e for e in slices(t) if e["name"].startswith(("send", "recv"))]
    assert len(moved) == 4 and all("device ms" in e["args"] for e in moved)


def test_traces_inside_each_other():
    with sb.trace() as outer:
        with sb.trace(nn.Linear(2, 2).to(sb.device())):
            torch.ones(2, device=sb.device()).sum()
        sb.mark("after")
    assert validate(outer.chrome()) == []


def test_operators_beside_the_modules():
    model = nn.Linear(4, 4).to(sb.device())
    with sb.trace(model, kernels=True) as t:
        model(torch.ones(2, 4, device=sb.device()))
    assert validate(t.chrome()) == []
    assert any(e["name"] == "aten::addmm" for e in slices(t))


def test_a_recorded_profile_is_shown(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(8, 8, device=sb.device())
    with profile(activities=[ProfilerActivity.CPU]) as p:
        (x @ x).sum().item()
    p.export_chrome_trace(str(tmp_path / "profile.json"))
    shown = sb.show(tmp_path / "profile.json")
    assert validate(shown.chrome()) == []
    assert {"aten::mm", "aten::sum"} <= {e["name"] for e in slices(shown)}
