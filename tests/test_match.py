"""sb.match: twenty-five hand-labelled figures, a library, and what it says where nothing fits."""

import base64
import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import shardbook as sb
from shardbook.studies.translator import FIGURE, Translator
from shardbook.tracing.figures import fit, library, read
from shardbook.tracing.figures.parts import Part
from shardbook.tracing.match import names
from tests.figures import make, parts, step_video
from tests.figures.development import FIGURES as DEVELOPMENT
from tests.figures.held_out import FIGURES as HELD_OUT
from tests.figures.terse import FIGURES as TERSE

from .test_view import payload

EVERY = DEVELOPMENT | HELD_OUT | TERSE


@pytest.fixture(scope="module")
def made():
    """Each model once, with its inputs."""
    torch.manual_seed(0)
    return {name: make(name) for name in EVERY}


def rate(made, figures, with_inputs):
    """The share of labels that are right, and a line for each that is not."""
    every, wrong, sure = 0, [], {True: [], False: []}
    for name, labelled in figures.items():
        figure, right = parts(labelled)
        model, inputs = made[name]
        found = sb.match(model, figure, **(inputs if with_inputs else {}))
        every += len(right)
        labels = [row["label"] for row in found.table()]
        for label, named in zip(labels, right, strict=True):
            good = found.get(label) in named
            sure[good].append(found.confidence.get(label, 0.0))
            if not good:
                wrong.append(f"{name}: {label} is {found.get(label)}, not {min(named)}")
    return 1 - len(wrong) / every, wrong, sure


SETS = {"development": DEVELOPMENT, "held out": HELD_OUT, "terse": TERSE}


