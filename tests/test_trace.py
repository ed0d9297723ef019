"""What a trace records, that the model does not notice, and that nothing stays behind."""

import copy
import gzip
import html
import itertools
import json
import pickle
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.tracing import recorder, validate
from shardbook.tracing.events import place, us

CALL, ENGINE = nn.Module._call_impl, torch.autograd.graph._engine_run_backward


@pytest.fixture(autouse=True)
def nothing_remains():
    yield
    assert nn.Module._call_impl is CALL
    assert torch.autograd._engine_run_backward is ENGINE
    assert torch.autograd.graph._engine_run_backward is ENGINE
    assert not recorder.active
    assert not calls._listeners


def drawn(t, category=None):
    """The valid slices of a trace, {name: [slice, …]} in order of time."""
    chrome = t.chrome()
    assert validate(chrome) == []
    found = {}
    for e in chrome["traceEvents"]:
        if e["ph"] == "X" and category in (None, e["cat"]):
            found.setdefault(e["name"], []).append(e)
    return found


def inside(inner, outer):
    """In whole nanoseconds: sums of microseconds as floats differ in their last bit."""

    def span(e):
        return round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000)

    return span(outer)[0] <= span(inner)[0] and span(inner)[1] <= span(outer)[1]


def mlp(*sizes):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def test_forward_and_backward_nest_in_order():
    model, (x, y) = tiny_lm(), counting_batch(0)
    with sb.trace(model) as t:
        token_loss(model(x), y).backward()
    forward, backward = drawn(t, "forward"), drawn(t, "backward")
    names = [n or "TinyLM" for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    assert list(forward) == names
    whole = [f"{n} (backward)" for n in names]
    assert set(backward) == {"backward", *whole}
    for name in names[1:]:
        parent = name.rsplit(".", 1)[0] if "." in name else "TinyLM"
        parent = "TinyLM" if parent == "blocks" else parent
        assert inside(forward[name][0], forward[parent][0])
        assert inside(backward[f"{name} (backward)"][0], backward[f"{parent} (backward)"][0])
    leaves = [n for n, m in model.named_modules() if not list(m.children())]
    starts = [backward[f"{n} (backward)"][0]["ts"] for n in leaves]
    assert starts == sorted(starts, reverse=True), "backward goes through the layers from the last"
    args = forward["blocks.0.attn.qkv"][0]["args"]
    assert args["inputs"] == "float32[4, 64, 64]" and args["outputs"] == "float32[4, 64, 192]"
    assert args["weight"] == "float32[192, 64]" and args["type"] == "Linear"


def test_backward_time_is_where_the_work_is():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    class Layer(nn.Linear):
        slow = False

        def forward(self, x):
            x = super().forward(x)
            return Slow.apply(x) if self.slow else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Layer(4, 4), Layer(4, 4), Layer(4, 4)

        def forward(self, x):
            return self.c(F.gelu(self.a(x)) + Slow.apply(self.b(x)))

    model = Model()
    model.c.slow = True
    with sb.trace(model) as t:
        model(torch.randn(2, 4)).sum().backward()
    spent = {n: sum(e["dur"] for e in es) / 1000 for n, es in drawn(t, "backward").items()}
    assert spent["c (backward)"] >= 49
    assert spent["Model (backward)"] >= 99, "the root's own work between its children"
    assert spent["a (backward)"] < 40 and spent["b (backward)"] < 40


def test_values_and_gradients_are_the_same_bits():
    model, (x, y) = tiny_lm(), counting_batch(0)
    token_loss(model(x), y).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with sb.trace(model):
        loss = token_loss(model(x), y)
    loss.backward()  # the graph outlives the trace
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))
    model.zero_grad()
    with sb.trace(model):
        token_loss(model(x), y).backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))


def test_a_module_called_twice_and_tied_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = (
                nn.Embedding(10, 6),
                nn.LayerNorm(6),
                nn.Linear(6, 10, bias=False),
            )
            self.head.weight = self.embed.weight
            self.again = self.norm

        def forward(self, x):
            return self.head(self.again(self.norm(self.embed(x))))

    model = Model()
    with sb.trace(model) as t:
        model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert len(drawn(t, "forward")["norm"]) == 2
    assert len(drawn(t, "backward")["norm (backward)"]) >= 1
    rows = {r["name"]: r for r in t.table()}
    assert rows["norm"]["calls"] == 2
    assert rows["embed"]["parameters"] == rows["head"]["parameters"] == 60
    assert rows[""]["parameters"] == 72, "a tied weight counts once"


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x, depth=2):
        return self.line(x) if depth == 0 else self(x, depth - 1) * 2


