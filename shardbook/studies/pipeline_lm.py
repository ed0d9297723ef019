"""The small model cut into stages, and stages whose kernels take a known time."""

import itertools
import statistics
import time

import torch
from torch import Tensor, nn

from .._seams import after_backward
from ..basics.tiny import TinyLM
from ..tracing import record
from ..tracing.merge import Trace


class Stage(nn.Module):
    """Some consecutive blocks of a TinyLM, with the embedding or the head where it has them."""

    def __init__(self, blocks, embed: nn.Module | None, norm: nn.Module | None, head):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.embed, self.norm, self.head = embed, norm, head

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)  # tokens [B, S] -> [B, S, D]
        positions = torch.arange(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, positions)  # [B, S, D]
        return x if self.head is None else self.head(self.norm(x))  # [B, S, V]


def split_lm(model: TinyLM, num_stages: int) -> list[Stage]:
    """The model as `num_stages` stages whose composition is the model; modules are shared with it.

    Blocks are cut evenly, the embedding goes with the first, norm and head with the last. With two
    stages more than blocks, the embedding and the head have a stage each. Else ValueError.
    """
    blocks = list(model.blocks)
    if num_stages == len(blocks) + 2:
        parts = [[], *([block] for block in blocks), []]
    elif 1 <= num_stages <= len(blocks):
        cuts = [len(blocks) * s // num_stages for s in range(num_stages + 1)]
        parts = [blocks[a:b] for a, b in itertools.pairwise(cuts)]
    else:
        raise ValueError(
            f"{len(blocks)} blocks do not make {num_stages} stages: "
            f"expected 1 to {len(blocks)}, or {len(blocks) + 2}"
        )
    stages = []
    for s, part in enumerate(parts):
        ends = (model.norm, model.head) if s == num_stages - 1 else (None, None)
        stages.append(Stage(part, model.embed if s == 0 else None, *ends))
    return stages


class Paced(nn.Module):
    """A stage that computes, and then sleeps until its kernels took `forward` and `backward` ms.

    So the ranks show the schedule of as many devices, however few cores there are. The slices in a
    trace are called F0, F1, … and B0, B1, … with the chunk behind where one is given.
    """

    def __init__(self, stage: nn.Module, forward: float, backward: float, chunk: int | None = None):
        super().__init__()
        self.stage, self.forward_ms, self.backward_ms = stage, forward, backward
        self.count, self.suffix = 0, "" if chunk is None else f" chunk {chunk}"

    def forward(self, x: Tensor) -> Tensor:
        name, start = f"{self.count}{self.suffix}", _start()
        self.count += 1
        y = _Backward.apply(self.stage(x), self.backward_ms, f"B{name}")
        _pace(self.forward_ms, f"F{name}", *start)
        return y


# The paced device of this process: busy until then (ns), its host awake at, CPU time used by then.
# A device is fed ahead: what its host spends between two kernels, waking up included, does not
# delay the second, unless the host had to wait for its input.
_device = (0, 0, 0)


def _start() -> tuple[int, int]:
    """(now, how long before now the device began with the kernel that starts here), in ns."""
    busy_until, awake, cpu = _device
    now = time.perf_counter_ns()
    waited = now - awake - (time.process_time_ns() - cpu)
    return now, 0 if waited > 1_000_000 else max(0, now - busy_until)


def _pace(ms: float, name: str, since: int, late: int) -> None:
    global _device
    end = record.pace(ms, name, since, late)
    _device = end, time.perf_counter_ns(), time.process_time_ns()


class _Backward(torch.autograd.Function):
    """The identity; its backward, the first of a stage, arranges for a sleep after the last."""

    @staticmethod
    def forward(ctx, x, ms, name):
        ctx.ms, ctx.name = ms, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ms, name, start = ctx.ms, ctx.name, _start()
        after_backward(lambda: _pace(ms, name, *start))
        return grad, None, None


def paced_timeline(traced: Trace) -> list[tuple]:
    """The paced kernels of a trace as `simulate` gives them, in ms after the first one's start.

    A list of (rank, kind, microbatch, chunk, start, end), measured.
    """
    events = [e for e in traced.chrome()["traceEvents"] if e.get("cat") == "paced"]
    zero = min(float(e["ts"]) for e in events)
    timeline = []
    for e in events:
        words = e["name"].split()  # F0 (paced), or F0 chunk 1 (paced)
        chunk = int(words[2]) if "chunk" in words else 0
        end = (float(e["ts"]) + float(e["dur"]) - zero) / 1000
        start = end - e["args"]["kernel ms"]  # on the device, before its host came to it
        timeline.append((e["pid"], words[0][0], int(words[0][1:]), chunk, start, end))
    return sorted(timeline, key=lambda op: (op[4], op[0]))


def idle_share(timeline: list[tuple]) -> float:
    """The bubble: the idle share of all ranks' time, first kernel's start to last one's end."""
    ranks = len({op[0] for op in timeline})
    span = max(op[5] for op in timeline) - min(op[4] for op in timeline)
    return 1 - sum(end - start for *_, start, end in timeline) / (ranks * span)


def message_time(timeline: list[tuple]) -> float:
    """Median ms from the end of a neighbour's kernel to the start of the one that waited for it.

    That is the message and its hosts: waking up, sending, receiving. 0 where nobody waited.
    """
    ranks, chunks = 1 + max(op[0] for op in timeline), 1 + max(op[3] for op in timeline)
    ends = {(kind, i, chunk * ranks + rank): end for rank, kind, i, chunk, _, end in timeline}
    free, waits = dict.fromkeys(range(ranks), 0.0), []
    for rank, kind, i, chunk, start, end in timeline:  # by start
        block = chunk * ranks + rank + (-1 if kind == "F" else 1)
        if 0 <= block < ranks * chunks and ends[kind, i, block] > free[rank]:
            waits.append(start - ends[kind, i, block])
        free[rank] = end
    return statistics.median(waits) if waits else 0.0