@pytest.mark.parametrize("figures", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("with_inputs", [True, False], ids=["a run", "parameters alone"])
def test_nine_of_ten_labels_are_right(made, figures, with_inputs):
    share, wrong, sure = rate(made, figures, with_inputs)
    assert share >= 0.9, wrong
    if sure[False]:
        mean = {good: sum(c) / len(c) for good, c in sure.items()}
        assert mean[True] > mean[False], "a wrong label is as sure as a right one"


def test_nine_of_ten_are_right_where_names_say_nothing(made, monkeypatch):
    """Neither class names nor attribute names: sizes, shapes and the order of calls."""
    monkeypatch.setattr(Part, "says", lambda self, *stems: False)
    monkeypatch.setattr(fit, "words_in_common", lambda box, part: 0.0)
    share, wrong, _ = rate(made, EVERY, with_inputs=True)
    assert share >= 0.9, wrong


def test_no_label_is_given_twice_and_confidence_is_a_share(made):
    for name, labelled in EVERY.items():
        model, inputs = made[name]
        found = sb.match(model, parts(labelled)[0], **inputs)
        modules = dict(model.named_modules())
        assert len(set(found.values())) == len(found), name
        assert set(found.values()) <= modules.keys()
        assert all(0 <= c <= 1 for c in found.confidence.values())


# ---- the library


def test_a_library_figure_names_its_paper():
    assert len(library.FIGURES) == 12
    for name, paper in names().items():
        assert "arXiv" in paper, name
        assert "figure" in paper, name


@pytest.mark.parametrize(
    ("figure", "model"),
    [(name, name) for name in ("vit", "clip", "llava", "whisper", "mixtral", "mamba", "vae", "dit")]
    + [("transformer", "bart"), ("gpt-2", "gpt2"), ("unet", "unet")],
)
def test_a_library_figure_fits_its_model_whole(made, figure, model):
    model, inputs = made[model]
    found = sb.match(model, figure, **inputs)
    assert found.unplaced == []


def test_step_video_with_and_without_a_run():
    model, inputs = step_video.made()
    right = {
        "patch embedding": "pos_embed",
        "adaLN-single": "adaln_single",
        "caption projection": "caption",
        "DiT block": "blocks.0",
        "norm before attention": "blocks.0.norm1",
        "3D self-attention": "blocks.0.attn1",
        "norm of the queries": "blocks.0.attn1.q_norm",
        "norm of the keys": "blocks.0.attn1.k_norm",
        "cross-attention to the text": "blocks.0.attn2",
        "norm before feed forward": "blocks.0.norm2",
        "feed forward": "blocks.0.ff",
        "last norm": "norm_out",
        "linear": "proj_out",
    }
    assert dict(sb.match(model, "step-video", *inputs)) == right | {
        "timestep embedding": "t_embedder"
    }
    alone = sb.match(model, "step-video")
    # without a run nothing says that this MLP reads a time
    assert dict(alone) == right
    assert alone.unplaced == ["timestep embedding"]
    assert [name for name, _ in alone.uncovered] == ["t_embedder"]
    assert "No module fits 'timestep embedding'." in str(alone)
    assert "No label covers t_embedder (1,008 parameters)." in str(alone)


def test_torch_transformer_on_figure_1_of_its_paper():
    model = nn.Transformer(32, 4, 2, 2, 80, batch_first=True)
    found = sb.match(model, "transformer", torch.randn(2, 7, 32), torch.randn(2, 5, 32))
    assert found["multi-head attention"] == "encoder.layers.0.self_attn"
    assert found["encoder-decoder attention"] == "decoder.layers.0.multihead_attn"
    assert found["feed forward"] == "encoder.layers.0.linear1"
    assert found.unplaced == ["input embedding", "linear and softmax"]  # it has none
    row = found.table()[5]
    assert row["module"] == "encoder.layers.0.linear1 + encoder.layers.0.linear2"
    assert row["parameters"] == 32 * 80 * 2 + 80 + 32


# ---- what it leaves, shows and refuses


def test_the_model_stays_as_it_is(made):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.norm(self.first(x)))

    model = Model()
    model.last.eval()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    found = sb.match(model, "first: linear, 4 -> h\nnorm: norm\nhead: head", torch.randn(5, 4))
    assert dict(found) == {"first": "first", "norm": "norm", "head": "last"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert [m.training for m in model.modules()] == [True, True, True, False]
    with pytest.raises(ValueError, match=r"does not run on these inputs \(RuntimeError: mat1"):
        sb.match(model, "first: linear", torch.randn(5, 3))
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_on_the_meta_device(made):
    model, inputs = make("whisper")
    model.to("meta")
    inputs = {name: value.to("meta") for name, value in inputs.items()}
    figure, right = parts(DEVELOPMENT["whisper"])
    found = sb.match(model, figure, **inputs)
    assert all(name in named for name, named in zip(found.values(), right, strict=True))


def test_the_table_says_what_the_trace_says(made):
    model, inputs = made["mixtral"]
    found = sb.match(model, "mixtral", **inputs)
    row = {row["label"]: row for row in found.table()}["router"]
    assert row["type"] == "MixtralTopKRouter"
    assert row["inputs"] == "float32[14, 32]"
    assert row["outputs"].startswith("float32[14, 5]")
    assert row["parameters"] == 5 * 32
    assert row["ms"] > 0
    head = str(found).splitlines()[1].split()
    assert head == "label module type inputs outputs parameters first ms confidence".split()  # noqa: SIM905
    assert "MixtralDecoderLayer × 2" in str(found)
    html = found._repr_html_()
    assert "<table>" in html and "arXiv 2401.04088" in html and "first ms" in html
    alone = sb.match(model, "mixtral").table()
    assert {r["inputs"] for r in alone} == {""}
    assert {r["ms"] for r in alone} == {None}


def test_a_box_that_the_model_lacks_is_said():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    found = sb.match(model, "words: embedding, vocab -> d\ncross-attention\nhead, again: head")
    assert dict(found) == {"words": "0", "head, again": "1"}
    assert found.unplaced == ["cross-attention"]
    with pytest.raises(KeyError, match="no module of this model is 'cross-attention'"):
        found["cross-attention"]


def test_sizes_decide_between_two_alike():
    model = nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Linear(8, 20), "c": nn.Linear(20, 40)})
    found = sb.match(model, "wide: linear, d -> 20\nnarrow: linear, d -> 12\nout: linear, h -> 2h")
    assert dict(found) == {"wide": "b", "narrow": "a", "out": "c"}
    assert dict(sb.match(nn.Linear(3, 4), "all: linear, 3 -> 4")) == {"all": ""}


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("vitt", r"no figure 'vitt' \(did you mean 'vit'\?\): give the text of one"),
        ("a: attenion", r"line 1 of the figure \('a: attenion'\) has no kind 'attenion' \(did you"),
        ("\n\na: mlp, d -> d^2", r"line 3 of the figure .* has the size 'd\^2': sizes are numbers"),
        ("a: mlp, d ->", r"line 1 of the figure .* has the size '': sizes are"),
        ("\ta: mlp\n", r"line 1 of the figure .* is indented by a tab: indent with spaces"),
        ("a: block\n    b: mlp\n  c: mlp", r"line 3 .* is indented by 2 spaces, which no line"),
        (": mlp", r"line 1 of the figure \(': mlp'\) has no label before its colon"),
        ("thing\nother", r"line 1 .* does not say what the box is: after a colon write one of"),
        ("# a title\n", r"the figure has no box: write one a line"),
        ("a: block x 0", r"line 1 .* is drawn zero times"),
    ],
)
def test_a_figure_that_cannot_be_read_is_told_in_a_sentence(figure, said):
    with pytest.raises(ValueError, match=said) as told:
        sb.match(nn.Linear(3, 4), figure)
    assert "\n" not in str(told.value)


