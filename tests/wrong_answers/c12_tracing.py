"""Chapter 12: tracers that are wrong in one way each."""

import time

import torch
from torch import nn

from shardbook.basics import by_hand
from tests.wrong_answers import right, wrong

for name in ("record_modules", "to_chrome", "parameter_table", "label_figure"):
    right(name)(getattr(by_hand, name))


# record_modules


def shapes(value):
    if isinstance(value, torch.Tensor):
        return [(tuple(value.shape), value.dtype)]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        found = []
        for item in value:
            inner = shapes(item)
            if inner:
                found.append(inner[0] if isinstance(item, torch.Tensor) else inner)
        return found
    return []


def tracer(before=True, own=True, kwargs=True, stack=True, remove=True, clock=time.perf_counter_ns):
    """A tracer by hooks, with one thing left out where an argument says so."""

    def record(model, *inputs, **keywords):
        names = {id(m): n for n, m in model.named_modules()}
        events, running, handles = [], [], []

        def start(module, args, keys):
            event = {
                "name": names[id(module)],
                "type": module.__class__.__name__,
                "inputs": shapes(list(args) + (list(keys.values()) if kwargs else [])),
                "parameters": dict(
                    (n, tuple(p.shape)) for n, p in module.named_parameters(recurse=not own)
                ),
                "depth": len(running) if stack else names[id(module)].count("."),
                "start_ns": clock(),
            }
            running.append(event)
            if before:
                events.append(event)

        def end(module, args, keys, out):
            event = running.pop()
            event["end_ns"], event["outputs"] = clock(), shapes(out)
            if not before:
                events.append(event)

        for module in model.modules():
            handles.append(module.register_forward_pre_hook(start, with_kwargs=True))
            handles.append(module.register_forward_hook(end, with_kwargs=True))
        if remove == "after":
            model(*inputs, **keywords)
        else:
            try:
                model(*inputs, **keywords)
            finally:
                if not remove:
                    handles = []
        for handle in handles:
            handle.remove()
        return events

    return record


@right("record_modules")
def patched_forward_in_the_class(model, *inputs, **kwargs):
    """Without hooks: wraps nn.Module.__call__ for the time of one run."""
    names = {id(m): n for n, m in model.named_modules()}
    events, depth, call = [], [0], nn.Module.__call__

    def traced(module, *args, **keys):
        event = {"name": names[id(module)], "type": type(module).__name__, "depth": depth[0]}
        event["inputs"] = shapes([*args, *keys.values()])
        own = {n: p for n, p in module._parameters.items() if p is not None}
        event["parameters"] = {n: p.shape for n, p in own.items()}
        events.append(event)
        depth[0] += 1
        event["start_ns"] = time.monotonic_ns()
        try:
            out = call(module, *args, **keys)
        finally:
            event["end_ns"] = time.monotonic_ns()
            depth[0] -= 1
        event["outputs"] = shapes(out)
        return out

    nn.Module.__call__ = traced
    try:
        model(*inputs, **kwargs)
    finally:
        nn.Module.__call__ = call
    return events


@wrong("record_modules", says="list of events")
def does_nothing(model, *inputs, **kwargs):
    model(*inputs, **kwargs)
    return []


@wrong("record_modules", says="order of the starts|order of the names")
def in_order_of_the_ends(model, *inputs, **kwargs):
    return tracer(before=False)(model, *inputs, **kwargs)


@wrong("record_modules", says="named_parameters.recurse=False|parameters of")
def parameters_of_the_children_too(model, *inputs, **kwargs):
    return tracer(own=False)(model, *inputs, **kwargs)


@wrong("record_modules", says="with_kwargs|inputs of")
def without_keyword_arguments(model, *inputs, **kwargs):
    return tracer(kwargs=False)(model, *inputs, **kwargs)


