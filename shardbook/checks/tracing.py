"""Chapter 12: what a tracer of modules must note, and what it must leave alone."""

import json
import time
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..devices import device
from .compare import expect, random, refuses, same
from .report import check
from .wrong import Wrong

EPSILON = 1.001  # nanoseconds: microseconds are written as floats


class Log(nn.Module):
    """A module whose forward writes down what a tracer should see: the oracle of record_modules."""

    seen: ClassVar[list[list]] = []  # shared by the modules of one test
    path = ""
    depth: ClassVar[list[int]] = [0]

    def __call__(self, *args, **kwargs):
        entry = [self.path, Log.depth[0], time.monotonic_ns(), None, None]
        Log.seen.append(entry)
        Log.depth[0] += 1
        try:
            entry[4] = super().__call__(*args, **kwargs)
            return entry[4]
        finally:
            Log.depth[0] -= 1
            entry[3] = time.monotonic_ns()


class Scale(Log):
    """A leaf with two parameters."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, times: float = 1) -> Tensor:
        return x * self.weight * times + self.bias


class Twice(Log):
    """Calls its child two times, keyword arguments and nested arguments among them."""

    def __init__(self):
        super().__init__()
        self.scale, self.pair = Scale(5), Pair()
        self.line = nn.Parameter(torch.ones(5, 7))

    def forward(self, x: Tensor, *, mask: Tensor, options: tuple) -> Tensor:
        x = self.scale(x)
        x = self.scale(x, times=3)
        out = self.pair([x, (mask, "text")], count=2)
        return out["sum"] @ self.line


class Pair(Log):
    """Nested arguments in, a dict out."""

    def __init__(self):
        super().__init__()
        self.inner = Scale(5)

    def forward(self, both: list, count: int) -> dict:
        x, (mask, _) = both
        return {"sum": self.inner(x) + mask, "parts": (x, [mask])}


class Again(Log):
    """Calls itself until depth is 0."""

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x + 1 if depth == 0 else self(x, depth - 1)


class Raises(Log):
    """Fails after its child has run."""

    def __init__(self):
        super().__init__()
        self.scale = Scale(5)

    def forward(self, x: Tensor) -> Tensor:
        self.scale(x)
        raise KeyError("inside the model")


def prepared(model: nn.Module) -> nn.Module:
    """The model on the device, its modules knowing their dotted names, the log empty."""
    Log.seen, Log.depth = [], [0]
    for name, module in model.named_modules():
        module.path = name
    return model.to(device())


def hooks(model: nn.Module) -> int:
    """Hooks on the modules and on all modules of the process."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
    shared = vars(torch.nn.modules.module)
    return found + sum(len(shared[f"_global{kind}"]) for kind in kinds)