def test_what_is_no_model_or_figure():
    with pytest.raises(TypeError, match=r"sb.match\(\) takes an nn.Module, not str"):
        sb.match("model", "vit")
    with pytest.raises(TypeError, match=r"sb.match\(\) takes a figure as text, not int"):
        sb.match(nn.Linear(3, 4), 3)


def test_the_format():
    title, boxes = read.read(
        "# a title\n\nembed: embedding, V -> d\nlayer: block x 6\n  Add & Norm\n  feed forward:"
        " mlp, d -> 4*d -> d\n  Add & Norm\nout: head × N, * -> 10"
    )
    assert title == "a title"
    every = [b for top in boxes for b in top.every()]
    assert [b.label for b in every] == [
        *("embed", "layer", "Add & Norm", "feed forward", "Add & Norm (2)", "out"),
    ]
    assert [b.kind for b in every] == ["embedding", "block", "norm", "mlp", "norm", "head"]
    assert every[3].dims == ((1, "d"), (4, "d"), (1, "d"))
    assert (every[1].repeats, every[5].repeats, every[5].dims) == (6, "N", ((1, "*"), (10, "")))
    assert len(boxes[1].inside) == 3
    (box,) = read.read("decoder layer x 12")[1]
    assert (box.label, box.kind, box.repeats) == ("decoder layer", "block", 12)


# ---- the figure with its boxes filled in


@pytest.fixture(scope="module")
def translator():
    torch.manual_seed(0)
    model = Translator(97, dim=64, heads=4, hidden=128, layers=2)
    source, target = torch.randint(97, (2, 7)), torch.randint(97, (2, 5))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield sb.match(model, FIGURE, source, target)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def drawn(found):
    """(svg of a match, label -> what stands in its box)."""
    shown = found.draw()._repr_html_()
    words, data = re.search(
        r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', shown
    ).groups()
    root = ElementTree.fromstring(base64.b64decode(data))
    groups = [g for g in root.iter(f"{SVG}g") if "data-box" in g.attrib]
    groups.sort(key=lambda g: int(g.get("data-box")))
    return words, root, [[t.text for t in g.iter(f"{SVG}text")] for g in groups]


SVG = "{http://www.w3.org/2000/svg}"


def test_every_box_of_the_paper_is_drawn_with_what_it_is(translator):
    assert translator.unplaced == ["softmax"]
    words, _, boxes = drawn(translator)
    assert len(boxes) == len(translator.table()) == 20
    label, facts, module, shapes = boxes[4]
    assert label == "multi-head attention" and shapes == "[2, 7, 64] → [2, 7, 64]"
    assert module == "transformer.encoder.layers.0.self_attn: MultiheadAttention"
    assert re.fullmatch(r"16,640 parameters · call \d+ · \d+\.\d\d ms", facts)
    assert boxes[3][0] == "encoder layer  × N = 2"
    assert boxes[6][2] == "transformer.encoder.layers.0.linear1 + linear2: Linear"
    assert boxes[19] == ["softmax", "no module of this model"]
    assert "linear: linear" in words and "softmax: no module" in words


def test_boxes_of_a_figure_do_not_overlap_and_hold_what_is_inside(translator):
    _, root, _ = drawn(translator)
    spots = []
    for g in root.iter(f"{SVG}g"):
        rect = next(g.iter(f"{SVG}rect"))
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        spots.append((x, y, x + w, y + h))
    for a, b in itertools.combinations(spots, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        inside = any(
            p[0] <= q[0] and p[1] <= q[1] and q[2] <= p[2] and q[3] <= p[3]
            for p, q in ((a, b), (b, a))
        )
        assert apart or inside, (a, b)
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(s[0] > 0 and s[1] > 0 and s[2] < width and s[3] < height for s in spots)


def test_a_box_knows_the_slices_of_its_modules(translator):
    data = payload(translator.draw()._repr_html_())
    names = {data["texts"][n] for track in data["tracks"] for n in track["text"]}
    modules = data["figure"]["modules"]
    assert modules[19] == [] and all(set(m) <= names for m in modules)
    first = "transformer.encoder.layers.0"
    assert modules[6] == [f"{first}.linear1", f"{first}.linear2"]


def test_without_a_run_the_figure_stands_alone_and_names_are_text():
    evil = nn.Sequential(nn.Linear(3, 5))
    found = sb.match(evil, "<script>alert(1)</script> & co: linear, 3 -> 5\nnothing: attention")
    shown = found.draw()._repr_html_()
    assert "<script" not in shown and "iframe" not in shown
    _, _, boxes = drawn(found)
    assert boxes[0][0] == "<script>alert(1)</script> & co" and boxes[0][3] == "not called"
    assert boxes[1] == ["nothing", "no module of this model"]
