"""What checks are made of: verdicts on answers that misbehave, and comparisons that can fail."""

import re

import numpy as np
import pytest
import torch

import shardbook as sb
from shardbook.chapters import exercises
from shardbook.checks import communication, expert_parallel, tensor_parallel, tensors
from shardbook.checks import report as framework
from shardbook.checks.compare import all_close, close, random, refuses, same, unchanged
from shardbook.checks.report import Report, check, checks_of
from shardbook.checks.wrong import Wrong, hints
from shardbook.notebook import progress


@check("double")
def double(answer, report):
    with report.property("doubles", hint="add x to itself"):
        same(answer(3), 6, "double(3)")
    with report.property("doubles tensors", hint="do not convert it"):
        close(answer(torch.tensor([1.5])), torch.tensor([3.0]), "double([1.5])")


def verdict(answer, **options):
    return double.examine(answer, **options)


def test_right_answers_print_nothing_of_the_machine(capsys):
    assert verdict(lambda x: x + x).status == "right"
    double(lambda x: x + x)
    assert capsys.readouterr().out == "✓ doubles\n✓ doubles tensors\n"


def test_a_wrong_answer_gets_the_first_hint_and_all_properties():
    found = verdict(lambda x: x + 3)
    assert found.status == "wrong" and found.hint == "do not convert it"
    assert [p.ok for p in found.properties] == [True, False]
    assert "off by 0.5" in found.lines()[1]
    first = verdict(lambda x: x, first_only=True)
    assert len(first.properties) == 1 and first.hint == "add x to itself"


def test_lines_that_need_an_earlier_one_say_so():
    takes_no_group = communication.ring_all_reduce.examine(lambda x: x)
    said = [p.detail for p in takes_no_group.properties]
    first, _, then = said[0].partition("; then, ")
    assert "rank 0 of 4 is off by" in first
    assert "in the group of ranks 0, 2 and 3" in then
    assert "unexpected keyword argument 'group'" in then
    assert said[1:5] == ["not examined, a line above failed"] * 4


def raises(error):
    def answer(x):
        raise error

    return answer


class Odd(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class AlwaysEqual:
    def __eq__(self, other):
        return True

    __hash__ = None


class NeverCompared:
    def __eq__(self, other):
        raise RuntimeError("compare me not")

    __hash__ = None


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (raises(SystemExit(0)), "SystemExit"),
        (raises(Odd("odd")), "Odd: odd"),
        (raises(GeneratorExit()), "GeneratorExit"),
        (raises(Mute()), "Mute: \\(no message\\)"),
        (raises(ValueError("\ud800")), "ValueError"),
        (raises(RuntimeError("x" * 1_000_000)), "1,000,0.. characters"),
        (raises(NotImplementedError("Could not run 'aten::x' with arguments")), "aten::x"),
        (torch.nn.Module(), 'missing the required "forward"'),
        (lambda x: None, "None, expected 6"),
        (lambda x: AlwaysEqual(), "AlwaysEqual"),
        (lambda x: NeverCompared(), "NeverCompared"),
        (lambda x: [6] * 1000, "…"),
        (lambda: 6, "TypeError"),
        (3, "TypeError"),
        (None, "TypeError"),
    ],
)
def test_answers_that_misbehave_are_wrong(answer, says, capsys):
    found = verdict(answer)
    text = "\n".join(found.lines())
    assert found.status == "wrong" and found.hint
    assert re.search(says, text), text
    assert len(text) < 10_000
    double(answer)  # what it prints can be printed
    assert "✗" in capsys.readouterr().out.encode().decode()


def test_the_keyboard_is_obeyed():
    with pytest.raises(KeyboardInterrupt):
        verdict(raises(KeyboardInterrupt()))


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError(),
        NotImplementedError("todo"),
        NotImplementedError("exercise 3: double is not written yet"),
    ],
)
def test_what_is_not_written_is_not_wrong(error):
    found = verdict(raises(error))
    assert (found.status, found.properties, found.hint) == ("not written", [], "")
    assert found.lines() == ["✎ double is not written yet"]


def on_rank(answer):
    return answer(3)


@check("ranked")
def ranked(answer, report):
    with report.property("doubles on every rank", hint="each rank on its own"):
        same(report.ranks(on_rank, 2, answer), [6, 6], "the values")


def wrong_on_one_rank(x):
    same(x + torch.distributed.get_rank(), x, "what rank 1 has")
    return 6


def test_verdicts_of_ranks():
    assert ranked.examine(lambda x: 2 * x).status == "right"
    assert ranked.examine(raises(NotImplementedError("todo"))).status == "not written"
    assert ranked.examine(raises(NotImplementedError("Could not run 'aten::x'"))).status == "wrong"
    found = ranked.examine(raises(SystemExit(1)))
    assert found.status == "wrong" and found.hint
    found = ranked.examine(wrong_on_one_rank)
    assert "what rank 1 has is 4, expected 3" in found.lines()[0], (
        "a Wrong on a rank is its message"
    )


