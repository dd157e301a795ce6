"""Every kind of instance compiles for sm_90a without a GPU; its registers, shared memory and instructions are what
the design says.

Compilation runs in a process of its own: other tests import Triton in interpreter mode, which changes the language
for good.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys

import pytest
from spills import allowed

pytest.importorskip("triton")

REPRESENTATIVE = (
    "forward-128x128-right",
    "forward-64x64-rows",
    "forward-64x64-none",
    "forward-64x64-right-long",
    "forward-64x64-right-short",
    "forward-192x128-right",
    "forward-256x256-right",
    "forward-128x128-bits",
    "backward-128x128-right-deterministic",
    "backward-64x64-none",
    "forward-128x128-values",
    "backward-128x128-bits",
    "backward-128x128-values",
    "queries-256x256-right",
    "queries-192x128-right",
    "keys-256x256-right",
    "keys-192x128-right",
)

SHARED_MEMORY = 232448
"""Bytes a thread block of sm_90 can have."""

SPILLS = {
    # Registers spilled to local memory, bytes, by pattern; the first that matches counts. For head_dim 64 and 128
    # what is spilled is a scalar or two around the loop over tiles; docs/hopper.md says what has been tried. With
    # segments it is also the branch that compares labels, which packed documents in order do not take; with bits and
    # values what stands in the branches of the masked blocks.
    "forward-64x64-values32*": 64,
    "forward-64x64-none-softcap": 48,
    "forward-128x128-values*-softcap": 700,
    "forward-128x128-values32*": 536,
    "forward-128x128-values*": 244,
    "forward-192x128-values*-softcap": 640,
    "forward-192x128-values*": 420,
    "forward-256x256-values*": 640,
    "queries-192x128-segments-softcap": 48,
    "queries-192x128-*": 0,
    "queries-*-values*-softcap": 720,
    "queries-*-values*": 200,
    "keys-192x128-*": 0,
    "keys-*-values*": 96,
    "forward-128x128-bits-softcap": 64,
    "forward-192x128-bits-softcap": 160,
    "forward-256x256-bits*": 96,
    "queries-*-bits-softcap": 288,
    "forward-128x128-segments-softcap": 128,
    "forward-128x128-segments*": 80,
    "forward-192x128-segments*": 96,
    "forward-256x256-segments*": 448,
    "queries-*-segments-softcap": 900,
    "keys-*-segments-softcap": 64,
    "forward-128x128-*-softcap": 64,
    "forward-256x256-none*": 32,
    "forward-256x256-*": 128,
    "forward-*": 0,
    "queries-*-softcap": 128,
    "queries-*": 64,
    "keys-*": 0,
    # The two warpgroups of the backward have code of their own, and what each spills counts. The single warps, of 24
    # registers, spill up to 60 bytes: once a block of keys, or, where the order of additions is fixed, once a tile.
    "backward-64x64-values*-deterministic": 160,
    "backward-64x64-values*": 140,
    "backward-64x64-segments-deterministic": 96,
    "backward-64x64-segments*": 80,
    "backward-64x64-bits*": 24,
    "backward-64x64-band*": 24,
    "backward-64x64-*-deterministic": 24,
    "backward-64x64-*": 0,
    "backward-128x128-values*-softcap": 1400,
    "backward-128x128-values*": 280,
    "backward-128x128-segments-softcap": 1720,
    "backward-128x128-segments*": 260,
    "backward-128x128-none-softcap": 72,
    "backward-128x128-none*": 8,
    "backward-128x128-bits-softcap": 700,
    "backward-128x128-bits*": 80,
    "backward-128x128-rows-softcap": 780,
    "backward-128x128-rows*": 16,
    "backward-128x128-*-softcap": 820,
    "backward-128x128-*-deterministic": 200,
    "backward-128x128-*": 160,
}

TRITON_BARRIERS = {0, 1, 2, 3}
"""Ids that Triton's own barriers may use; ours start above (barriers.py)."""