def tidy(value: Any) -> Any:
    """Shapes as tuples, containers as lists, so that torch.Size and tuple are alike."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
        return (tuple(value[0]), value[1])
    if isinstance(value, (list, tuple)):
        return [tidy(v) for v in value]
    return value


F32, I64 = torch.float32, torch.int64


@check("record_modules")
def record_modules(answer, report):
    """Compared with what the modules themselves write down in their forward."""
    x = random(2, 3, 5).to(device())
    mask = torch.ones(3, 5, device=device())

    def events_of(model, *args, **kwargs):
        events = answer(model, *args, **kwargs)
        expect(isinstance(events, list) and events, "the result is no list of events, or empty")
        keys = {"name", "type", "inputs", "outputs", "parameters", "start_ns", "end_ns", "depth"}
        missing = keys - set(events[0])
        expect(not missing, f"an event lacks {sorted(missing)}")
        return events

    def twice():
        return events_of(prepared(Twice()), x, mask=mask, options=("a", 1))

    with report.property(
        "runs the model once",
        hint="call the model one time, with the arguments given; the hooks do the rest",
    ):
        twice()
        same(sum(s[1] == 0 for s in Log.seen), 1, "the number of runs")
    with report.property(
        "notes every call by its dotted name, in order of the starts",
        hint="a hook before forward starts the event, so append there, not when the call has ended",
    ):
        events = twice()
        if len(events) == 2 * len(Log.seen):
            said = "the second run gives the events of the first as well"
            raise Wrong(said, hint="start with a new list of events at each call")
        same([e["name"] for e in events], [s[0] for s in Log.seen], "the order of the names")
        same([e["type"] for e in events][:2], ["Twice", "Scale"], "the first two types")
    with report.property(
        "a module called twice, or by itself, makes an event a call",
        hint="events belong to calls, not to modules: a dict by name keeps only the last; keep the "
        "running calls on a stack",
    ):
        same(sum(e["name"] == "scale" for e in twice()), 2, "the number of events of 'scale'")
        events = events_of(prepared(Again()), x, 2)
        same([e["depth"] for e in events], [0, 1, 2], "the depths of a module that calls itself")
        nested = all(
            a["start_ns"] <= b["start_ns"] <= b["end_ns"] <= a["end_ns"]
            for a, b in pairwise(events)
        )
        expect(nested, "the calls of a module that calls itself do not lie inside each other")
    with report.property(
        "depth is the number of enclosing calls",
        hint="count the calls that are running when this one starts; dots in the name are "
        "something else, and a call that has ended encloses nothing",
    ):
        same([e["depth"] for e in twice()], [s[1] for s in Log.seen], "the depths")
    with report.property(
        "start and end lie around the module's own work",
        hint="read the clock in both hooks: in nanoseconds, of a clock that never goes back",
    ):
        model = prepared(Twice())
        before = [time.monotonic_ns(), time.perf_counter_ns(), time.time_ns()]
        events = events_of(model, x, mask=mask, options=())
        after = [time.monotonic_ns(), time.perf_counter_ns(), time.time_ns()]
        whole = (events[0]["start_ns"], events[0]["end_ns"])
        clock = [a <= whole[0] <= whole[1] <= b for a, b in zip(before, after, strict=True)]
        expect(any(clock), f"the root runs from {whole[0]} to {whole[1]}: no clock's nanoseconds")
        for e in events:
            lies = whole[0] <= e["start_ns"] <= e["end_ns"] <= whole[1]
            expect(lies, f"{e['name'] or 'the root'!r} does not lie within the root's call")
        ends = [e["end_ns"] for e in events if e["depth"] == 1]
        starts = [e["start_ns"] for e in events if e["depth"] == 1]
        in_turn = all(e <= s for e, s in zip(ends, starts[1:], strict=False))
        expect(in_turn, "a call ends after the next one has started")

        class Sleeps(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                time.sleep(0.02)
                return x

        (event,) = events_of(Sleeps(), x)
        took = (event["end_ns"] - event["start_ns"]) / 1e6
        expect(19 <= took <= 2000, f"a forward that sleeps 20 ms took {took:.3g} ms")
    with report.property(
        "inputs and outputs are shapes and dtypes, keyword arguments and nesting included",
        hint="ask the hooks for keyword arguments (with_kwargs=True); go through lists, tuples and "
        "dicts; leave out what is no tensor",
    ):
        wanted = [
            ("", [((2, 3, 5), F32), ((3, 5), F32)], [((2, 3, 7), F32)]),
            ("scale", [((2, 3, 5), F32)], [((2, 3, 5), F32)]),
            (
                "pair",
                [[((2, 3, 5), F32), [((3, 5), F32)]]],
                [((2, 3, 5), F32), [((2, 3, 5), F32), [((3, 5), F32)]]],
            ),
        ]
        events = twice()
        for name, inputs, outputs in wanted:
            event = next(e for e in events if e["name"] == name)
            same(tidy(event["inputs"]), inputs, f"inputs of {name or 'the root'!r}")
            same(tidy(event["outputs"]), outputs, f"outputs of {name or 'the root'!r}")
        numbers = nn.Embedding(11, 4).to(device())
        (event,) = events_of(numbers, torch.zeros(2, 6, dtype=I64, device=device()))
        same(tidy(event["inputs"]), [((2, 6), I64)], "inputs of an embedding")
    with report.property(
        "parameters are the module's own",
        hint="named_parameters(recurse=False): those of the children belong to the children, and "
        "a frozen one (requires_grad False) is a parameter like others",
    ):
        model = prepared(Twice())
        model.scale.bias.requires_grad_(False)
        events = events_of(model, x, mask=mask, options=("a", 1))
        for event, parameters in zip(
            events, [{"line": (5, 7)}, {"weight": (5,), "bias": (1,)}], strict=False
        ):
            got = {name: tuple(shape) for name, shape in event["parameters"].items()}
            same(got, parameters, f"parameters of {event['name'] or 'the root'!r}")
    with report.property(
        "changes no value and keeps no hook",
        hint="hooks only look: they return nothing; keep the handles and remove each",
    ):
        model = prepared(Twice())
        before = hooks(model)
        events_of(model, x, mask=mask, options=())
        expect(hooks(model) == before, f"{hooks(model) - before} hooks remain on the modules")
        want = prepared(Twice())(x, mask=mask, options=())
        prepared(model)
        answer(model, x, mask=mask, options=())
        expect(torch.equal(Log.seen[0][4], want), "the model's output is another under the tracer")
        expect("forward" not in vars(model), "the model's forward has been replaced")
        if not all(m.training for m in model.modules()):
            hint = "leave the mode to the caller: no eval(), or train() again at the end"
            raise Wrong("the model was in training mode and is not afterwards", "kept", hint)
    with report.property(
        "the model's exception comes through and no hook remains",
        hint="remove the hooks in a finally block and let the exception pass",
    ):
        model = prepared(Raises())
        before = hooks(model)
        refuses(answer, model, x, what="a model that raises KeyError", error=KeyError)
        expect(hooks(model) == before, f"{hooks(model) - before} hooks remain after an exception")


def event(name: str, start: int, end: int, depth: int, **more) -> dict:
    """A hand-made event."""
    base = {"name": name, "type": "Linear", "inputs": [((2, 5), F32)], "outputs": [((2, 7), F32)]}
    base |= {"parameters": {"weight": (7, 5)}, "start_ns": start, "end_ns": end, "depth": depth}
    return base | more


def tight(zero: int) -> list[dict]:
    """Calls that touch to the nanosecond, from a clock that shows `zero`."""
    day = 86_400_000_000_123  # nanoseconds: 47 bits, where float32 keeps 24
    rows = [("", 0, 157_536, 0), ("a", 0, 1_350, 1), ("b", 1_350, 157_536, 1)]
    rows += [
        ("b.0", 1_357, 100_001, 2),
        ("b.1", 100_001, 157_536, 2),
        ("b.1.x", 100_003, 157_535, 3),
        ("late", day, day + 1_357, 0),
    ]
    return [event(name, zero + start, zero + end, depth) for name, start, end, depth in rows]


@check("to_chrome")
def to_chrome(answer, report):
    """Read back as Perfetto does: microseconds times 1000, rounded to whole nanoseconds."""
    zero = 1_790_000_000_123_456_789  # a clock that counts from 1970

    def slices(events, **kwargs):
        trace = json.loads(json.dumps(answer(events, **kwargs), allow_nan=False))
        expect(isinstance(trace, dict) and "traceEvents" in trace, "there is no 'traceEvents' list")
        found = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        same(len(found), len(events), "the number of complete events (ph 'X')")
        return found

    def spans(events):
        found = slices(events)
        for e in found:
            expect("ts" in e and "dur" in e, "a complete event needs ts and dur")
        starts = [round(e["ts"] * 1000) for e in found]
        return [(s, s + round(e["dur"] * 1000)) for s, e in zip(starts, found, strict=True)]

    with report.property(
        "is json: complete events in the same order, with name, pid, tid",
        hint="{'traceEvents': [{'ph': 'X', 'name': …, 'pid': rank, 'tid': …, 'ts': …, 'dur': …}]}; "
        "a dtype is no json, write it as text",
    ):
        found = slices(tight(zero))
        for e in found:
            expect(isinstance(e.get("tid"), int), "tid is no whole number")
            expect(isinstance(e.get("name"), str), "a slice has no name")
        if not found[0]["name"]:
            said = "the slice of the root has an empty name: nothing to read in Perfetto"
            raise Wrong(said, hint='the root\'s name is "": write its type, or "model", instead')
        same(
            [e["name"] for e in found][1:], [e["name"] for e in tight(0)][1:], "the names in order"
        )
        same(slices([]), [], "the trace of no events")
    with report.property(
        "pid is the rank",
        hint="the rank argument is the process: Perfetto draws one group of tracks a pid",
    ):
        same({e["pid"] for e in slices(tight(zero))}, {0}, "the pid without a rank")
        same({e["pid"] for e in slices(tight(zero), rank=3)}, {3}, "the pid of rank 3")
    with report.property(
        "times are microseconds, relative to the first event",
        hint="ts and dur are in microseconds; start at 0, or a big clock leaves no digits for "
        "nanoseconds (and Perfetto drops what is negative)",
    ):
        found = slices(tight(zero))
        expect(abs(found[0]["ts"]) < 0.001, f"the first event is at {found[0]['ts']!r}, not 0")
        expect(
            abs(found[0]["dur"] - 157.536) < 1,
            f"157,536 ns are written as dur {found[0]['dur']!r}, expected 157.536",
        )
        late = [event("late", zero + 5_000, zero + 6_000, 0), event("x", zero, zero + 1, 0)]
        starts = [e["ts"] for e in slices(late)]
        expect(min(starts) > -0.0005, f"an event starts at {min(starts)!r}: Perfetto drops it")
    with report.property(
        "keeps every nanosecond of start and end",
        hint="don't round to whole microseconds or to two digits; subtract the nanoseconds first, "
        "divide then, in Python's floats: a float32 tensor keeps 7 digits",
    ):
        for e, (start, end) in zip(tight(0), spans(tight(zero)), strict=True):
            expect(
                abs(start - e["start_ns"]) <= EPSILON and abs(end - e["end_ns"]) <= EPSILON,
                f"{e['name']!r} runs from {e['start_ns']} to {e['end_ns']} ns, read back as "
                f"{start} to {end}",
            )
    with report.property(
        "slices of one track lie inside each other or apart",
        hint="Perfetto drops a slice that sticks out of the one it started in: round neither start "
        "nor length upwards",
    ):
        found = slices(tight(zero))
        times = spans(tight(zero))
        for i, (a, b) in enumerate(times):
            for j, (c, d) in enumerate(times):
                if i != j and found[i]["tid"] == found[j]["tid"]:
                    apart, holds = b <= c or d <= a, (a <= c and d <= b) or (c <= a and b <= d)
                    names = f"{found[i]['name']!r} and {found[j]['name']!r}"
                    expect(apart or holds, f"{names} overlap and neither holds the other")
        tids = {e["tid"] for e in found}
        expect(len(tids) == 1, "nesting is lost: the calls of one thread are on several tids")
    with report.property(
        "leaves the events as they were",
        hint="make new dicts, don't convert the times in place",
    ):
        events = tight(zero)
        answer(events)
        expect(events == tight(zero), "the events have changed")


class Tied(nn.Module):
    """Embedding and head share a weight; bf16 beside fp32; a buffer; a module used twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(11, 6), "norm": nn.BatchNorm1d(6)})
        self.mlp = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)).to(torch.bfloat16)
        self.again = self.mlp
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.body["embed"].weight
        self.scale = nn.Parameter(torch.ones(3))


