"""Every Python block of the docs runs, and prints the output on the page."""

import os
from pathlib import Path

import pytest
from support.docs_tools import load

ROOT = Path(__file__).parents[2]


run_pages = load("run_pages")
ALL = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
HERE = [p for p in ALL if run_pages.backend_of(p.read_text(encoding="utf-8")) == os.environ["KERAS_BACKEND"]]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", HERE, ids=_name)
def test_page(page):
    """The blocks of a page run in order, and their output is that on the page."""
    found = run_pages.problems(page)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_blocks_that_do_not_run_have_a_reason(page):
    assert run_pages.without_reason(page.read_text(encoding="utf-8")) == []


PAGE = """# A page

<!-- run first:
hidden = 2
print("not shown")
-->

```python
print("step", hidden, 0.12345)
```
```text
step 2 0.124
```

- in a list

  ```python
  print("a", "b", sep="\\n")
  ```

  ```text
  a
  ...
  ```
"""


@pytest.mark.requires_backend("tensorflow", reason="the sample page is one of TensorFlow")
def test_the_tool_compares(tmp_path):
    """A page with its real output passes; one with another count, text or number does not."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert run_pages.problems(page) == []
    for wrong in ("step 3 0.124", "step 2 0.13", "stop 2 0.124", "step 2 0.124\nand more"):
        page.write_text(PAGE.replace("step 2 0.124", wrong))
        assert len(run_pages.problems(page)) == 1
        run_pages.main(["--write", str(page)])
        assert page.read_text() == PAGE.replace("step 2 0.124", "step 2 0.12345")
