"""Every rule flags what it must, at its line, and leaves near-identical code alone."""

import pytest

from shardbook.port.rules import RULES
from shardbook.port.scan import scan_source

from .cases import CLEAN, FLAGGED

flagged = [pytest.param(r, c, id=f"{r}-{i}") for r, cs in FLAGGED.items() for i, c in enumerate(cs)]
clean = [pytest.param(r, c, id=f"{r}-{i}") for r, cs in CLEAN.items() for i, c in enumerate(cs)]


@pytest.mark.parametrize(("rule", "code"), flagged)
def test_flags(rule, code):
    source = "import torch\n" + code + "\n"
    expected = {i for i, line in enumerate(source.splitlines(), 1) if line.endswith("# !")}
    found = {f.line for f in scan_source(source) if f.rule == rule}
    assert found == expected, [(f.line, f.rule) for f in scan_source(source)]


@pytest.mark.parametrize(("rule", "code"), clean)
def test_leaves_alone(rule, code):
    found = [(f.line, f.rule) for f in scan_source("import torch\n" + code + "\n")]
    assert not found


def test_every_rule_has_both_kinds_of_tests():
    known = set(RULES) - {"unreadable"}
    assert set(FLAGGED) == known
    assert set(CLEAN) == known
