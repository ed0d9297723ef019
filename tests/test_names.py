"""Which names code reads and binds: what the checks of a notebook and `%%ranks` go by."""

import pytest

from shardbook.checks.statements import closure, futures, statements
from shardbook.notebook.names import binds, reads


@pytest.mark.parametrize(
    ("source", "read", "bound"),
    [
        ("def f(x, y=D):\n    a = [i for i in x if i < LIMIT]\n    return a, y", "D LIMIT", "f"),
        ("def f():\n    shard = 1\n    shard += 1\n    return lambda q: q + shard", "", "f"),
        ("def f():\n    global n\n    n += 1", "n", "f n"),
        ("def f(x: Tensor) -> Tensor:\n    import os\n    return os", "Tensor", "f"),
        ("class A(Base):\n    x = 1\n    def f(self): return helper(self.y)", "Base helper", "A"),
        ("class A:\n    x = x", "x", "A"),
        ("@jit\ndef f(): pass", "jit", "f"),
        ("x += 1", "x", "x"),
        ("a = [k for k in y]", "y", "a"),
        ("m.a[0].b = 3", "m", "m"),
        ("import a.b, c.d as e\nfrom q import *", "", "a e *"),
        ("if (n := 3) > k: pass", "k", "n"),
        ("with open_it(f) as (a, b.c): pass", "b f open_it", "a b"),
    ],
)
def test_locals_are_neither_read_nor_bound(source, read, bound):
    assert reads(source) == set(read.split())
    assert binds(source) == set(bound.split())


def needed(parts, name):
    found = statements(parts)
    return [(found[i].title, found[i].line) for i in closure(found, name)[0]]


def test_only_what_an_exercise_needs_is_run():
    parts = [
        ("cell 1", "import torch as t\nfrom math import *\nx = 1"),
        ("cell 2", "def helper(n):\n    return n + BASE"),
        ("cell 3", "BASE = 3\nBASE += 1\nother = explode()"),
        ("cell 4", "class Mine:\n    def go(self):\n        return helper(t.ones(2))"),
        ("cell 5", "Mine.extra = 5\nMine().go()\nfor y in range(9): pass\ndel BASE"),
    ]
    assert needed(parts, "Mine") == [
        ("cell 1", 1),
        ("cell 1", 2),
        ("cell 2", 1),
        ("cell 3", 1),
        ("cell 3", 2),
        ("cell 4", 1),
        ("cell 5", 1),
    ]


def test_a_demo_that_binds_the_name_of_a_local_is_not_needed():
    parts = [
        ("cell 1", "def shard(x, n):\n    while True: pass"),
        ("cell 2", "pieces = shard(x, 4)\nfor i in range(10**12): total = i"),
        ("cell 3", "TABLE = {}\nfor i in range(3):\n    TABLE[i] = i"),
        (
            "cell 4",
            "def can_view(x):\n    pieces = [x]\n    total = 0\n    for i in pieces: total += i\n"
            "    return total, TABLE",
        ),
    ]
    assert needed(parts, "can_view") == [("cell 3", 1), ("cell 3", 2), ("cell 4", 1)]


def test_lines_are_those_of_the_cell_and_decorators_count():
    parts = [
        ("cell 1", "%%time\n\nimport functools\n\n@functools.cache\ndef f():\n    return 1"),
        ("cell 2", "%load_ext autoreload\nfrom __future__ import annotations\ng = f"),
    ]
    found = statements(parts)
    assert needed(parts, "g") == [("cell 1", 3), ("cell 1", 5), ("cell 2", 3)]
    assert futures(found) != 0


def test_a_cell_that_is_no_python_says_so_for_what_it_means_to_define():
    (cell,) = statements([("cell 7", "import x\ndef shard(x):\n    return (x\nlimit = 3\n")])
    assert cell.binds == {"shard", "limit"} and cell.node is None
    assert "never closed" in str(cell.error) and cell.where == "cell 7, line 3"


@pytest.mark.parametrize("terms", [900, 3000])
def test_a_long_sum_is_read_or_told(terms):
    (statement,) = statements([("cell 1", "total = " + " + ".join(["x"] * terms))])
    assert statement.error or (statement.reads, statement.binds) == ({"x"}, {"total"})
