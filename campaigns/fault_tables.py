"""Tables of the fault campaign, from its results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from campaigns import pages
from campaigns.fault_plan import RIGHT, SITES

__all__ = ["accurate", "described", "key", "latest", "missed", "read", "write"]

Row = dict[str, Any]

PAGE = Path(__file__).parents[1] / "campaigns" / "results" / "campaign.md"

POINT = 0.01
"""Accuracy that a run may lose against the undisturbed one."""

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

ROUNDED = {("tensorflow", "XLA"), ("jax", "XLA"), ("jax", "steps")}
"""Backends and modes in which guarded and plain steps are two XLA programs, which may round differently."""

CLASSES: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "data": ("NaN or Inf in the arrays", lambda r: r["way"] == "data" and r["kind"] != "overflow"),
    "finite": ("3.4e38 in the arrays, or in the batch by `inject`", lambda r: of_batch(r) and r["kind"] == "overflow"),
    "inject": ("`inject`", lambda r: r["way"] == "inject" and not (of_batch(r) and r["kind"] == "overflow") and not large(r)),
    "overflow": ("`inject`: 3.4e38 in loss, gradients or state", lambda r: r["way"] == "inject" and large(r)),
    "nonfinite": ("a bit flips: NaN or Inf", lambda r: r["becomes"] == "nonfinite"),
    "huge": ("a bit flips: beyond 1e30", lambda r: r["becomes"] == "huge"),
    "large": ("a bit flips: a thousand times the largest of its tensor or more", lambda r: r["becomes"] == "large"),
    "ordinary": ("a bit flips: an ordinary number", lambda r: r["becomes"] == "ordinary"),
}
"""The ways in which a fault is injected, with their titles in the table."""


def large(row: Row) -> bool:
    """Whether a fault may leave finite numbers in loss, gradients or state."""
    return row["kind"] == "overflow" and row["expected"] == "may" and not of_batch(row)


def of_batch(row: Row) -> bool:
    """Whether a fault is in the batch."""
    return row["site"] in ("inputs", "targets")


def read(path: Path) -> list[Row]:
    """Return the rows of a file of results; an incomplete line is ignored."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def key(row: Row) -> tuple[str, ...]:
    """Return the configuration of a row."""
    return tuple(row[name] for name in ("backend", "model", "mode", "precision", "optimizer"))


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row of each fault."""
    return list({(key(r), r.get("number"), r.get("healthy"), "twin" in r): r for r in rows}.values())


def missed(row: Row) -> str:
    """Return the misses of a row, `""` if there are none."""
    if "twin" in row:
        return "" if row["same"] or (row["backend"], row["mode"]) in ROUNDED else "other bits than stock Keras"
    if "healthy" in row:
        return "a healthy run accused" if row["incidents"] or row["refused"] else ""
    must = row["expected"] != "may"
    ways = {
        "raised": bool(row["error"]),
        "not seen in its step": must and not row["seen"],
        "state differs": row["identical"] is False,
        "wrong cause": must and row["right"] is False,
        "wrong place": must and row["place"] == "wrong",
        "not finite": not row["finite"],
        "stopped": row["stopped"],
        "less accurate": not accurate(row),
    }
    return ", ".join(way for way, holds in ways.items() if holds)


def accurate(row: Row) -> bool:
    """Whether a run has lost at most one point of accuracy."""
    return bool(row["accuracy"] >= row["undisturbed"] - POINT - 1e-9)


def described(row: Row) -> str:
    """Return a row as one line for the log."""
    shown = {k: v for k, v in row.items() if v not in ("", None, [], -1) and k not in ("seconds", "place", "hook")}
    return json.dumps(shown)


# The page


def write(results: Path) -> None:
    """Write the tables into the page."""
    rows = latest(row for backend in BACKENDS for row in read(results / f"{backend}.jsonl"))
    faults = [row for row in rows if "number" in row]
    pages.write(PAGE, "faults", by_way(faults))
    pages.write(PAGE, "configurations", by_backend(rows))
    pages.write(PAGE, "misses", misses(faults))
    pages.write(PAGE, "causes", right(), measured=False)
    peers = [row for path in sorted(results.glob("peers-*.jsonl")) for row in read(path)]
    pages.write(PAGE, "peers", beside_peers(peers))


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(count: int, of: int) -> str:
    """Return a count, followed by the total if that is larger."""
    return "" if not of else str(count) if count == of else f"**{count}** of {of}"


def by_way(faults: list[Row]) -> str:
    """Return the numbers of faults that were detected, undone, explained and overcome, by way and
    site.
    """
    lines = []
    for title, belongs in CLASSES.values():
        for site in SITES:
            if part := [row for row in faults if belongs(row) and row["site"] == site]:
                lines.append([title, site, *counts(part)])
    lines.append(["**all**", "", *counts(faults)])
    return table(["fault", "site", *COLUMNS], lines)


COLUMNS = (
    "faults",
    "have to be seen",
    "seen in their step",
    "same bits as without",
    "cause right",
    "ends finite",
    "within a point",
)


def counts(part: list[Row]) -> list[str]:
    """Return the cells of some faults."""
    must = [row for row in part if row["expected"] != "may"]
    compared = [row for row in part if row["identical"] is not None]
    named = [row for row in must if row["right"] is not None]
    return [
        str(len(part)),
        str(len(must)),
        share(sum(row["seen"] for row in must), len(must)),
        share(sum(row["identical"] for row in compared), len(compared)),
        share(sum(row["right"] for row in named), len(named)),
        share(sum(row["finite"] for row in part), len(part)),
        share(sum(map(accurate, part)), len(part)),
    ]


def by_backend(rows: list[Row]) -> str:
    """Return the same by backend and mode, with the healthy runs."""
    lines = []
    for backend, name in BACKENDS.items():
        for mode in dict.fromkeys(row["mode"] for row in rows if row["backend"] == backend):
            here = [row for row in rows if (row["backend"], row["mode"]) == (backend, mode)]
            healthy = [row for row in here if "healthy" in row]
            twins = [row for row in here if "twin" in row]
            same = "" if (backend, mode) in ROUNDED else share(sum(row["same"] for row in twins), len(twins))
            accused = sum(bool(row["incidents"] or row["refused"]) for row in healthy)
            lines.append([name, mode, len(twins), *counts([r for r in here if "number" in r]), len(healthy), accused, same])
    head = ["backend", "mode", "configurations", *COLUMNS, "healthy runs", "accused", "twins with the bits of stock Keras"]
    return table(head, lines)


def misses(faults: list[Row]) -> str:
    """Return the numbers of misses."""
    found = Counter[tuple[str, str, str]]()
    for row in faults:
        title = next((title for title, belongs in CLASSES.values() if belongs(row)), "")
        if why := missed(row):
            found[title, row["site"], why] += 1
    return table(["fault", "site", "what", "faults"], ([*names, count] for names, count in sorted(found.items())))


def right() -> str:
    """Return the causes that count as right."""
    lines = []
    for (site, kind), (causes, why) in RIGHT.items():
        lines.append([site, {"nonfinite": "NaN, Inf", "overflow": "3.4e38", "any": "any"}[kind], ", ".join(f"`{c}`" for c in causes), why])
    return table(["site", "fault", "right", "because"], lines)


def beside_peers(rows: list[Row]) -> str:
    """Return the results of the runs under each tool, with the same faults."""
    lines = []
    for tool in dict.fromkeys(row["tool"] for row in rows):
        mine = [row for row in rows if row["tool"] == tool]
        cells = []
        for site in PEER_SITES:
            part = [row for row in mine if row["site"] in site.split(" or ")]
            ends = sum(row["finite"] and accurate(row) for row in part)
            cells.append(f"{ends} of {len(part)}" if part else "")
        finite = [row for row in mine if row["finite"]]
        whole = [share(len(finite), len(mine)), share(sum(map(accurate, finite)), len(mine))]
        backends = ", ".join(BACKENDS[name] for name in dict.fromkeys(row["backend"] for row in mine))
        lines.append([tool, backends, len(mine), *whole, *cells])
    return table(["tool", "on", "faults", "ends finite", "and within a point", *PEER_SITES], lines)


PEER_SITES = ("inputs or targets", "loss or gradients", "weights", "statistics", "slots")
