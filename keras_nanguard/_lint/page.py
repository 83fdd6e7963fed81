"""Generates `docs/lint.md` from the rules: `python -m keras_nanguard._lint.page > docs/lint.md`."""

from __future__ import annotations

from collections.abc import Iterable

from keras_nanguard._lint import RULES
from keras_nanguard._lint.rule import Rule

__all__ = ["page"]

_HEAD = """# Hazards that lint finds

`lint(model)` checks a model before it is trained, `lint(model, x, y)` its data, too; on the command
line `keras-nanguard lint model.keras --data data.npz`. Each rule below has a sample program with
the hazard and the corrected program. An **error** certainly causes a failure, a **warning** may
cause one, a **note** is for information; the report is `ok` if there are only notes.
`ignore=["no_clipping"]` disables a rule. The model is neither called nor changed.

This page is generated from the rules by `python -m keras_nanguard._lint.page`.

<!-- run by: tests/lint/test_lint.py -->

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
