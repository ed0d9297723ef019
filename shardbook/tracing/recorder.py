"""What one trace notes of its process, at a few microseconds a module call.

What every module call passes is wrapped while a trace is open, so hooks of the model's own (FSDP,
tensor parallel) lie inside its slices. Nothing is built until asked.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _seams, calls, pending
from .backward import Backward
from .describe import MOST, describe, module_info, shape
from .readings import device_events, memory_reader
from .timeline import RankTrace

active: tuple["Recorder", ...] = ()
_lock = threading.Lock()
_now = time.monotonic_ns
_thread = threading.get_ident

SAMPLE_NS = 5_000_000, 50_000_000
"""Memory is sampled every 5 ms at most, where reading it takes long every 50 ms."""


def activate(recorder: "Recorder", on: bool) -> None:
    """Wrap what every module call and every backward passes, for the recorders that are open."""
    global active
    with _lock:
        active = tuple(r for r in active if r is not recorder) + ((recorder,) if on else ())
        call, engine = _seams.module_call, _seams.backward_engine
        for r in active:  # built anew, so that traces may end in any order
            call, engine = r.wrap(call), r.backward.wrap(engine)
        _seams.call_modules_with(call)
        _seams.run_backward_with(engine)


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
        self.memory: list[tuple[int, int]] = []
        self.calls: list[calls.Call] = []
        self.flops: list[tuple] | None = [] if flops else None
        self.label: dict[str, int] = {}
        self.main = _thread()
        self.sample_at = 0
        self.open = False
        self.events = device_events()
        self.read_memory, self.memory_name = memory_reader()
        self.backward = Backward(self)

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
        """A `_seams.module_call` that notes, then does what `call` does.

        This runs between kernels that have emptied the caches, where every line of memory touched
        counts: hence one function and local names.
        """
        index, records, events = self.index.get, self.records.append, self.events
        exporting, dynamo = _seams.exporting, torch.compiler.is_dynamo_compiling
        node_number = _seams.next_node_number
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
            if exporting():
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
            record = [i, _thread(), 0, None, node_number(), 0, inputs, None, None, None, None]
            records(record)
            if events:
                record[9] = events()
            record[2] = _now()
            try:
                result = call(module, *args, **kwargs)
            except BaseException as error:
                record[3], record[5] = _now(), node_number()
                record[8] = type(error).__name__
                raise
            record[3] = now = _now()
            record[5] = node_number()
            if events:
                record[10] = events()
            record[7] = one(result)[0] if type(result) is Tensor else describe(result)
            if now > self.sample_at:
                self.sample(now)
            return result

        return traced

    def sample(self, now: int) -> None:
        """Note the memory in use; the next time when this was a thousandth of the time between."""
        self.memory.append((now, self.read_memory()))
        least, most = SAMPLE_NS
        self.sample_at = now + min(max(least, 1000 * (_now() - now)), most)

    def start(self) -> None:
        """Begin to note."""
        calls.install()
        pending.traces += 1
        calls._listeners.append(self.calls.append)
        self.listener = calls._listeners[-1]
        self.open = True
        activate(self, True)
        self.anchor = self.events() if self.events else None
        self.outer_clock, calls.clock = calls.clock, self.events
        self.started = _now()
        self.sample(self.started)

    def stop(self) -> RankTrace:
        """End, undo every change, and give what was noted as plain data that can be pickled."""
        self.stopped = _now()
        self.sample(self.stopped)
        activate(self, False)
        self.open = False
        calls._listeners.remove(self.listener)
        calls.clock = self.outer_clock
        pending.settle()
        pending.traces -= 1
        # copies: what ends after this trace does not change it
        self.calls = [dataclasses.replace(c) for c in self.calls]
        self.backward.unhook()
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
            fires=[(*f[:4], device_ms(f[4])) for f in self.backward.fires],
            runs=self.backward.runs,
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
