"""Every Python block of README.md and docs/ runs, in the order a reader meets it.

The blocks of one page share one namespace. A block that cannot run here is opted out by the line
``<!-- not run: REASON -->`` right above it.
"""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from opake_lightning.dpsgd.clipping import _tape

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if page.exists() and "_build" not in page.parts
)
OPT_OUT = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->\s*", re.DOTALL)
PYTHON = {"python", "py", "python3"}
CODE_DIRECTIVE = re.compile(r"\{(code-block|code|sourcecode|code-cell)\}\s*(?P<language>\S*)")


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, counted from 1
    code: str
    reason: str | None  # why it is not run


def blocks(text: str, offset: int = 0) -> list[Block]:
    found: list[Block] = []
    before = None
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map is not None:
            line = offset + token.map[0] + 1  # of the fence itself
            directive = CODE_DIRECTIVE.match(token.info.strip())
            language = directive["language"] if directive else token.info.strip().partition(" ")[0]
            if language in {"pycon", "ipython"}:
                raise ValueError(f"line {line}: write the block as `python`, so that it runs")
            if language in PYTHON:
                opt_out = OPT_OUT.fullmatch(before.content) if before is not None else None
                found.append(Block(line + 1, token.content, opt_out["reason"] if opt_out else None))
            elif language.startswith("{") and not directive:
                found += blocks(token.content, line)
        before = token if token.type == "html_block" else None
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page.read_text(encoding="utf-8"))
    for block in found:
        assert block.reason != "", f"{page.name}:{block.line} is opted out without a reason"
    # A module of its own: dataclasses, pickle and inspect look classes up by their module.
    module = types.ModuleType(f"snippets_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    # What a page adds to the rules of clipping ends with it.
    for rules in ("RULES", "ROW_WISE"):
        monkeypatch.setattr(_tape, rules, getattr(_tape, rules).copy())
    for block in found:
        if block.reason is None:
            # The page's name and line numbers, so that a traceback points into the page.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            exec(code, module.__dict__)


def test_blocks_are_found_wherever_markdown_allows_them() -> None:
    text = (
        "# Page\n\n```python\na = 1\n```\n\n- item\n\n  ```py\n  b = 2\n  ```\n\n"
        "````{note}\n```{code-block} python\nc = 3\n```\n````\n\n"
        "```bash\nrm\n```\n\n```text\n```python\n```\n\n"
        "<!-- not run: needs four GPUs -->\n\n```python\nd = 4\n```\n"
    )
    assert [(b.line, b.code.strip(), b.reason) for b in blocks(text)] == [
        (4, "a = 1", None),
        (10, "b = 2", None),
        (15, "c = 3", None),
        (30, "d = 4", "needs four GPUs"),
    ]


def test_an_opt_out_belongs_to_the_next_block_only() -> None:
    text = (
        "<!-- not run: x -->\n```python\na\n```\n\n```python\nb\n```\n\n"
        "<!-- not run: -->\n```python\nc\n```\n"
    )
    assert [b.reason for b in blocks(text)] == ["x", None, ""]


def test_a_prompt_block_is_refused() -> None:
    with pytest.raises(ValueError, match="line 3: write the block as `python`"):
        blocks("\n\n```pycon\n>>> 1\n```\n")
