"""What checks are made of: verdicts on answers that misbehave, and comparisons that can fail."""

import re

import numpy as np
import pytest
import torch

import shardbook as sb
from shardbook.checks import communication, expert_parallel, tensor_parallel
from shardbook.checks import report as framework
from shardbook.checks.report import Report, Wrong, check, close, refuses, same, unchanged
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
    found = communication.ring_all_reduce.examine(lambda x: x)  # takes no group
    said = [p.detail for p in found.properties]
    assert "unexpected keyword argument 'group'" in said[0]
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
        (expected.nan_to_num(0.0), "off by inf"),
        (-expected, "off by"),
        (expected.double(), "float64, expected torch.float32"),
        (expected[0], "shape \\[2\\], expected \\[2, 2\\]"),
        (expected.tolist(), "list, expected a tensor"),
        (torch.full_like(expected, float("nan")), "off by inf"),
    ]:
        with pytest.raises(Wrong, match=says):
            close(other, expected, "it")
    with pytest.raises(Wrong, match="1 of 3 places"):
        close(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]), "it")
    close(torch.zeros(0, 3), torch.zeros(0, 3), "it")


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
    assert torch.equal(framework.random(3, 5), framework.random(3, 5))
    assert not torch.equal(framework.random(3, 5), framework.random(3, 5, seed=1))


def test_a_hang_ends_the_check():
    error = sb.RankError("rank 1 never came")
    error.hung = True
    report = Report("x")
    with pytest.raises(framework._Stop), report.property("p", hint="h"):
        raise error
    assert report.hint == "h" and "rank 1 never came" in report.properties[0].detail


def test_the_notebook_check_tells_progress(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(progress, "record_in_notebook", lambda *a: told.append(a[:3]))
    from shardbook.checks import tensors

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
    for judge in (expert_parallel.apply_capacity, tensor_parallel.copy_to_group):
        found = judge.examine(lambda *args, **options: None, first_only=True)
        assert found.status == "wrong"
        assert "came back as None: is a return missing?" in "\n".join(found.lines())