def test_a_check_that_raises_outside_its_properties():
    @check("x")
    def outside(answer, report):
        answer()
        with report.property("p"):
            pass

    found = outside.examine(raises(ValueError("no")))
    assert found.status == "wrong" and found.hint and not found.properties[0].ok

    @check("nothing")
    def nothing(answer, report):
        pass

    with pytest.raises(RuntimeError, match="tested nothing"):
        nothing.examine(None)


def test_close_fails_for_everything_that_differs():
    expected = torch.tensor([[1.0, 200.0], [float("inf"), float("nan")]])
    close(expected.clone(), expected, "it")
    close(expected + torch.tensor([[5e-6, 1e-3], [0, 0]]), expected, "it")  # 1e-3 of 200
    for other, says in [
        (expected + 1e-3, "off by"),
        (expected.nan_to_num(0.0), "at \\[1, 0\\], expected inf"),
        (-expected, "-inf at \\[1, 0\\], expected inf"),
        (-expected.nan_to_num(7.0).clamp(max=300), "at \\[1, 0\\], expected inf"),
        (expected.double(), "float64, expected torch.float32"),
        (expected[0], "shape \\[2\\], expected \\[2, 2\\]"),
        (expected.tolist(), "list, expected a tensor"),
        (torch.full_like(expected, float("nan")), "nan at \\[0, 0\\], expected 1"),
        (expected.where(expected != 1, float("inf")), "is inf at \\[0, 0\\], expected 1"),
        (None, "None, expected a tensor: is a return missing"),
    ]:
        with pytest.raises(Wrong, match=says):
            close(other, expected, "it")
    with pytest.raises(Wrong, match="1 of 3 places"):
        close(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]), "it")
    close(torch.zeros(0, 3), torch.zeros(0, 3), "it")


@pytest.mark.parametrize(
    ("what", "verb"),
    [
        ("the tokens", "are"),
        ("the loss of the tokens", "is"),
        ("the logits for k=2", "are"),
        ("for strides (12, 1) the result", "is"),
        ("the gradient of the weights on rank 1 of 2", "is"),
        ("dq and dk on rank 1", "are"),
        ("the bias", "is"),
        ("lse for 300", "is"),
        ("weights for k=2", "are"),
    ],
)
def test_words_agree_in_number(what, verb):
    with pytest.raises(Wrong, match=f"^{re.escape(what)} {verb} off by 1"):
        close(torch.ones(2), torch.zeros(2), what)


def test_what_holds_and_what_does_not_is_told():
    one, two = torch.zeros(2), torch.ones(2)
    all_close({"out": (one, one), "dq": (two, two)})
    with pytest.raises(Wrong) as found:
        all_close(
            {"out": (one, one), "dq": (two, two), "dk": (one, two), "dv": (None, two)}, "on rank 1"
        )
    assert str(found.value) == (
        "dk on rank 1 is off by 1 at [0] (tolerance 1e-05); dv is wrong too; out and dq hold"
    )


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        (6, 6, True),
        (6.0, 6, True),
        (np.int64(6), 6, True),
        (torch.Size([2, 3]), (2, 3), True),
        ([2, 3], (2, 3), False),
        ("6", 6, False),
        (None, 0, False),
        (torch.tensor(6), 6, False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
    ],
)
def test_same(actual, expected, equal):
    if equal:
        same(actual, expected, "it")
    else:
        with pytest.raises(Wrong, match="it is"):
            same(actual, expected, "it")


def test_refuses_wants_the_error_and_a_sentence():
    refuses(raises(ValueError("7 rows do not divide by 2")), 1, what="7 rows")
    for answer, says in [
        (lambda x: x, "was accepted"),
        (raises(ValueError()), "has no message"),
        (raises(ValueError("no")), "has the message 'no', too short"),
        (raises(TypeError("a long enough message")), "raised TypeError"),
    ]:
        with pytest.raises(Wrong, match=says):
            refuses(answer, 1, what="7 rows")


def test_unchanged_sees_writes():
    x = torch.tensor([1.0, float("nan")])
    with unchanged("it", x):
        x + 1
    with pytest.raises(Wrong, match="changed its input"), unchanged("it", x):
        x[0] = 2


def test_random_data_is_the_same_everywhere():
    assert torch.equal(random(3, 5), random(3, 5))
    assert not torch.equal(random(3, 5), random(3, 5, seed=1))


def test_a_hang_ends_the_check():
    error = sb.RankError("rank 1 never came")
    error.hung = True
    report = Report("x")
    with pytest.raises(framework._Stop), report.property("p", hint="h"):
        raise error
    assert report.hint == "h" and "rank 1 never came" in report.properties[0].detail


