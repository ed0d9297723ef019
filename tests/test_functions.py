"""Families of properties of a function: each tells a wrong answer from a right one."""

import pytest
import torch

from shardbook.checks.compare import random
from shardbook.checks.functions import called, placed, strided
from shardbook.checks.report import Report

X = random(3, 4)


def family(name, *calls, oracle=lambda x, by: x * by, **more):
    """Whether the family holds for an answer, and what it says if not."""

    def ask(answer):
        report = Report("x")
        getattr(report.function(answer, oracle), name)("p", *calls, hint="h", **more)
        (found,) = report.properties
        return found.detail

    return ask


def writes(x, by):
    return x.mul_(by)


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, x, by):
        self.calls += 1
        return x * by + (self.calls > 1)


@pytest.mark.parametrize(
    ("ask", "right", "wrong", "says"),
    [
        (family("value", (X, 2)), lambda x, by: x * by, lambda x, by: x, "for by=2 is off by"),
        (family("value", (X, 2)), lambda x, by: x + x, writes, "an input was changed for by=2"),
        (
            family("value", called("in rows", X, 2)),
            lambda x, by: x * by,
            writes,
            "an input was changed in rows",
        ),
        (
            family("value", *((y, 2) for y in strided(3, 4))),
            lambda x, by: x * by,
            lambda x, by: x.view(-1).mul(by).view(x.shape),
            "raised RuntimeError: view size",
        ),
        (
            family("view", (X,), oracle=lambda x: x.T),
            lambda x: x.T,
            lambda x: x.T.contiguous(),
            "lies in new memory",
        ),
        (
            family("copy", (X,), oracle=lambda x: x.T),
            lambda x: x.T.contiguous(),
            lambda x: x.T,
            "lies in the memory of an input",
        ),
        (
            family("dtypes", (X, 2), kinds=(torch.bfloat16, torch.int64)),
            lambda x, by: x * by,
            lambda x, by: x.float() * by,
            "is torch.float32, expected torch.bfloat16",
        ),
        (
            family("gradient", (X, 2)),
            lambda x, by: x * by,
            lambda x, by: x.detach() * by,
            "the result carries no gradient",
        ),
        (
            family("gradient", (X, 2)),
            lambda x, by: x * by,
            lambda x, by: x * (by - 1) + x.detach(),
            "the gradient of x for by=2 is off by",
        ),
        (
            family("no_grad", (X, 2)),
            lambda x, by: x * by,
            lambda x, by: x * by if torch.is_grad_enabled() else x,
            "off by",
        ),
        (family("again", (X, 2)), lambda x, by: x * by, Counts(), "off by 1"),
        (
            family("refuses", ((X, 0), "a factor of 0"), oracle=None),
            lambda x, by: [][::by],
            lambda x, by: x,
            "a factor of 0 was accepted",
        ),
    ],
)
def test_a_family_tells_wrong_from_right(ask, right, wrong, says):
    assert ask(right) == ""
    assert says in ask(wrong)


def test_placed_tensors_keep_their_strides_and_are_copies():
    expanded = random(3, 1).expand(3, 4)
    for x in [X, X.T, X[:, ::2], X[:0], expanded, random(1, 1)]:
        (moved,) = placed((x,))
        assert moved.stride() == x.stride() and torch.equal(moved.cpu(), x)
        assert not x.numel() or moved.data_ptr() != x.data_ptr()