@wrong("record_modules", says="dots in the name|depth")
def depth_from_the_dots(model, *inputs, **kwargs):
    return tracer(stack=False)(model, *inputs, **kwargs)


@wrong("record_modules", says="hooks remain")
def hooks_stay(model, *inputs, **kwargs):
    return tracer(remove=False)(model, *inputs, **kwargs)


@wrong("record_modules", says="finally")
def hooks_stay_after_an_exception(model, *inputs, **kwargs):
    return tracer(remove="after")(model, *inputs, **kwargs)


@wrong("record_modules", says="nanoseconds|20 ms")
def milliseconds(model, *inputs, **kwargs):
    return tracer(clock=lambda: time.monotonic_ns() // 10**6)(model, *inputs, **kwargs)


@wrong("record_modules", says="own work|depth|order|a call")
def one_event_a_module(model, *inputs, **kwargs):
    events = tracer()(model, *inputs, **kwargs)
    return list({e["name"]: e for e in events}.values())


@wrong("record_modules", says="runs|once")
def runs_the_model_twice(model, *inputs, **kwargs):
    model(*inputs, **kwargs)
    events = tracer()(model, *inputs, **kwargs)
    return events


@wrong("record_modules", says="exception|KeyError")
def swallows_the_exception(model, *inputs, **kwargs):
    try:
        return tracer()(model, *inputs, **kwargs)
    except KeyError:
        return []


@wrong("record_modules", says="outputs")
def flat_outputs(model, *inputs, **kwargs):
    events = tracer()(model, *inputs, **kwargs)
    for event in events:
        event["outputs"] = list(flatten(event["outputs"]))
    return events


def flatten(value):
    if isinstance(value, tuple):
        yield value
    else:
        for item in value:
            yield from flatten(item)


_kept: list[dict] = []


@wrong("record_modules", says="new list of events at each call")
def events_are_kept_between_calls(model, *inputs, **kwargs):
    _kept.extend(tracer()(model, *inputs, **kwargs))
    return list(_kept)


@wrong("record_modules", says="a frozen one")
def trained_parameters_only(model, *inputs, **kwargs):
    events = tracer()(model, *inputs, **kwargs)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for e in events:
        at = f"{e['name']}." if e["name"] else ""
        e["parameters"] = {n: s for n, s in e["parameters"].items() if at + n in trained}
    return events


@wrong("record_modules", says="leave the mode to the caller")
def switches_to_evaluation(model, *inputs, **kwargs):
    return tracer()(model.eval(), *inputs, **kwargs)


# to_chrome


def written(events, rank, time_of=lambda ns: ns / 1000, zero=None, **more):
    zero = min((e["start_ns"] for e in events), default=0) if zero is None else zero
    return {
        "traceEvents": [
            {
                "ph": "X",
                "pid": rank,
                "tid": rank + 1,
                "name": e["name"] or "model",
                "ts": time_of(e["start_ns"] - zero),
                "dur": time_of(e["end_ns"] - e["start_ns"]),
                **{k: v(e) for k, v in more.items()},
            }
            for e in events
        ]
    }


@right("to_chrome")
def with_names_of_processes(events, rank=0):
    trace = written(events, rank, args=lambda e: {"outputs": repr(e["outputs"])})
    name = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    trace["traceEvents"].insert(0, name)
    return trace


@wrong("to_chrome", says="microseconds")
def nanoseconds_for_microseconds(events, rank=0):
    return written(events, rank, time_of=lambda ns: ns)


@wrong("to_chrome", says="relative|not 0")
def absolute_times(events, rank=0):
    return written(events, rank, zero=0)


@wrong("to_chrome", says="two digits|read back")
def two_digits(events, rank=0):
    return written(events, rank, time_of=lambda ns: round(ns / 1000, 2))


@wrong("to_chrome", says="microseconds|read back|whole")
def whole_microseconds(events, rank=0):
    return written(events, rank, time_of=lambda ns: ns // 1000)


@wrong("to_chrome", says="subtract the nanoseconds first|microseconds")
def divides_before_it_subtracts(events, rank=0):
    zero = min((e["start_ns"] for e in events), default=0) / 1000
    return written(
        events,
        rank,
        ts=lambda e: e["start_ns"] / 1000 - zero,
        dur=lambda e: e["end_ns"] / 1000 - e["start_ns"] / 1000,
    )


@wrong("to_chrome", says="pid")
def pid_is_always_zero(events, rank=0):
    return written(events, 0)


@wrong("to_chrome", says="dtype|json|JSON")
def dtypes_as_they_are(events, rank=0):
    return written(events, rank, args=lambda e: {"inputs": e["inputs"]})


@wrong("to_chrome", says="'X'|complete")
def begin_without_end(events, rank=0):
    return written(events, rank, ph=lambda e: "B")


@wrong("to_chrome", says="nesting")
def a_track_for_each_depth(events, rank=0):
    return written(events, rank, tid=lambda e: e["depth"])


@wrong("to_chrome", says="drops|-")
def from_the_first_in_the_list(events, rank=0):
    return written(events, rank, zero=events[0]["start_ns"] if events else 0)


@wrong("to_chrome", says="dur|read back")
def the_end_for_the_length(events, rank=0):
    zero = min((e["start_ns"] for e in events), default=0)
    return written(events, rank, dur=lambda e: (e["end_ns"] - zero) / 1000)


@wrong("to_chrome", says="changed|in place")
def converts_in_place(events, rank=0):
    trace = written(events, rank)
    for e in events:
        e["start_ns"] /= 1000
    return trace


@wrong("to_chrome", says="order")
def longest_first(events, rank=0):
    return written(sorted(events, key=lambda e: e["start_ns"] - e["end_ns"]), rank)


@wrong("to_chrome", says="root's name")
def the_root_has_no_name(events, rank=0):
    return written(events, rank, name=lambda e: e["name"])


@wrong("to_chrome", says="float32 tensor keeps 7 digits")
def times_by_a_tensor(events, rank=0):
    if not events:
        return {"traceEvents": []}
    starts = torch.tensor([e["start_ns"] for e in events])
    times = ((starts - starts.min()) / 1000).tolist()
    trace = written(events, rank)
    for slice, ts in zip(trace["traceEvents"], times, strict=True):
        slice["ts"] = ts
    return trace


# parameter_table


@right("parameter_table")
def by_ids(model):
    table = {}
    for name, module in model.named_modules():
        seen = {id(p): p for m in module.modules() for p in m._parameters.values() if p is not None}
        table[name] = (
            sum(p.numel() for p in seen.values()),
            sum(p.nbytes for p in seen.values()),
        )
    return table


@wrong("parameter_table", says="subtree|children")
def own_parameters_only(model):
    return {
        n: (
            sum(p.numel() for p in m.parameters(recurse=False)),
            sum(p.nbytes for p in m.parameters(recurse=False)),
        )
        for n, m in model.named_modules()
    }


@wrong("parameter_table", says="twice|total|shared")
def adds_up_the_children(model):
    table = {}
    for name, module in model.named_modules():
        own = [p for m in module.modules() for p in m.parameters(recurse=False)]
        table[name] = (sum(p.numel() for p in own), sum(p.nbytes for p in own))
    return table


@wrong("parameter_table", says="element_size|bytes")
def four_bytes_each(model):
    return {n: (c, 4 * c) for n, (c, _) in by_ids(model).items()}


@wrong("parameter_table", says="buffers|number of parameters")
def buffers_too(model):
    table = {}
    for name, module in model.named_modules():
        held = [*module.parameters(), *module.buffers()]
        table[name] = (sum(t.numel() for t in held), sum(t.nbytes for t in held))
    return table


@wrong("parameter_table", says="names|root")
def without_the_root(model):
    return {n: v for n, v in by_ids(model).items() if n}


@wrong("parameter_table", says="names|containers")
def without_empty_modules(model):
    return {n: v for n, v in by_ids(model).items() if v[0]}


@wrong("parameter_table", says="number of parameters|buffers|subtree")
def the_head_owns_nothing(model):
    """The tied weight counts where it is met first, and nowhere else."""
    seen, table = set(), {}
    for name, module in model.named_modules():
        fresh = [p for p in module.parameters() if id(p) not in seen]
        if not list(module.children()):
            seen |= {id(p) for p in fresh}
        table[name] = (sum(p.numel() for p in fresh), sum(p.nbytes for p in fresh))
    return table


@wrong("parameter_table", says="requires_grad is no matter of memory")
def trained_ones_only(model):
    table = {}
    for name, module in model.named_modules():
        mine = [p for p in module.parameters() if p.requires_grad]
        table[name] = (sum(p.numel() for p in mine), sum(p.nbytes for p in mine))
    return table


@wrong("parameter_table", says="meta")
def told_apart_by_where_they_lie(model):
    table = {}
    for name, module in model.named_modules():
        mine = {p.data_ptr(): p for m in module.modules() for p in m.parameters(recurse=False)}
        table[name] = (
            sum(p.numel() for p in mine.values()),
            sum(p.nbytes for p in mine.values()),
        )
    return table


# label_figure


def search(model, figure, kind=str.endswith, once=True, inside=None, shapes=None):
    """The first module that fits, with one rule changed where an argument says so."""
    inside = inside or (
        lambda name, outer: name != outer and f".{name}".startswith(f".{outer}." if outer else ".")
    )
    labels = {}
    for label, box in figure.items():
        for name, module in model.named_modules():
            own = {n: tuple(p.shape) for n, p in module._parameters.items() if p is not None}
            alike = shapes(own, box["shapes"]) if shapes else own == box["shapes"]
            within = "inside" not in box or inside(name, labels[box["inside"]])
            free = not once or name not in labels.values()
            if kind(type(module).__name__, box["kind"]) and alike and within and free:
                labels[label] = name
                break
        else:
            raise ValueError(f"nothing in the model looks like {label}")
    return labels


@right("label_figure")
def by_search(model, figure):
    return search(model, figure)


@wrong("label_figure", says="endswith|Linear")
def the_exact_class(model, figure):
    return search(
        model, figure, kind=lambda name, kind: name in (kind, "MultiheadAttention", "LayerNorm")
    )


@wrong("label_figure", says="each module once|alike|norm")
def the_same_module_twice(model, figure):
    return search(model, figure, once=False)


@wrong("label_figure", says="inside|dot")
def inside_is_ignored(model, figure):
    return search(model, figure, inside=lambda name, outer: True)


@wrong("label_figure", says="inside|dot")
def inside_by_the_first_letters(model, figure):
    return search(
        model, figure, inside=lambda name, outer: name != outer and name.startswith(outer)
    )


@wrong("label_figure", says="shapes|kind")
def shapes_are_ignored(model, figure):
    return search(model, figure, shapes=lambda own, wanted: True)


@wrong("label_figure", says="shapes|fits|label")
def numbers_of_elements_only(model, figure):
    def count(shapes):
        return sorted(torch.Size(s).numel() for s in shapes.values())

    return search(model, figure, shapes=lambda own, wanted: count(own) == count(wanted))


@wrong("label_figure", says="accepted|ValueError|label")
def leaves_out_what_fits_nothing(model, figure):
    labels = {}
    for label in figure:
        part = dict(list(figure.items())[: list(figure).index(label) + 1])
        try:
            labels = search(model, part)
        except ValueError:
            return labels
    return labels


@wrong("label_figure", says="name the label|label")
def a_message_that_says_nothing(model, figure):
    try:
        return search(model, figure)
    except ValueError as error:
        raise ValueError("no such module in this model") from error