def test_a_module_that_calls_itself():
    model = Recursive()
    with sb.trace(model) as t:
        model(torch.randn(2, 3)).sum().backward()
    calls = drawn(t, "forward")["Recursive"]
    assert len(calls) == 3 and inside(calls[1], calls[0]) and inside(calls[2], calls[1])
    assert len(drawn(t, "backward")["Recursive (backward)"]) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), mlp(4, 8, 4)

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    model, x = Model(), torch.randn(3, 4)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with sb.trace(model) as t:
        model(x).sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))
    forward, backward = drawn(t, "forward"), drawn(t, "backward")
    assert len(forward["block.0"]) == 2, "once forward, once recomputed in backward"
    assert inside(forward["block.0"][1], backward["backward"][0])
    assert backward["block.0 (backward)"] and backward["first (backward)"]


def test_in_place_operations_and_views():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.relu, self.flat = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten()

        def forward(self, x):
            x = self.line(x)
            x += 1
            x[:, 0].mul_(2)
            return self.relu(self.flat(x))

    model, x = Model(), torch.randn(3, 2, 4)
    model(x).sum().backward()
    want = model.line.weight.grad.clone()
    model.zero_grad()
    with sb.trace(model) as t:
        model(x).sum().backward()
    assert torch.equal(model.line.weight.grad, want)
    assert {"line (backward)", "relu (backward)"} <= set(drawn(t, "backward"))


def test_retained_graphs_and_second_derivatives():
    model, x = mlp(3, 5, 1), torch.randn(2, 3, requires_grad=True)
    with sb.trace(model) as t:
        y = model(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward(retain_graph=True)
        y.backward()
    backward = drawn(t, "backward")
    assert len(backward["backward"]) == 3
    assert len(backward["0 (backward)"]) >= 2


def test_an_exception_inside_forward_and_inside_backward():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("no such thing")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    with pytest.raises(KeyError), sb.trace(model) as t:
        model(torch.randn(1, 2))
    forward = drawn(t, "forward")
    assert forward["1"][0]["args"]["error"] == "KeyError"
    assert forward["Sequential"][0]["args"]["error"] == "KeyError"

    line = nn.Linear(2, 2)
    out = line(torch.randn(1, 2))
    out.register_hook(lambda grad: 1 / 0)
    with sb.trace(line) as t, pytest.raises(ZeroDivisionError):
        line(out).sum().backward()
    assert "backward" in drawn(t, "backward")


def test_no_grad_inference_mode_and_generators():
    class Yields(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, xs):
            for x in xs:
                yield self.line(x)

    model = Yields()
    source = (torch.full((1, 2), float(i)) for i in range(3))
    with sb.trace(model) as t, torch.no_grad():
        assert len(list(model(source))) == 3, "the trace does not consume a generator"
    assert len(drawn(t, "forward")["line"]) == 3 and not drawn(t, "backward")
    with sb.trace(model) as t, torch.inference_mode():
        list(model([torch.ones(1, 2)]))
    assert len(drawn(t, "forward")["line"]) == 1


def test_arguments_that_are_no_tensors():
    class Model(nn.Module):
        def forward(self, a, *, mask=None, options=(), pair=None):
            return {"sum": a + pair[0], "n": 3, "list": [a, (a, "text")]}

    model, x = Model(), torch.randn(2, 3)
    with sb.trace(model) as t:
        model(x, mask=None, options=("x", 1), pair=(x, object()))
    args = drawn(t)["Model"][0]["args"]
    assert args["inputs"] == "float32[2, 3], pair=(float32[2, 3])"
    assert args["outputs"] == "sum=float32[2, 3], list=(float32[2, 3], (float32[2, 3]))"
    json.dumps(t.chrome(), allow_nan=False)


def test_traces_nest_and_end_in_any_order():
    model = mlp(2, 3, 2)
    with sb.trace(model) as outer, sb.trace(model[0]) as inner:
        model(torch.randn(1, 2)).sum().backward()
    assert set(drawn(inner, "forward")) == {"Linear"}
    assert set(drawn(outer, "forward")) == {"Sequential", "0", "1"}
    a, b = sb.trace(model), sb.trace(model)
    first, second = a.__enter__(), b.__enter__()
    model(torch.randn(1, 2))
    a.__exit__(None, None, None)
    model(torch.randn(1, 2))
    b.__exit__(None, None, None)
    assert len(drawn(first)["0"]) == 1 and len(drawn(second)["0"]) == 2


def test_a_trace_opened_inside_a_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, x):
            with sb.trace(self) as self.seen:
                return self.line(x)

    model = Model()
    with sb.trace(model) as t:
        model(torch.randn(1, 2))
    assert len(drawn(t)["line"]) == 1 and set(drawn(model.seen)) == {"line"}


