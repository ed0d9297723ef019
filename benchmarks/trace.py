"""What tracing costs: untraced, traced, VizTracer and torch.profiler in turns on one model.

    python -m benchmarks.trace            # prints ratios and microseconds a module call
    python -m benchmarks.trace --json     # the same as json

The model runs on one thread and times are CPU times of this process. Rounds alternate between the
tracers and every ratio compares neighbours in time, so that a busy machine moves all of them alike;
what is printed is the median of the rounds. A tracer costs twice: while the step runs, where it
moves what it measures, and until the trace can be opened. The second column has both: from opening
the tracer to the file that it saved.
"""

import argparse
import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import viztracer
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardbook as sb
from shardbook.tracing.extras import quiet


@contextlib.contextmanager
def no_tracer(model, file=None):
    yield


@contextlib.contextmanager
def with_shardbook(model, file=None):
    with sb.trace(model) as trace:
        yield
    if file:
        trace.save(file)


@contextlib.contextmanager
def with_viztracer(model, file=None):
    tracer = viztracer.VizTracer(verbose=0, log_torch=False)
    tracer.start()
    yield
    tracer.stop()
    if file:
        tracer.save(file)
    tracer.clear()


@contextlib.contextmanager
def with_profiler(model, file=None, with_stack=False):
    with profile(activities=[ProfilerActivity.CPU], with_stack=with_stack) as profiler:
        yield
    if file:
        profiler.export_chrome_trace(file)


with_profiler_stacks = functools.partial(with_profiler, with_stack=True)


TRACERS: dict[str, Callable] = {
    "sb.trace": with_shardbook,
    "VizTracer": with_viztracer,
    "torch.profiler": with_profiler,
    "torch.profiler, with_stack": with_profiler_stacks,
}


def seconds(tracer: Callable, model: nn.Module, step: Callable[[], None], steps: int) -> float:
    """CPU seconds a step inside the tracer; starting and ending it is not the step's cost."""
    gc.collect()  # what the tracer before has left is not this one's
    with quiet(), tracer(model):
        start = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - start) / steps


def seconds_to_a_file(tracer: Callable, model: nn.Module, step: Callable[[], None]) -> float:
    """CPU seconds of one step from opening the tracer to the file it saved."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, quiet():
        start = time.process_time()
        with tracer(model, f"{folder}/trace.json"):
            step()
        return time.process_time() - start


def ratios(measure: Callable, model: nn.Module, *args, rounds: int) -> dict[str, float]:
    """Median over the rounds of traced over untraced seconds, untraced on both sides of it."""
    for tracer in TRACERS.values():
        measure(tracer, model, *args)
    found: dict[str, list[float]] = {name: [] for name in TRACERS}
    before = measure(no_tracer, model, *args)
    for _ in range(rounds):
        for name, tracer in TRACERS.items():
            traced = measure(tracer, model, *args)
            after = measure(no_tracer, model, *args)
            found[name].append(2 * traced / (before + after))
            before = after
    return {name: statistics.median(values) for name, values in found.items()}


def encoder() -> tuple[nn.Module, Callable[[], None]]:
    """12 encoder layers, d=256, S=256, forward and backward."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    x = torch.randn(1, 256, 256)
    return model, backward(model, x)


def backward(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    return step


def tiny_layers(rounds: int, count: int = 200) -> dict[str, float]:
    """Microseconds that tracing adds to a module call, on 200 linear layers of 4x4."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
    x = torch.randn(2, 4)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    added = {}
    for name, step in (("forward", forward), ("forward and backward", backward(model, x))):
        seconds(with_shardbook, model, step, 1)
        differences = []
        for _ in range(rounds):
            untraced = seconds(no_tracer, model, step, 3)
            traced = seconds(with_shardbook, model, step, 3)
            differences.append((traced - untraced) / (count + 1))
        added[name] = statistics.median(differences) * 1e6
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, step = encoder()
    inside = ratios(seconds, model, step, 1, rounds=options.rounds)
    to_a_file = ratios(seconds_to_a_file, model, step, rounds=options.rounds)
    result = {
        "traced over untraced step": inside,
        "with opening the tracer and saving the trace": to_a_file,
        "us added to a module call of tiny layers": tiny_layers(3 * options.rounds),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print("12 encoder layers, d=256, S=256, forward and backward, one thread: traced / untraced")
    print(f"{'':30} the step   with its saved trace")
    for name, ratio in inside.items():
        print(f"  {name:28} {ratio:8.3f}   {to_a_file[name]:8.3f}")
    print("200 linear layers of 4x4: microseconds sb.trace adds to a module call")
    for name, value in result["us added to a module call of tiny layers"].items():
        print(f"  {name:28} {value:.1f}")


if __name__ == "__main__":
    main()
