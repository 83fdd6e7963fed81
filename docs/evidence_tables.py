"""Write the small tables of docs/evidence.md from the full tables of the campaigns, in campaigns/results.

    python docs/evidence_tables.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from campaigns import pages  # noqa: E402

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "campaigns" / "results"
NUMBER = re.compile(r"[\d,]+")


def raw(campaign: str, table: str) -> list[list[str]]:
    """Return the rows of a full table."""
    return pages.rows(pages.read(RESULTS / f"{campaign}.md", table))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table of Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def numbers(cell: str) -> list[int]:
    """Return the whole numbers of a cell: `**7** of 1,000` has 7 and 1000."""
    return [int(found.replace(",", "")) for found in NUMBER.findall(cell)]


# The fault campaign

STATE = ("weights", "statistics", "slots", "loss_scale")
FAULTS: dict[str, Callable[[str, str], bool]] = {
    "NaN, Inf or 3.4e38 in inputs or targets": lambda way, site: site in ("inputs", "targets"),
    "3.4e38 in loss, gradients, weights, statistics or slots": lambda way, site: way == "`inject`: 3.4e38 in loss, gradients or state",
    "NaN or Inf in loss or gradients": lambda way, site: site in ("loss", "gradients"),
    "NaN or Inf in weights, statistics or slots, any in the loss scale": lambda way, site: way == "`inject`" and site in STATE,
    "a flipped bit that leaves NaN or Inf": lambda way, site: way.endswith("NaN or Inf"),
    "a flipped bit that leaves another number": lambda way, site: way.startswith("a bit"),
}
"""The groups of the small table, and which rows of the full one belong to each."""


def faults() -> str:
    """Return the faults in six groups."""
    lines = []
    known = [cells for cells in raw("campaign", "faults") if cells[0] != "**all**"]
    for name, belongs in FAULTS.items():
        group = [cells for cells in known if belongs(cells[0], cells[1])]
        known = [cells for cells in known if cells not in group]
        count, due = _sum(group, 2), _sum(group, 3)
        seen, same, right, within = (_shares(group, column) for column in (4, 5, 6, 8))
        none = due - right[1]
        lines.append([name, f"{count:,}", *map(_of, (seen, same, right)), none if due else "", _of(within)])
    if known:
        raise SystemExit(f"Expected every row of the fault campaign in a group. Received: {known}.")
    head = ["fault", "faults", "seen in their step", "same bits as without", "cause right", "without an incident", "within a point"]
    return table(head, lines)


def _sum(rows: Iterable[list[str]], column: int) -> int:
    return sum(numbers(cells[column])[0] for cells in rows if cells[column])


def _shares(rows: Iterable[list[str]], column: int) -> tuple[int, int]:
    """Return count and total: a cell has one number if both are equal."""
    found = [numbers(cells[column]) for cells in rows if cells[column]]
    return sum(one[0] for one in found), sum(one[-1] for one in found)


def _of(share: tuple[int, int]) -> str:
    return f"{share[0]:,} of {share[1]:,}" if share[1] else ""


def peers() -> str:
    """Return the results of runs under other tools."""
    head = ["tool", "on", "faults", "finite, and within a point"]
    return table(head, ([cells[0], cells[1], cells[2], f"{numbers(cells[4])[0]} of {cells[2]}"] for cells in raw("campaign", "peers")))


# The others


def kills() -> str:
    """Return the results of killed runs."""
    head = ["backend", "kills", "completed runs", "with the same bits", "newest snapshot lost"]
    rows = raw("crash", "kills")
    return table(head, ([cells[0], cells[1], cells[3], cells[5], cells[6]] for cells in rows))


def memory() -> str:
    """Return the lowest limits of memory under which runs complete."""
    head = ["backend", "train state", "plain completes from", "guarded from", "with a NaN from", "with snapshots on disk from"]
    return table(head, (cells[:6] for cells in raw("memory", "limits")))


def fuzz() -> str:
    """Return the number of executions for each kind of file."""
    head = ["file", "executions", "minutes", "findings"]
    return table(head, ([cells[0], cells[2], cells[3], cells[5].partition(";")[0]] for cells in raw("fuzz", "fuzz")))


def mutate() -> str:
    """Return the mutants by group of modules."""
    groups = {"rules of verdict, policy and causes": "", "transaction on TensorFlow": "/tensorflow/"}
    groups |= {"transaction on JAX": "/jax/", "transaction on PyTorch": "/torch/"}
    rows = [cells for cells in raw("mutate", "mutate") if cells[0] != "all"]
    lines = []
    for name, part in groups.items():
        own = [cells for cells in rows if (part and part in cells[0]) or (not part and not re.search("/(tensorflow|jax|torch)/", cells[0]))]
        lines.append([name, len(own), *(f"{sum(int(cells[column]) for cells in own):,}" for column in (1, 3, 4, 5, 6))])
    return table(["modules", "how many", "mutants", "killed", "timeout", "equivalent", "survived"], lines)


def soak() -> str:
    """Return whether all faults were counted, and the memory over time."""
    rows = [cells for cells in raw("soak", "soak") if cells[1] in ("steps", "disk", "unguarded", "one-guard")]
    return table(["backend", "form", "length", "incidents of faults", "memory after a tenth, at most later"], (cells[:5] for cells in rows))


def scale() -> str:
    """Return the ratios of the smallest and the largest model of each axis."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for cells in raw("scale", "scale"):
        axis, _, size = cells[0].partition(" ")
        found.setdefault((axis, cells[1]), []).append([size, *cells])
    lines = []
    for (axis, backend), rows in found.items():
        ratios = [float(cells[8]) for cells in rows]
        first = [float(cells[5]) for cells in rows]
        spans = [f"{min(values):.2f} to {max(values):.2f}" for values in (ratios, first)]
        lines.append([f"{axis}, {rows[0][0]} to {rows[-1][0]}", backend, f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", *spans])
    return table(["axis", "backend", "smallest", "largest", "all sizes", "first step"], lines)


SOURCES = {
    "faults": ("campaign", "faults", faults),
    "peers": ("campaign", "peers", peers),
    "kills": ("crash", "kills", kills),
    "memory": ("memory", "limits", memory),
    "fuzz": ("fuzz", "fuzz", fuzz),
    "mutate": ("mutate", "mutate", mutate),
    "soak": ("soak", "soak", soak),
    "scale": ("scale", "scale", scale),
}
"""For each table of the page: the campaign, the full table, and the function that summarizes it."""


def written(name: str) -> str:
    """Return a table of the page with the commit that was measured."""
    campaign, source, make = SOURCES[name]
    commit = pages.commit(RESULTS / f"{campaign}.md", source)
    return f"{make()}\n\nMeasured at commit {commit}. [Full tables](../campaigns/results/{campaign}.md)."


def main() -> None:
    for name in SOURCES:
        pages.write(PAGE, name, written(name), measured=False)


if __name__ == "__main__":
    main()
