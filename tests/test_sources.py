"""book/sources.md lists what the book cites: nothing missing, nothing unused, places up to date."""

import re

from book import sources

HEAD = f"{sources.HEADER}\n|---|---|---|---|\n"


def test_every_citation_has_a_row_and_every_row_is_cited():
    missing, unused = sources.missing_and_unused(sources.TABLE.read_text(), sources.cited())
    assert not missing, f"look these up and add rows to book/sources.md: {missing}"
    assert not unused, f"take these rows out of book/sources.md: {unused}"


def test_the_places_are_those_of_the_book():
    text = sources.TABLE.read_text()
    assert sources.refreshed(text, sources.cited()) == text, "run python book/sources.py"


def test_rows_are_complete():
    text = sources.TABLE.read_text()
    rows = sources.rows(text)
    assert len(rows) == sum(line.startswith("| ") for line in text.splitlines()) - 1  # no row twice
    for row in rows.values():
        assert len(row) == 4 and row[1], row
        assert row[2] == "not looked up" or re.fullmatch(r"\d{4}-\d\d-\d\d", row[2]), row


def test_citations_are_found_in_every_form():
    text = """# Papers: (arXiv 2212.09748), [2006.11239](https://arxiv.org/abs/2006.11239), Switch
    # (2101.03961); issues: [xDiT](https://github.com/xdit-project/xDiT/pull/454), other/name#7;
    # pages: [view](https://docs.pytorch.org/view.html). Not: 3.14159, 2401.5, http://localhost:1"""
    assert sources.citations(text) == {
        "arXiv 2212.09748",
        "arXiv 2006.11239",
        "arXiv 2101.03961",
        "xdit-project/xDiT#454",
        "other/name#7",
        "https://docs.pytorch.org/view.html",
    }


def test_a_missing_and_an_unused_row_are_named():
    table = HEAD + "| a/b#1 | old | 2026-01-01 | |\n| arXiv 2212.09748 | DiT | not looked up | |\n"
    where = {
        "c/d#2": ["13"],
        "arXiv 2212.09748": ["43", "44"],
        "arXiv 1711.05101": ["shardbook/x.py"],
    }
    assert sources.missing_and_unused(table, where) == (["c/d#2"], ["a/b#1"])
    assert "| DiT | not looked up | 43, 44 |" in sources.refreshed(table, where)
