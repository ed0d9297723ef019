"""Note what this rank does, at a few microseconds a module call; nothing is built until asked.

``nn.Module._call_impl`` is wrapped while a trace is open, so hooks of the model's own (FSDP, tensor
parallel) lie inside its slices. When backward begins, pre-hooks go on the autograd nodes at which
it will pass from one module to the next. Unlike a module's backward hook these wrap no tensor, so
in-place operations, views and checkpointing work as they do untraced.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import calls
from .describe import MOST, describe, module_info, shape
from .merge import Trace
from .readings import device_events, memory_reader
from .timeline import RankTrace

_active: tuple["Recorder", ...] = ()
_lock = threading.Lock()
_module_call = nn.Module._call_impl
_engine = torch.autograd.graph._engine_run_backward
_sequence_nr = torch._C._autograd._get_sequence_nr  # the number the next autograd node will get
_graph_task = torch._C._current_graph_task_id
_now = time.monotonic_ns
_thread = threading.get_ident

SAMPLE_NS = 5_000_000, 50_000_000
"""Memory is sampled every 5 ms at most, where reading it takes long every 50 ms."""

LAST_NODE = 2**62
"""Nodes that accumulate a parameter's gradient have the number 2**64 - 1: they run at once."""


def _activate(recorder: "Recorder", on: bool) -> None:
    """Wrap what every module call and every backward passes, for the recorders that are open."""
    global _active
    with _lock:
        _active = tuple(r for r in _active if r is not recorder) + ((recorder,) if on else ())
        call, engine = _module_call, _engine
        for r in _active:  # built anew, so that traces may end in any order
            call, engine = r.wrap(call), r.wrap_engine(engine)
        nn.Module._call_impl = call
        torch.autograd._engine_run_backward = engine
        torch.autograd.graph._engine_run_backward = engine