@check("parameter_table")
def parameter_table(answer, report):
    """Compared with the numbers of a model counted by hand."""
    model = Tied().to(device())
    counts = {
        "": (66 + 12 + 91 + 84 + 3, 4 * (66 + 12 + 3) + 2 * (91 + 84)),
        "body": (78, 312),
        "body.embed": (66, 264),
        "body.norm": (12, 48),
        "mlp": (175, 350),
        "mlp.0": (91, 182),
        "mlp.1": (0, 0),
        "mlp.2": (84, 168),
        "head": (66, 264),
    }

    def table():
        found = answer(model)
        expect(isinstance(found, dict), f"the result is {type(found).__name__}, expected a dict")
        return {name: tuple(value) for name, value in found.items()}

    with report.property(
        "has the modules of named_modules(), by their names",
        hint='the root is there as "", containers and modules without parameters too; a module '
        "that hangs in two places has its first name",
    ):
        same(sorted(table()), sorted(counts), "the names")
    with report.property(
        "counts the subtree of each module",
        hint="a module's own parameters and its children's; buffers (running_mean) are none",
    ):
        for name in ("body.embed", "body.norm", "mlp.0", "mlp.1", "mlp", "body"):
            same(table()[name][0], counts[name][0], f"the number of parameters of {name!r}")
    with report.property(
        "a shared parameter counts once in a subtree that holds both places",
        hint="don't add up the children: the tied weight would count twice; a set of ids, or "
        "module.parameters(), which gives each once",
    ):
        same(table()["head"][0], 66, "the number of parameters of 'head'")
        same(table()[""][0], counts[""][0], "the total")
    with report.property(
        "bytes follow the dtype",
        hint="element_size() is 4 for float32 and 2 for bfloat16",
    ):
        for name, (_, nbytes) in counts.items():
            same(table()[name][1], nbytes, f"the bytes of {name or 'the root'!r}")
    with report.property(
        "counts frozen parameters like others",
        hint="requires_grad is no matter of memory: don't filter by it",
    ):
        frozen = Tied().to(device()).requires_grad_(False)
        for name, value in answer(frozen).items():
            same(tuple(value), counts[name], f"the entry of {name or 'the root'!r}, all frozen,")
    with report.property(
        "counts a model on the meta device",
        hint="tell parameters apart by identity (id or parameters()): without memory data_ptr() is "
        "0 for all of them",
    ):
        with torch.device("meta"):
            unreal = Tied()
        for name, value in answer(unreal).items():
            same(tuple(value), counts[name], f"the entry of {name or 'the root'!r} on 'meta'")
    with report.property(
        "agrees with the model's own count on an encoder layer",
        hint="compare with sum(p.numel() for p in module.parameters())",
    ):
        layer = nn.TransformerEncoderLayer(10, 2, 14)
        found = answer(layer)
        for name, module in layer.named_modules():
            want = sum(p.numel() for p in module.parameters())
            same(tuple(found[name]), (want, 4 * want), f"{name or 'the root'!r} of the layer")


