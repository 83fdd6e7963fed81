"""The error for policies of the form before this one. Imports no backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keras_nanguard._core.errors import PolicyError

__all__ = ["refuse"]

NOW = {
    "title": "leave it out, or write a comment",
    "checks": "`[loss_scale]`, `[statistics]`, `[divergence]` and `[[limits]]`",
    "layers": '`[[limits]]` with `layer = "GLOB"`',
    "good_after": "`verify_after`",
    "on": "`site`",
    "when": "leave it out",
    "unless": "list the causes under `cause`",
    "magnitude": "leave it out",
    "limit": "leave it out: `action_budget` limits each change",
    "otherwise": "`escalation`, or a separate rule with a larger `after`",
    "cooldown": "`after`",
    "reset_after": "leave it out",
    "enabled": "leave the rule out",
    "preset": "one of the current presets",
    "after": "a number of incidents in a row: `after = 3`",
}
"""What each word of the old form is written as now."""

FORM = """\
version = 2
escalation = ["skip", "skip", ["rollback", "lower_lr"], "stop"]   # first, second, ... bad step

[snapshot]
every = 100
verify_after = 10

[[rules]]
name = "bad data"
cause = ["input_nonfinite", "target_nonfinite"]
after = 5                                                         # in a row
do = "stop"
"""


def refuse(document: Mapping[str, Any], name: str) -> None:
    """Refuse a policy of version 1, and show the form of today.

    Raises:
        PolicyError: if it is one: by its version, or without one by its words.
    """
    version = document.get("version")
    words = dict(_old_words(document))
    if version != 1 and (version is not None or not words):
        return
    problems = [f"version: expected 2, received {version or 'a policy of version 1'}"]
    problems += [f"{path}: now {NOW[word]}" for path, word in words.items()]
    lines = "\n".join(f"  {line}" for line in problems)
    raise PolicyError(
        f"{name} has the form of version 1:\n{lines}\nThe new form:\n\n{FORM}", (*problems,)
    )


def _old_words(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and word of each field that only version 1 has."""
    yield from ((word, word) for word in ("title", "checks", "layers") if word in document)
    if document.get("preset") in ("none", "finetune", "strict-fp16"):
        yield "preset", "preset"
    snapshot, rules = document.get("snapshot"), document.get("rules")
    if isinstance(snapshot, Mapping) and "good_after" in snapshot:
        yield "snapshot.good_after", "good_after"
    for number, rule in enumerate(rules if isinstance(rules, (list, tuple)) else ()):
        if isinstance(rule, Mapping):
            old = {*NOW} - {"title", "checks", "layers", "good_after", "preset", "after"}
            yield from ((f"rules[{number}].{word}", word) for word in rule if word in old)
            if isinstance(rule.get("after"), Mapping):
                yield f"rules[{number}].after", "after"