class Recorder:
    """What one trace notes. A record is the list of `timeline.RECORD`'s fields."""

    def __init__(self, models: dict[str, nn.Module], discover: bool, flops: bool = False):
        self.discover = discover
        self.modules: list[tuple[str, nn.Module]] = []  # keeps them alive, so ids stay theirs
        self.index: dict[int, int] = {}
        for prefix, model in models.items():
            self.register(model, prefix)
        self.records: list[list] = []
        self.marks: list[tuple] = []
        self.fires: list[tuple] = []
        self.runs: list[list[int]] = []
        self.memory: list[tuple[int, int]] = []
        self.bounds: dict[int, list[int]] = {}  # thread -> first and last nodes of module calls
        self.bounded = 0  # records whose first node is in bounds
        self.running: list[list] = []  # those whose last node is not yet
        self.hooked: list = []  # the dictionaries that hold our hooks, by weak reference
        self.calls: list[calls.Call] = []
        self.flops: list[tuple] | None = [] if flops else None
        self.label: dict[str, int] = {}
        self.main = _thread()
        self.sample_at = 0
        self.open = False
        self.events = device_events()
        self.read_memory, self.memory_name = memory_reader()
        self.fired = self.hook()

    def register(self, model: nn.Module, prefix: str = "") -> int:
        """Give every module below `model` its dotted name; a module keeps the first it gets."""
        for name, module in model.named_modules():
            full = f"{prefix}.{name}" if prefix and name else prefix or name
            known = self.index.get(id(module))
            if known is None:
                self.index[id(module)] = len(self.modules)
                self.modules.append((full, module))
            elif self.discover and name and self.modules[known][0] == "":
                self.modules[known] = (full, module)  # met alone first, now inside its parent
        return self.index[id(model)]

    def wrap(self, call: Callable) -> Callable:
        """A Module._call_impl that notes, then does what `call` does.

        This runs between kernels that have emptied the caches, where every line of memory touched
        counts: hence one function and local names.
        """
        index, records, events = self.index.get, self.records.append, self.events
        compiler, dynamo = torch.compiler, torch.compiler.is_dynamo_compiling
        known: dict[tuple, list[tuple]] = {}  # each once: less memory touched, less work for gc

        def one(x: Tensor) -> list[tuple]:
            try:
                key = (x.shape, x.dtype)
            except RuntimeError:
                key = (shape(x), x.dtype)
            return known.get(key) or known.setdefault(key, [key])

        def traced(module, *args, **kwargs):
            i = index(id(module))
            if (i is None and not self.discover) or not self.open or dynamo():
                return call(module, *args, **kwargs)
            if compiler._is_compiling_flag:  # export; is_compiling() would cost two calls more
                return call(module, *args, **kwargs)
            if i is None:
                i = self.register(module)
            if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
                inputs = one(args[0])
            else:
                inputs = [d for v in args[:MOST] if (d := describe(v)) is not None]
                if kwargs and (named := describe(kwargs)):
                    inputs.append(named)
            # the fields of timeline.RECORD
            record = [i, _thread(), 0, None, _sequence_nr(), 0, inputs, None, None, None, None]
            records(record)
            if events:
                record[9] = events()
            record[2] = _now()
            try:
                result = call(module, *args, **kwargs)
            except BaseException as error:
                record[3], record[5] = _now(), _sequence_nr()
                record[8] = type(error).__name__
                raise
            record[3] = now = _now()
            record[5] = _sequence_nr()
            if events:
                record[10] = events()
            record[7] = one(result)[0] if type(result) is Tensor else describe(result)
            if now > self.sample_at:
                self.sample(now)
            return result

        return traced

    def wrap_engine(self, engine: Callable) -> Callable:
        """An autograd engine that notes when backward begins, changes module and ends."""

        def run(outputs, *args, **kwargs):
            if torch.compiler.is_compiling() or not self.open:
                return engine(outputs, *args, **kwargs)
            self.watch(outputs)
            span = [_now(), 0, _thread()]
            self.runs.append(span)
            try:
                return engine(outputs, *args, **kwargs)
            finally:
                span[1] = _now()

        return run

    def watch(self, outputs: Sequence) -> None:
        """Put a pre-hook on each autograd node where backward will pass from module to module.

        Nodes are numbered in order of creation, and a record holds the first and last number of a
        module call: of the nodes between two such bounds, the first that runs is enough.
        """
        thread = _thread()
        stack = [o.node if isinstance(o, GradientEdge) else o.grad_fn for o in outputs]
        found: dict = {}  # number -> node
        twins = set()  # nodes of another thread, which numbers its own
        pop, push = stack.pop, stack.append
        collecting = gc.isenabled()
        gc.disable()  # hundreds of objects, which end at once
        try:
            while stack:
                node = pop()
                if node is None:
                    continue
                number = node._sequence_nr()
                if number > LAST_NODE:
                    continue
                known = found.get(number)
                if known is None:
                    found[number] = node
                elif known is node or node in twins:
                    continue
                else:
                    twins.add(node)
                for following, _ in node.next_functions:
                    if following is not None:
                        push(following)
            with _lock, self.quick_hooks():
                bounds = self.bounds_of(thread)
                at, last = len(bounds), None
                for number in sorted(found, reverse=True):
                    while at and bounds[at - 1] > number:
                        at -= 1
                    if at != last:  # the first that runs between two bounds
                        last = at
                        hook = functools.partial(self.fired, (thread, number))
                        self.hooked.append(found[number].register_prehook(hook))
        finally:
            known = node = following = None
            found.clear()
            if collecting:
                gc.enable()

    def bounds_of(self, thread: int) -> list[int]:
        """First and last nodes of this thread's module calls so far, ascending."""
        fresh = self.records[self.bounded :]
        self.bounded += len(fresh)
        new: dict[int, list[int]] = {}
        for r in fresh:
            new.setdefault(r[1], []).append(r[4])
        fresh += self.running
        self.running = [r for r in fresh if r[3] is None]
        for r in fresh:
            if r[3] is not None:
                new.setdefault(r[1], []).append(r[5])
        for other, numbers in new.items():
            numbers.sort()
            bounds = self.bounds.setdefault(other, [])
            ascending = not bounds or bounds[-1] <= numbers[0]
            bounds += numbers
            if not ascending:
                bounds.sort()
        return self.bounds.setdefault(thread, [])

    @contextlib.contextmanager
    def quick_hooks(self) -> Iterator[None]:
        """Inside, a node takes our hook without a RemovableHandle, which costs more than the hook.

        A node's hooks lie in a dictionary that this function of torch fills. Ours go under
        `self`, so a node that is met again gets no second one.
        """
        function = torch.autograd.Function
        usual = function._register_hook

        def register(hooks, hook):
            if type(hook) is not functools.partial or hook.func is not self.fired:
                return usual(hooks, hook)
            hooks = OrderedDict() if hooks is None else hooks
            hooks[self] = hook
            return hooks, weakref.ref(hooks)

        function._register_hook = staticmethod(register)
        try:
            yield
        finally:
            del function._register_hook  # it is inherited

    def hook(self) -> Callable:
        """What runs when backward reaches a node."""
        fires, events = self.fires.append, self.events

        def fired(node: tuple[int, int], grads: tuple) -> None:
            if not self.open:
                return
            now = _now()
            fires((now, node, _graph_task(), _thread(), events() if events else None))
            if now > self.sample_at:
                self.sample(now)

        return fired

    def sample(self, now: int) -> None:
        """Note the memory in use; the next time when this was a thousandth of the time between."""
        self.memory.append((now, self.read_memory()))
        least, most = SAMPLE_NS
        self.sample_at = now + min(max(least, 1000 * (_now() - now)), most)

    def start(self) -> None:
        """Begin to note."""
        calls.install()
        calls.traces += 1
        calls._listeners.append(self.calls.append)
        self.listener = calls._listeners[-1]
        self.open = True
        _activate(self, True)
        self.anchor = self.events() if self.events else None
        self.outer_clock, calls.clock = calls.clock, self.events
        self.started = _now()
        self.sample(self.started)

    def stop(self) -> RankTrace:
        """End, undo every change, and give what was noted as plain data that can be pickled."""
        self.stopped = _now()
        self.sample(self.stopped)
        _activate(self, False)
        self.open = False
        calls._listeners.remove(self.listener)
        calls.clock = self.outer_clock
        calls.settle()
        calls.traces -= 1
        # copies: what ends after this trace does not change it
        self.calls = [dataclasses.replace(c) for c in self.calls]
        for hooks in self.hooked:
            if not isinstance(hooks, weakref.ref):
                hooks.remove()
            elif (held := hooks()) is not None:
                held.pop(self, None)
        self.hooked.clear()
        device_ms = self._device_times()
        for call in self.calls:
            call.events = tuple(device_ms(e) for e in call.events)
            if call.complete is False:  # still under way
                call.end_ns = None
        return RankTrace(
            rank=int(os.environ.get("RANK", 0)),
            label=self.label,
            modules=[module_info(name, module) for name, module in self.modules],
            records=[[*r[:9], device_ms(r[9]), device_ms(r[10])] for r in self.records],
            fires=[(*f[:4], device_ms(f[4])) for f in self.fires],
            runs=self.runs,
            calls=self.calls,
            marks=self.marks,
            memory=self.memory,
            memory_name=self.memory_name,
            main=self.main,
            start=self.started,
            end=self.stopped,
            flops=self.flops,
        )

    def _device_times(self):
        if self.events:
            torch.accelerator.synchronize()
        return lambda event: self.anchor.elapsed_time(event) if event is not None else None


