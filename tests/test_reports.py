"""The page of reports names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reports.md"
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`")
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_rows_are_numbered():
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) == PAGE.read_text(encoding="utf-8").count("\n| ") - 5  # the headings


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_report_has_a_test_or_a_page_that_says_no(row):
    _, _, here, test = row
    if test == "none; documented":
        (page,) = re.findall(r"\]\(([\w-]+\.md)", here)
        assert (PAGE.parent / page).exists()
        return
    named = NAMED.findall(test)
    assert len(named) == test.count("::")
    for file, function, case in named:
        source = (TESTS / file).read_text(encoding="utf-8")
        assert function in {f.name for f in ast.parse(source).body if hasattr(f, "name")}
        assert f'"{case}"' in source or not case