def test_each_failure_gets_the_hint_for_its_kind():
    @check("shifted")
    def shifted(answer, report):
        by_kind = hints("add 1", shape="keep the shape", dtype="no cast", hang="wait for it")
        with report.property("adds 1", hint=by_kind):
            close(answer(torch.zeros(2)), torch.ones(2), "the result")
        with report.property("gives the sizes", hint="ask for the shape"):
            same(answer(torch.zeros(2)).shape, (2,), "the shape")

    cases = [
        (lambda x: x, "add 1"),
        (lambda x: x[:1] + 1, "keep the shape"),
        (lambda x: x.double() + 1, "no cast"),
        (lambda x: None, "a function without a return gives None"),
        (raises(TypeError("f() takes no arguments of mine")), "add 1"),
    ]
    for answer, hint in cases:
        assert shifted.examine(answer).properties[0].hint.startswith(hint)
    found = tensors.contiguous_strides.examine(lambda: None).hint
    assert found.startswith("it is called with the arguments of the exercise")
    lines = shifted.examine(lambda x: x[:1]).lines()
    assert [line.split(":")[0] for line in lines] == [
        *("✗ adds 1", "  hint", "✗ gives the sizes", "  hint")
    ]
    with pytest.raises(Wrong) as found:
        same([3, 1], (3, 1), "the strides")
    assert found.value.hint == "the entries are right: return a tuple, not a list"


def test_the_line_of_the_answer_is_told_and_none_of_ours():
    def answer(x):
        return torch.stack([x, torch.zeros(3)])

    at = f"(test_framework.py:{answer.__code__.co_firstlineno + 1})"
    assert verdict(lambda x: 6 if x == 3 else answer(x)).properties[1].detail.endswith(at)

    def boom(*args, **options):
        raise ValueError("no")

    for chapters_check in (tensor_parallel.copy_to_group, communication.ring_all_gather):
        found = chapters_check.examine(boom, first_only=True)
        assert re.fullmatch(
            r"(for .*: )?ranks 0-3 raised ValueError: no \(test_framework.py:\d+\)\n"
            r"    test_framework.py:\d+ in boom: raise ValueError.*",
            found.properties[0].detail,
        )
        (found,) = chapters_check.examine(lambda: 6, first_only=True).properties
        assert re.fullmatch(
            r"(for .*: )?ranks? [0-3-]+ raised TypeError: .*<lambda>\(\) [^\n(]*",
            found.detail.split("\n")[0],
        )
        assert found.hint.startswith("it is called with the arguments")


def test_a_run_that_failed_counts_once():
    @check("once")
    def once(answer, report):
        for name in ("first", "second"):
            with report.property(name, hint=f"the {name} hint"):
                report.ranks(on_rank, 2, answer)
        with report.property("another run", hint="another hint"):
            report.ranks(on_rank_twice, 2, answer, [1, 2])

    found = once.examine(raises(ValueError("no")))
    assert [p.status for p in found.properties] == ["failed", "not examined", "failed"]
    assert [p.ok for p in found.properties] == [False] * 3 and found.status == "wrong"
    assert "– second: not examined, a line above failed" in found.lines()
    assert "the second hint" not in "\n".join(found.lines())
    assert once.examine(lambda x: x).status == "right"


def on_rank_twice(answer, values):
    return [answer(v) for v in values]


def test_a_run_is_made_once_for_a_case():
    report, made = Report("x"), []
    report._run = lambda *args, **kwargs: made.append(args) or [1]
    for _ in range(2):
        report.ranks(on_rank, 2, double, [1, "a"])
        report.ranks(on_rank, 2, double, [1, "b"])
        report.ranks(on_rank, 4, double, [1, "b"])
    assert len(made) == 3


def test_a_folder_of_checks_is_one_module():
    names = set(checks_of(tensor_parallel))
    assert set(exercises(22)) == names and tensor_parallel.row_parallel_linear.exercise in names


def test_the_notebook_check_tells_progress(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(progress, "record_in_notebook", lambda *a: told.append(a[:3]))
    tensors.contiguous_strides(lambda shape: None)
    assert told == [(11, "contiguous_strides", "wrong")]


@pytest.mark.parametrize(
    ("predicted", "measured", "says"),
    [
        (None, 4, "write your prediction first"),
        (4096, 4096.0, "predicted 4,096 B, measured 4,096 B ✓ they agree"),
        (0.27273, 3 / 11, "✓"),
        (0.25, 3 / 11, "✗ they differ"),
        ([1, 2.0], (1, 2), "✓"),
        ([1, 2], [1, 2, 3], "✗"),
        (True, False, "✗"),
        (torch.tensor([1, 2]), [1, 2], "✓"),
        (torch.tensor([1, 2]), np.array([1, 3]), "✗"),
        (float("inf"), float("inf"), "✓"),
        ("rank 3", "rank 3", "✓"),
    ],
)
def test_predict(predicted, measured, says, capsys):
    sb.predict("bytes", predicted, measured, unit="B")
    assert says in capsys.readouterr().out


def test_an_answer_without_return_is_told_so():
    for judge in (expert_parallel.route_top_k, tensor_parallel.copy_to_group):
        found = judge.examine(lambda *args, **options: None, first_only=True)
        assert found.status == "wrong"
        assert "came back as None: is a return missing?" in "\n".join(found.lines())