@contextlib.contextmanager
def trace(
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    python: bool = False,
    kernels: bool = False,
    flops: bool = False,
    **coordinates: int,
) -> Iterator[Trace]:
    """Record what `model` does inside the block; the Trace it gives displays inline afterwards.

    Forward and backward of each module, collectives and send/recv, memory, marks. Nothing of the
    model changes. Without a model: collectives, memory and marks only. python adds Python's
    functions (VizTracer), kernels the operators and device kernels (torch.profiler, on an NPU
    torch_npu.profiler), flops counts every matrix product (else the table's FLOPs are those of
    linear and convolution layers). coordinates name this rank's place: ``sb.trace(m, tp=1, cp=0)``.
    """
    recorder = Recorder(_named(model), discover=False, flops=flops)
    recorder.label = coordinates
    with _record(recorder, Trace(), python, kernels) as result:
        yield result


def start_rank_trace() -> Recorder:
    """Begin to trace a rank, whatever modules it calls; `.stop()` gives its RankTrace."""
    recorder = Recorder({}, discover=True)
    recorder.start()
    return recorder


@contextlib.contextmanager
def _record(recorder: Recorder, result: Trace, python: bool, kernels: bool) -> Iterator[Trace]:
    with contextlib.ExitStack() as stack:
        extras = []
        if python or kernels or recorder.flops is not None:
            from . import extras as more

            extras = more.start(stack, python, kernels, recorder.flops)
        recorder.start()
        try:
            yield result
        finally:
            rank = recorder.stop()
            stack.close()
            for extra in extras:
                last = max((e["tid"] for e in rank.foreign), default=0)
                rank.foreign += [{**e, "tid": e["tid"] + last} for e in extra()]
            result.ranks = [rank]


