"""Draw a result file of `benchmarks.norm_rope`: `python -m benchmarks.plot benchmarks/results/norm_rope-CARD.json`.

One panel a pass: the fraction of a device copy over the number of tokens, one line a shape; where Inductor was
measured, below it our time over Inductor's. Where both our back ends were measured, of the faster one. Needs matplotlib
(the extra `plot`). Writes a PNG beside the file.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]
"""Shape to (tokens, value)."""


def series(rows: list[dict[str, Any]], pass_: str, against: str | None) -> Series:
    """The lines of one panel: the fraction of a copy, or `against`'s time over ours."""
    lines: Series = defaultdict(list)
    for row in rows:
        if row["pass"] != pass_:
            continue
        shape, _, tokens = row["case"].rpartition(", ")
        times = {"ours": row["ours"], **row["baselines"]}
        best = min(times[name] for name in ("ours", "triton", "cuda") if name in times)
        value = row["bandwidth"] * row["ours"] / best if against is None else times.get(against, 0) / best
        if value:
            lines[shape].append((int(tokens.split()[0]), value))
    return {shape: sorted(points) for shape, points in lines.items()}


def draw(record: dict[str, Any], path: Path) -> None:
    """The figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = record["rows"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    kinds = [(None, "fraction of a device copy")]
    if any("inductor" in row["baselines"] for row in rows):
        kinds.append(("inductor", "times faster than Inductor"))
    size = (5 * len(passes), 4 * len(kinds))
    figure, axes = pyplot.subplots(len(kinds), len(passes), figsize=size, squeeze=False, sharex=True)
    for line, (against, label) in zip(axes, kinds, strict=True):
        for axis, pass_ in zip(line, passes, strict=True):
            for shape, points in series(rows, pass_, against).items():
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=shape)
            axis.set_xscale("log", base=2)
            axis.axhline(1, color="black", linewidth=0.5)
            axis.set_title(pass_)
            axis.set_ylabel(label)
            axis.set_xlabel("tokens")
    axes[0][0].legend(fontsize=6)
    figure.suptitle(f"{record['card']}, torch {record['torch']}, triton {record['triton']}, {record['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    path: Path = parser.parse_args().results
    draw(json.loads(path.read_text()), path.with_suffix(".png"))
    print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
