"""Write the table by which `backend="auto"` takes CUDA C++ or Triton: `python -m benchmarks.choose_norm_rope
RESULT ...`.

RESULT is the file of a run that measured both; the rows of several runs, of different shapes, come together, and what
the table says of its run is said of the first: `python -m benchmarks.norm_rope --baselines triton cuda inductor`, or in
less time `--backend triton --baselines cuda inductor`. The table goes to `kernels/choice/`, one file a card; what reads
it is `kernels/choice/table.py`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.norm_rope import SHAPES, Shape
from fusion_pass.kernels import card
from fusion_pass.kernels.choice import table
from fusion_pass.kernels.choice.form import BACKWARD, FORWARD, Form

CARDS = {"NVIDIA H100 80GB HBM3": card.H100, "NVIDIA H200": card.H200}
BACKENDS = ("triton", "cuda")
UNSTEADY = 0.05
"""A time whose first and third quartile are further apart than this, as a fraction of it, decides nothing."""
PASSES = ("forward", "forward (training)", "backward")


def form_of(shape: Shape, direction: str) -> Form:
    """The form of one of the three measured passes."""
    return Form(
        direction=BACKWARD if direction == "backward" else FORWARD,
        head_dim=shape.head_dim,
        itemsize=shape.dtype.itemsize,
        norm=shape.norm != "none",
        pairing=shape.pairing,
        mrope_layout=shape.mrope_layout,
        partial=shape.rotary_dim < shape.head_dim,
        moved=shape.packed and direction != "forward",
        hidden=shape.norm_scope == "hidden",
    )


def choices(result: Mapping[str, Any]) -> dict[str, Any]:
    """The table's file."""
    measured: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
    for row in result["rows"]:
        times = [row["ours"] if name == result.get("backend") else row["baselines"].get(name) for name in BACKENDS]
        spreads = [
            row["spread"] if name == result.get("backend") else row.get("baseline_spreads", {}).get(name, 0)
            for name in BACKENDS
        ]
        if any(t is not None and s > UNSTEADY * t for t, s in zip(times, spreads, strict=True)):
            continue
        name, _, tokens = row["case"].removesuffix(" tokens").rpartition(", ")
        if None not in times:
            measured[name, row["pass"]].append((int(tokens), *times))
    shapes = [
        {
            "model": shape.name,
            "form": asdict(form_of(shape, direction)),
            "heads": shape.heads + shape.kv_heads,
            "microseconds": sorted(measured[shape.name, direction]),
        }
        for shape in SHAPES
        for direction in PASSES
        # Without v to move, a forward in training is the forward.
        if (shape.name, direction) in measured and (shape.packed or direction != "forward (training)")
    ]
    source = [name for name in ("commit", "tree") if name in result]  # neither, where it ran without git
    facts = {name: result[name] for name in ("card", "torch", "triton", "date", *source, "copy_gb_s")}
    return {**facts, "columns": ["tokens", *BACKENDS], "shapes": shapes}


def as_text(content: Mapping[str, Any]) -> str:
    """JSON with one measurement a line."""
    shapes = content["shapes"]
    head = json.dumps({name: value for name, value in content.items() if name != "shapes"}, indent=1)
    lines = []
    for shape in shapes:
        rest = json.dumps({name: value for name, value in shape.items() if name != "microseconds"})
        rows = ",\n   ".join(json.dumps(row) for row in shape["microseconds"])
        lines.append(f'  {rest[:-1]}, "microseconds": [\n   {rows}]}}')
    return head[:-2] + ',\n "shapes": [\n' + ",\n".join(lines) + "]\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    result = results[0]
    if any((other["card"], other.get("backend")) != (result["card"], result.get("backend")) for other in results):
        raise SystemExit("The results are of different cards, or measured another back end as their own.")
    result["rows"] = [row for other in results for row in other["rows"]]
    measured = CARDS.get(result["card"])
    if measured is None or measured not in table.TABLES:
        raise SystemExit(f"{result['card']!r} has no table: add it to CARDS here and to TABLES of {table.__file__}.")
    path = table.path_of(measured)
    path.write_text(as_text(choices(result)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
