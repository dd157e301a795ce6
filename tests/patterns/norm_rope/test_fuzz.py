"""Whatever is done to a graph, a site that is found in it computes what it computes."""

from __future__ import annotations

import pytest
import torch
from exactness import TOLERANCE, capture, errors, find
from mutations import mutated
from spellings import NORMS, ROTATIONS, Attention, halves, inputs, written

CASES = [
    (halves, "rsqrt", False),
    (halves, "one_plus", True),
    (written, "functional", False),
    (ROTATIONS[5], "layer", False),
]


def run(module, values, seeds) -> tuple[int, int]:
    """(graphs that could be built, sites found in them); fails on a site that is not exact."""
    built = found = 0
    for seed in seeds:
        changed = mutated(module, seed)
        if changed is None:
            continue
        built += 1
        sites, _ = find(changed)
        for site in sites:
            ((_, error),) = errors(changed, values, [site])
            if error == float("inf"):
                continue  # the changed graph itself gives no finite numbers
            assert error <= TOLERANCE, f"seed {seed}: {site.fusion} at {site.anchor} is off by {error:.3g}"
            found += 1
    return built, found


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].__name__}-{c[1]}")
def test_mutations(case):
    rotate, norm, norm_last = case
    module, values = capture(Attention(rotate, NORMS[norm], norm_last), *inputs())
    built, found = run(module, values, range(40))
    assert built >= 15
    assert found >= 5


def test_the_check_can_fail():
    """A site of one graph is not exact in a graph with another eps."""
    module, values = capture(Attention(), *inputs())
    sites, _ = find(module)
    for node in module.graph.nodes:
        if 1e-6 in node.args:
            node.args = tuple(1e-2 if a == 1e-6 else a for a in node.args)
    ((_, error),) = errors(module, values, sites)
    assert error > 1e-4


if __name__ == "__main__":  # a long run by hand: PYTHONPATH=tests/patterns python FILE FIRST LAST
    import sys

    first, last = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for rotate, norm, norm_last in [*CASES, *((r, "rsqrt", False) for r in ROTATIONS)]:
        module, values = capture(Attention(rotate, NORMS[norm], norm_last), *inputs())
        print(rotate.__name__, norm, run(module, values, range(first, last)), flush=True)
