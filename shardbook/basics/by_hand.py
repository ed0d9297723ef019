"""Chapter 12's reference: a tracer of modules in a page, without what makes `sb.trace` quick."""

import time
from typing import Any

import torch
from torch import nn


def record_modules(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[dict]:
    """Run ``model(*inputs, **kwargs)`` once and note every module call, in order of their starts.

    Each is a dict: name (dotted, "" for the root), type (class name), inputs and outputs (nested
    lists of (shape, dtype), one entry per tensor argument, keyword arguments included; what is no
    tensor is left out; a lone tensor output is [(shape, dtype)]), parameters (name -> shape, own
    ones only), start_ns, end_ns (of a monotonic clock), depth (the number of enclosing calls).
    No hook remains afterwards, also when the model raises.
    """
    events: list[dict] = []
    running: list[dict] = []  # the calls that have started and not ended, outermost first
    names = {module: name for name, module in model.named_modules()}

    def before(module, args, kwargs):
        own = module.named_parameters(recurse=False)
        event = {
            "name": names[module],
            "type": type(module).__name__,
            "inputs": shapes_of([*args, *kwargs.values()]),
            "outputs": [],
            "parameters": {name: tuple(p.shape) for name, p in own},
            "depth": len(running),
        }
        events.append(event)
        running.append(event)
        event["start_ns"] = time.monotonic_ns()

    def after(module, args, kwargs, output):
        event = running.pop()
        event["end_ns"] = time.monotonic_ns()
        nested = isinstance(output, (list, tuple, dict))
        event["outputs"] = shapes_of(output if nested else [output])

    hooks = []
    for module in names:
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        # always_call: a call that raises ends too, or every later depth would be wrong
        hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
    try:
        model(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return events


def shapes_of(value: Any) -> Any:
    """Tensors as (shape, dtype), containers as lists of them, None for what holds no tensor."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [shape for item in value if (shape := shapes_of(item)) not in (None, [])]
    return None


def to_chrome(events: list[dict], rank: int = 0) -> dict:
    """The events of `record_modules` as a Chrome trace: complete events ("X"), pid = rank.

    Times are microseconds from the first event's start, exact to the nanosecond, and nesting is
    kept. json can write it; Perfetto reads it without dropping an event.
    """
    zero = min((event["start_ns"] for event in events), default=0)
    written = []
    for event in events:
        shapes = {k: str(event[k]) for k in ("inputs", "outputs", "parameters")}
        written.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": 1,
                "name": event["name"] or event["type"],
                "cat": "forward",
                # subtract first: whole nanoseconds are exact, microseconds of a big clock are not
                "ts": (event["start_ns"] - zero) / 1000,
                "dur": (event["end_ns"] - event["start_ns"]) / 1000,
                "args": {"type": event["type"], **shapes},
            }
        )
    return {"traceEvents": written}


def parameter_table(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Per module its (number, bytes) of parameters, subtree included; "" is the total.

    Names as named_modules() gives them. A parameter that two modules share counts once in any
    subtree that holds both.
    """
    table = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters())  # each once, however often it is shared
        count = sum(p.numel() for p in parameters)
        table[name] = (count, sum(p.numel() * p.element_size() for p in parameters))
    return table


def label_figure(model: nn.Module, figure: dict[str, dict]) -> dict[str, str]:
    """Which module of `model` each label of a paper's figure names: label -> dotted name.

    figure maps a label to what it shows: "kind", the end of the class name ("Linear" fits
    NonDynamicallyQuantizableLinear); "shapes", the shapes of the module's own parameters by name
    ({} for a box of boxes); "inside", if there, an earlier label whose module holds it at any
    depth. Boxes that look alike are taken in order: of the modules that fit and have no label yet,
    the first in named_modules() order. ValueError, naming the label, where no module fits.
    """
    labels: dict[str, str] = {}
    for label, box in figure.items():
        outer = labels[box["inside"]] if "inside" in box else None
        for name, module in model.named_modules():
            shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
            fits = type(module).__name__.endswith(box["kind"])
            fits &= shapes == {n: tuple(shape) for n, shape in box["shapes"].items()}
            if outer is not None:
                fits &= name != outer and (outer == "" or name.startswith(outer + "."))
            if fits and name not in labels.values():
                labels[label] = name
                break
        else:
            raise ValueError(f"no module of this model is {label!r}: {box['kind']} {box['shapes']}")
    return labels
