"""The backward of a trace: when it begins, passes from module to module and ends.

When backward begins, pre-hooks go on the autograd nodes at which it will pass from one module to
the next. Unlike a module's backward hook these wrap no tensor, so in-place operations, views and
checkpointing work as they do untraced.
"""

import functools
import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge

from .. import _seams

_lock = threading.Lock()
_now = time.monotonic_ns
_thread = threading.get_ident

LAST_NODE = 2**62
"""Nodes that accumulate a parameter's gradient have the number 2**64 - 1: they run at once."""


class Recorder(Protocol):
    """Whose backward it is; `recorder.py` has it."""

    open: bool
    records: list[list]  # of the module calls so far
    events: Callable | None  # makes a device event
    sample_at: int  # when to look at memory again

    def sample(self, now: int) -> None: ...


class Backward:
    """What a recorder notes of backward."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.fires: list[tuple] = []  # (time, node, backward, thread, event)
        self.runs: list[list[int]] = []  # [start, end, thread]
        self.bounds: dict[int, list[int]] = {}  # thread -> first and last nodes of module calls
        self.bounded = 0  # records whose first node is in bounds
        self.running: list[list] = []  # those whose last node is not yet
        self.hooked: list = []  # the dictionaries that hold our hooks, by weak reference
        self.fired = self.hook()

    def wrap(self, engine: Callable) -> Callable:
        """An autograd engine that notes when backward begins, changes module and ends."""

        def run(outputs, *args, **kwargs):
            if torch.compiler.is_compiling() or not self.recorder.open:
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
        pop, push, number_of = stack.pop, stack.append, _seams.node_number
        collecting = gc.isenabled()
        gc.disable()  # hundreds of objects, which end at once
        try:
            while stack:
                node = pop()
                if node is None:
                    continue
                number = number_of(node)
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
            with _lock, _seams.hooks_registered_by(self.register):
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
        fresh = self.recorder.records[self.bounded :]
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

    def register(self, usual: Callable) -> Callable:
        """How a node takes our hook: a node that is met again gets no second one."""

        def register(hooks, hook):
            if type(hook) is not functools.partial or hook.func is not self.fired:
                return usual(hooks, hook)
            hooks = OrderedDict() if hooks is None else hooks
            hooks[self] = hook
            return hooks, weakref.ref(hooks)

        return register

    def unhook(self) -> None:
        """Take our hooks off the nodes that still live."""
        for hooks in self.hooked:
            if not isinstance(hooks, weakref.ref):
                hooks.remove()
            elif (held := hooks()) is not None:
                held.pop(self, None)
        self.hooked.clear()

    def hook(self) -> Callable:
        """What runs when backward reaches a node."""
        recorder, task = self.recorder, _seams.backward_number
        fires, events = self.fires.append, recorder.events

        def fired(node: tuple[int, int], grads: tuple) -> None:
            if not recorder.open:
                return
            now = _now()
            fires((now, node, task(), _thread(), events() if events else None))
            if now > recorder.sample_at:
                recorder.sample(now)

        return fired
