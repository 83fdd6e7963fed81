"""Writes `docs/lint.md` from the rules: `python -m keras_nanguard._lint.page > docs/lint.md`."""

from __future__ import annotations

from collections.abc import Iterable

from keras_nanguard._lint import RULES
from keras_nanguard._lint.rule import Rule

__all__ = ["page"]

_HEAD = """# Hazards that lint finds

`lint(model)` looks at a model before it is trained, `lint(model, x, y)` at its data too; on the command line
`keras-nanguard lint model.keras --data data.npz`. Each rule below comes with a program in which it finds something and
the same program put right. An **error** will go wrong, a **warning** may, a **note** is worth knowing; the report is
clean where there are only notes. `ignore=["no_clipping"]` leaves a rule out. The model is neither called nor changed.

This page is written from the rules themselves by `python -m keras_nanguard._lint.page`.

| rule | severity | hazard |
|---|---|---|
"""


def page(rules: Iterable[Rule] = RULES) -> str:
    """Return the page as Markdown."""
    rules = tuple(rules)
    rows = [f"| [`{rule.code}`](#{rule.code}) | {rule.severity} | {rule.title} |" for rule in rules]
    return _HEAD + "\n".join([*rows, *map(_section, rules)]) + "\n"


def _section(rule: Rule) -> str:
    return f"""
## {rule.code}

**{rule.title}** ({rule.severity}). {rule.why}

*Instead:* {rule.fix}

Found here:

```python
{rule.invalid.strip()}
```

and not here:

```python
{rule.valid.strip()}
```"""


if __name__ == "__main__":
    print(page(), end="")