def test_threads_have_their_own_tracks():
    model = mlp(2, 3, 2)

    together = threading.Barrier(4)  # all four at once, or an ended thread's number is used again

    def work():
        together.wait()
        for _ in range(20):
            model(torch.randn(1, 2)).sum().backward()
        if threading.current_thread() is not threading.main_thread():
            together.wait()

    with sb.trace(model) as t:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        together.wait()
        for thread in threads:
            thread.join()
    forward, backward = drawn(t, "forward"), drawn(t, "backward")
    assert len(forward["0"]) == 80
    assert len({e["tid"] for e in forward["0"]}) == 4
    for name in ("0 (backward)", "1 (backward)", "Sequential (backward)"):
        assert len(backward[name]) == 80, "each thread numbers its autograd nodes alone"


def test_no_hook_remains_on_a_graph_that_outlives_the_trace_and_others_stay():
    model, seen = mlp(2, 3, 2), []
    with sb.trace(model) as outer:
        with sb.trace(model) as inner:
            loss = model(torch.randn(1, 2)).sum()
            loss.grad_fn.register_prehook(lambda grads: seen.append("before"))
            loss.backward(retain_graph=True)
            handle = loss.grad_fn.register_prehook(lambda grads: seen.append("after"))
        loss.backward(retain_graph=True)
        handle.remove()
    assert len(drawn(inner)["1 (backward)"]) == 1 and len(drawn(outer)["1 (backward)"]) == 2
    fires = len(outer.ranks[0].fires)
    loss.backward()
    assert seen == ["before", "before", "after", "before"]
    assert len(outer.ranks[0].fires) == fires
    assert "_register_hook" not in vars(torch.autograd.Function)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        with sb.trace(model) as t:
            got = model(x, src_key_padding_mask=padding)
    assert torch.equal(got, want)
    args = drawn(t)["layers.0"][0]["args"]
    assert "float32[2, ragged, 16]" in args["inputs"] + args["outputs"]
    assert len(t.table()) == len(list(model.modules()))


def test_marks_and_paced_kernels():
    @sb.mark("decorated")
    def f():
        sb.pace(2, "matmul")

    with sb.trace() as t:
        with sb.mark("<img src=x onerror=alert(1)>"):
            f()
        f()
    slices = drawn(t)
    assert len(slices["decorated"]) == 2
    paced = slices["matmul (paced)"]
    assert all(e["dur"] >= 2000 and e["args"]["time"].startswith("paced") for e in paced)
    assert inside(paced[0], slices["decorated"][0])
    assert t.chrome()["otherData"]["time"] == "paced" and "paced" in repr(t)
    with pytest.raises(ValueError, match="milliseconds"):
        sb.pace(-1)
    sb.pace(0)
    with sb.mark("outside any trace"):
        pass