def compile_all(*patterns: str) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fusion_pass.kernels.hopper.check", *patterns]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_as_designed(used: dict[str, object]) -> None:
    name = str(used["name"])
    direction = name.split("-")[0]
    limit = next(limit for pattern, limit in SPILLS.items() if fnmatch.fnmatch(name, pattern))
    assert used["spill_bytes"] <= allowed(limit), used  # type: ignore[operator]
    assert used["shared_bytes"] <= SHARED_MEMORY, used  # type: ignore[operator]
    assert not used["warnings"], f"ptxas serialised the products of {name}: {used['warnings']}"
    assert set(used["barrier_ids"]) <= TRITON_BARRIERS, used  # type: ignore[call-overload]
    assert used["wgmma"] == expected_wgmma(name), used
    # Two warps add dQ, three in a fixed order, by boxes of 128 bytes a row.
    additions = (3 if name.endswith("-deterministic") else 2) * (2 if "-64x64-" in name else 4)
    assert used["tma_reduce"] == (additions if direction == "backward" else 0), used
    assert used["overlaps"] == (direction == "backward"), used
    assert used["waits"] == expected_waits(name), used


def expected_waits(name: str) -> int:
    """Where a kernel waits for the one before it: in the load warp, in the two that add dQ, in the one that zeroes or
    adds, too."""
    return 4 if name.startswith("backward") else 0


def expected_wgmma(name: str) -> int:
    """wgmma instructions: tiles over 64 x N x 16, times the places where the source has a product."""
    direction, dims, mask = name.split("-")[:3]
    qk_dim, v_dim = (int(dim) for dim in dims.split("x"))
    if direction == "forward":
        block_n = 64 if qk_dim == 256 else 128
        scores, values = qk_dim // 16, block_n // 16
        loops = {"none": 1, "right": 2}.get(mask, 3)
        if name.endswith("-short"):  # two consumers, 64 keys, no product but those of the loops
            return 2 * loops * (scores + 64 // 16)
        # Each consumer has the first scores, the loops and the last product with V. Between tiles there are the next
        # tile's first scores, and above head_dim 128, which waits for Q, no product with V beside them.
        seam = scores + (values if qk_dim <= 128 else 0)
        consumers = 3 if dims == "64x64" and (mask == "none" or name.endswith("-long")) else 2
        return consumers * (scores + loops * (scores + values) + seam + values)
    slices = 3 if qk_dim == 192 else 1
    if direction == "queries":  # two consumers; S, dP, and dQ over 64 keys
        return 2 * (qk_dim // 16 + v_dim // 16 + slices * (64 // 16))
    if direction == "keys":  # S, dP, and dV, dK over 64 queries
        return qk_dim // 16 + v_dim // 16 + (1 + slices) * (64 // 16)
    # Two warpgroups with S, dP (over the features), dV and dK (over 64 queries); one loop whatever the mask. dQ over
    # 128 keys: in a warpgroup of its own, or in both, there of the tile before and once more behind the last.
    consumer = 2 * (qk_dim // 16) + 2 * (64 // 16)
    if qk_dim == 64:
        return 2 * consumer + 128 // 16
    # Early scores are those of the next tile; the first ones stand before the loop.
    early = 0 if name.endswith("softcap") else qk_dim // 16
    return 2 * (consumer + early + 2 * (128 // 16))


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_representative_instances(forward: bool) -> None:
    """In two processes: to import PyTorch and Triton takes half as long as to compile one instance."""
    names = [name for name in REPRESENTATIVE if name.startswith("forward") == forward]
    compiled = compile_all(*names)
    assert {used["name"] for used in compiled} == set(names)
    for used in compiled:
        assert_as_designed(used)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("pattern", "instances"), [("forward-*", 93), ("backward-*", 48), ("queries-*", 32), ("keys-*", 32)]
)
def test_every_instance(pattern: str, instances: int) -> None:
    results = compile_all(pattern)
    assert len(results) == instances
    for used in results:
        assert_as_designed(used)
