"""Every check rejects its wrong answers with a hint at the fault and accepts the right ones."""

import importlib
import pkgutil
import re

import pytest

from shardbook.chapters import CHAPTERS
from shardbook.checks.report import checks_of
from tests import wrong_answers

for found in pkgutil.iter_modules(wrong_answers.__path__):
    importlib.import_module(f"tests.wrong_answers.{found.name}")


def checks(chapter: int) -> dict:
    return checks_of(importlib.import_module(f"shardbook.checks.{CHAPTERS[chapter]}"))


def is_the_reference(answer, says) -> bool:
    """The library's own answer: solutions/ runs its check and stores the ✓ (test_book.py)."""
    return says is None and getattr(answer, "__module__", "").startswith("shardbook.")


@pytest.mark.parametrize(
    ("chapter", "exercise", "answer", "says"),
    [
        pytest.param(
            *(chapter, exercise, answer, says),
            id=f"{chapter}-{exercise}-{name}",
            marks=() if says is None else pytest.mark.wrong_answer,
        )
        for chapter, exercise, name, answer, says in wrong_answers.ANSWERS
        if not is_the_reference(answer, says)
    ],
)
def test_verdict(chapter, exercise, answer, says):
    verdict = checks(chapter)[exercise].examine(answer, first_only=says is not None)
    text = "\n".join(verdict.lines())
    assert verdict.status == ("right" if says is None else "wrong"), text
    if says is not None:
        assert verdict.hint, "a wrong answer gets a hint:\n" + text
        assert re.search(says, text, re.IGNORECASE), f"/{says}/ not in:\n{text}"


CHAPTERS_WITH_ANSWERS = sorted({chapter for chapter, *_ in wrong_answers.ANSWERS})


@pytest.mark.parametrize("chapter", CHAPTERS_WITH_ANSWERS)
def test_every_exercise_has_five_wrong_answers_and_another_right_one(chapter):
    for exercise in checks(chapter):
        mine = [(a, s) for c, e, _, a, s in wrong_answers.ANSWERS if (c, e) == (chapter, exercise)]
        assert sum(says is not None for _, says in mine) >= 5, exercise
        assert any(says is None and not is_the_reference(a, says) for a, says in mine), exercise


@pytest.mark.parametrize("chapter", [21, 22, 25, 32])
def test_a_check_is_called_by_the_name_of_its_class_too(chapter):
    module = importlib.import_module(f"shardbook.checks.{CHAPTERS[chapter]}")
    for exercise, examined in checks(chapter).items():
        assert getattr(module, exercise) is examined
