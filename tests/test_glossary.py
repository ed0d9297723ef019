"""GLOSSARY.md names chapters and parts of the library that exist."""

import importlib
import re
from pathlib import Path

import pytest

from shardbook.chapters import CHAPTERS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "GLOSSARY.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(shardbook\.[\w.]+)`", TEXT))))
def test_what_it_names_is_there(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_its_chapters_are_chapters():
    said = re.findall(r"chapters? ((?:\d\d(?:, | and )?)+)", TEXT)
    found = {int(number) for text in said for number in re.findall(r"\d\d", text)}
    assert len(found) >= 8
    assert found <= set(CHAPTERS)


def test_every_row_has_all_its_columns():
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert len({len(row) for row in rows}) == 1
        first = [row[0].strip() for row in rows[2:]]
        assert all(first)
        assert len(set(first)) == len(first), "a symbol or word stands twice"


def test_readers_find_it():
    assert "GLOSSARY.md" in (ROOT / "README.md").read_text()
    assert "GLOSSARY.md" in (ROOT / "book" / "00_start_here" / "lesson.py").read_text()