def linear(width: int, inner: int) -> dict:
    """How a figure shows a linear layer."""
    return {"kind": "Linear", "shapes": {"weight": (inner, width), "bias": (inner,)}}


NORM = {"kind": "Norm", "shapes": {"weight": (10,), "bias": (10,)}}
ATTENTION = {
    "kind": "Attention",
    "shapes": {"in_proj_weight": (30, 10), "in_proj_bias": (30,)},
}


@check("label_figure")
def label_figure(answer, report):
    """On torch's encoder and decoder layers, whose modules can be named by reading them."""
    layer = nn.TransformerEncoderLayer(10, 2, 14)
    decoder = nn.TransformerDecoderLayer(10, 2, 14)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    with report.property(
        "finds a box by its kind and the shapes of its parameters",
        hint="compare the class name's end with kind, and all own parameters with shapes",
    ):
        figure = {"attention": ATTENTION, "up": linear(10, 14), "down": linear(14, 10)}
        found = answer(layer, figure)
        want = {"attention": "self_attn", "up": "linear1", "down": "linear2"}
        same(dict(found), want, "the labels of an encoder layer")
        pair = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        figure = {"narrow": {"kind": "Linear", "shapes": {"weight": (4, 6)}}}
        same(dict(answer(pair, figure)), {"narrow": "1"}, "the label of a weight of shape [4, 6]")
    with report.property(
        "kind is the end of the class name",
        hint="'Linear' must fit NonDynamicallyQuantizableLinear: endswith, not ==",
    ):
        found = answer(layer, {"W^O": linear(10, 10)})
        same(dict(found), {"W^O": "self_attn.out_proj"}, "the label of the output projection")
    with report.property(
        "boxes that look alike are taken in order, each module once",
        hint="keep the names that have a label; take the first module that fits and has none",
    ):
        figure = {"Add & Norm 1": NORM, "Add & Norm 2": NORM}
        want = {"Add & Norm 1": "norm1", "Add & Norm 2": "norm2"}
        same(dict(answer(layer, figure)), want, "the two norms")
        figure = {"masked": ATTENTION, "cross": ATTENTION, "n1": NORM, "n2": NORM, "n3": NORM}
        want = {"masked": "self_attn", "cross": "multihead_attn"}
        want |= {"n1": "norm1", "n2": "norm2", "n3": "norm3"}
        same(dict(answer(decoder, figure)), want, "the labels of a decoder layer")
    with report.property(
        "inside narrows the search to the module of an earlier label",
        hint="the name must start with that module's name and a dot: '10.0' is not inside '1'",
    ):
        box = {"kind": "TransformerEncoderLayer", "shapes": {}}
        figure = {"layer 1": box, "layer 2": box, "norm": NORM | {"inside": "layer 2"}}
        figure |= {"up": linear(10, 14) | {"inside": "layer 1"}}
        want = {"layer 1": "layers.0", "layer 2": "layers.1", "norm": "layers.1.norm1"}
        want |= {"up": "layers.0.linear1"}
        same(dict(answer(stack, figure)), want, "the labels of a stack of two layers")
        whole = {"kind": "Encoder", "shapes": {}}
        figure = {"encoder": whole, "norm": NORM | {"inside": "encoder"}}
        want = {"encoder": "", "norm": "layers.0.norm1"}
        same(dict(answer(stack, figure)), want, "the labels inside the root")
        many = nn.ModuleDict(
            {
                "10": nn.Sequential(nn.LayerNorm(10)),
                "1": nn.Sequential(nn.ReLU(), nn.LayerNorm(10)),
                "2": nn.Sequential(nn.LayerNorm(10)),
            }
        )
        figure = {
            "a": {"kind": "Sequential", "shapes": {}},
            "b": {"kind": "Sequential", "shapes": {}},
        }
        figure |= {"norm": NORM | {"inside": "b"}}
        want = {"a": "10", "b": "1", "norm": "1.1"}
        same(dict(answer(many, figure)), want, "the norm of box '1' beside a box '10'")
    with report.property(
        "says which label fits no module",
        hint="raise ValueError with the label in its message; a wrong shape is no fit, and a "
        "module that has a label can't get another",
    ):
        for figure in ({"wide": linear(10, 99)}, {"n1": NORM, "n2": NORM, "third": NORM}):
            label = list(figure)[-1]
            try:
                answer(layer, figure)
            except ValueError as error:
                expect(label in str(error), f"the ValueError does not name the label {label!r}")
            else:
                expect(False, f"the label {label!r} fits no module and was accepted")