def test_simulated_time_is_labelled():
    t = sb.Trace.simulated([(0, "F0", 0, 1), (1, "F0", 1, 2), (0, "B0", 2, 4)])
    chrome = t.chrome()
    assert validate(chrome) == []
    assert chrome["otherData"]["time"] == "simulated" and "simulated" in repr(t)
    names = [e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 (simulated)", "rank 1 (simulated)"]
    assert [e["dur"] for e in chrome["traceEvents"] if e["ph"] == "X"] == [1000, 1000, 2000]
    with pytest.raises(ValueError, match="F0"):
        sb.Trace.simulated([(0, "F0", 2, 1)])


def test_memory_is_counted():
    with sb.trace() as t:
        held = torch.ones(20_000_000, device=sb.device())
    counters = [e for e in t.chrome()["traceEvents"] if e["ph"] == "C"]
    first, last = (e["args"]["MB"] for e in (counters[0], counters[-1]))
    assert last - first > 0.9 * held.nbytes / 1e6


def test_tables_are_text_and_escaped_html():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<img onerror=x>", nn.Linear(2, 2))

        def forward(self, x):
            return self._modules["<img onerror=x>"](x)

    model = Odd()
    with sb.trace(model) as t:
        model(torch.randn(1, 2))
    table = t.table()
    page = table._repr_html_()
    assert "<img" not in page and html.escape("<img onerror=x>") in page
    assert "<img onerror=x>" in str(table)
    assert "<summary" in page and "weight float32[2, 2]<br>bias float32[2]" in page
    assert "own parameters" in str(table) and "weight float32[2, 2], bias float32[2]" in str(table)
    assert table.rows[1]["flops"] == 2 * 2 * 2 and table.rows[0]["flops"] == 8
    assert str(t.comm()).startswith("rank")


def test_save_pickle_and_copy(tmp_path):
    model = mlp(2, 3)
    with sb.trace(model, tp=1, cp=0) as t:
        model(torch.randn(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="still being recorded"):
            t.table()
    t.save(tmp_path / "a.json")
    t.save(tmp_path / "a.json.gz")
    assert json.loads((tmp_path / "a.json").read_text()) == t.chrome()
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == t.chrome()
    assert pickle.loads(pickle.dumps(t)).chrome() == t.chrome()
    assert copy.deepcopy(t).chrome() == t.chrome()
    names = [e["args"]["name"] for e in t.chrome()["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 (tp=1, cp=0)"]


def test_python_functions_and_operators_on_the_same_timeline():
    model, (x, y) = tiny_lm(), counting_batch(0)
    with sb.trace(model, python=True, kernels=True) as t:
        token_loss(model(x), y).backward()
    slices = drawn(t)
    embed = slices["embed"][0]
    (operator,) = slices["aten::embedding"]
    assert embed["ts"] - 200 <= operator["ts"] <= embed["ts"] + embed["dur"] + 200
    (python,) = [e[0] for name, e in slices.items() if name.startswith("TinyLM.forward")]
    assert abs(python["ts"] - slices["TinyLM"][0]["ts"]) < 5000
    tids = {e["tid"] for e in (embed, operator, python)}
    assert len(tids) == 3


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"nn\.Module"), sb.trace(lambda x: x):
        pass


def test_times_survive_rounding_and_cutting():
    generator = torch.Generator().manual_seed(0)
    drawn_ns = torch.randint(0, 10**12, (2000,), generator=generator).tolist()
    for n in [*drawn_ns, 0, 1, 999, 1001]:
        assert int(us(n) * 1000) == n == round(us(n) * 1000)


def test_place_never_overlaps():
    generator = torch.Generator().manual_seed(1)
    for nest in (True, False):
        starts = torch.randint(0, 50, (200,), generator=generator).tolist()
        spans = [(s, s + 1 + (s * 7) % 11) for s in starts]
        lanes = place(spans, nest)
        for i, (a, b) in enumerate(spans):
            for j, (c, d) in enumerate(spans[:i]):
                if lanes[i] == lanes[j] and a < d and c < b:
                    assert nest and ((a <= c and d <= b) or (c <= a and b <= d))


def test_a_compiled_model_compiles_whole_and_its_inside_is_left_out():
    model = mlp(2, 3, 2)
    x = torch.randn(4, 2)
    with sb.trace(model) as t:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(x).sum().backward()
        model(x)
    assert len(drawn(t, "forward")["0"]) == 1 and len(drawn(t, "backward")["backward"]) == 1
    torch.compiler.reset()


def test_what_belongs_to_tracing_is_found_on_the_function():
    with sb.trace() as one:
        sb.trace.label(tp=1)
        sb.pace(1)
    merged = sb.trace.merge([one], "both")
    assert sb.trace.validate(merged.chrome()) == []