def _named(model: nn.Module | Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    if model is None:
        return {}
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, (list, tuple)) and all(isinstance(m, nn.Module) for m in model):
        return {str(i): m for i, m in enumerate(model)}
    raise TypeError(f"sb.trace() takes an nn.Module or a list of them, not {type(model).__name__}")


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """A slice of your own: ``with sb.mark("attention"): …``, also as a decorator."""
    start = _now()
    try:
        yield
    finally:
        _note(str(name), start, "mark", {})


def pace(ms: float, name: str = "kernel", since: int | None = None, late: int = 0) -> int:
    """Stand for a kernel that takes `ms` milliseconds: sleeps, and is labelled "paced".

    So four ranks on two cores show the schedule that four devices would. `since`, a reading of
    time.perf_counter_ns(), counts what was computed from then on as a part of the kernel; `late`
    ns that the device began before that, since its host came late. Returns when the kernel ends on
    the device, a reading of the same clock; this process is awake again a little later.
    """
    if not isinstance(ms, (int, float)) or not 0 <= ms < 1e9:  # nan is neither
        raise ValueError(f"sb.pace() takes a time in milliseconds, 0 or more, not {ms!r}")
    now = time.perf_counter_ns()
    start = now if since is None else since
    end = max(now, start - late + round(ms * 1e6))
    time.sleep((end - now) / 1e9)
    args = {"time": f"paced: sleeps {ms:g} ms", "kernel ms": (end - start + late) / 1e6}
    offset = _clock_offset()
    _note(f"{name} (paced)", start + offset, "paced", args, end + offset)
    return end


def _clock_offset() -> int:
    """The trace's clock less time.perf_counter_ns(), in ns, of the least interrupted of three."""
    readings = []
    for _ in range(3):
        before, now, after = time.perf_counter_ns(), _now(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


def label(**coordinates: int) -> None:
    """Name this rank's place in the mesh in the traces being recorded: ``label(tp=1, cp=0)``."""
    for recorder in _active:
        recorder.label = {**recorder.label, **coordinates}


def _note(name: str, start: int, category: str, args: dict, end: int | None = None) -> None:
    end = _now() if end is None else end
    for recorder in _active:
        recorder.marks.append((name, _thread(), start, end, category, args))
