"""Every instance compiles by NVRTC for GPUs that need not be here, and none spills registers."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
from pathlib import Path

import pytest
from cuda_cases import BESIDE_THE_SUMS, CUDA_CASES, INTERLEAVED_MROPE, MODEL_SIZE, by_kernel, prepared
from norm_rope_cases import Case
from triton import knobs

from fusion_pass.kernels.card import H100, H200, Card
from fusion_pass.kernels.cuda import compiler, norm_rope, tiles
from fusion_pass.kernels.cuda.instance import Instance, heads_per_warp

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_missing = compiler.unavailable()
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"NVRTC: {_missing}")


def spilled_bytes(instance: Instance, arch: str, alignment: int = 16) -> int:
    """Stack frame and spills of a kernel, as ptxas reports them."""
    log = io.StringIO()
    compiler.compile_cubin(instance.source(alignment), arch, log)
    figures = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log.getvalue())
    assert len(figures) == 3, log.getvalue()
    return sum(map(int, figures))


def check(cases: list[Case], arch: str, card: Card = H100) -> None:
    seen: set[str] = set()
    spills = {}
    for case in cases:
        for work in prepared(case, card=card):
            instance: Instance = work.launch.instance  # type: ignore[attr-defined]
            if instance.source() not in seen:
                seen.add(instance.source())
                spills[f"{case}, {instance.kernel}"] = spilled_bytes(instance, arch)
    assert seen
    assert not any(spills.values()), {name: n for name, n in spills.items() if n}


@pytest.mark.parametrize("card", [H100, H200])
def test_instances_of_model_size(card: Card) -> None:
    check([*MODEL_SIZE, BESIDE_THE_SUMS], "sm_90", card)


def test_instances_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles, and their code of prefetches."""
    monkeypatch.setattr(norm_rope, "FEW_BYTES", 0)
    monkeypatch.setattr(tiles, "PREFETCHES_FROM", 0)
    check([*MODEL_SIZE, BESIDE_THE_SUMS], "sm_90", H200)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str) -> None:
    check(MODEL_SIZE[:1], arch)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "card"), [*((arch, H100) for arch in ARCHITECTURES), ("sm_90", H200)])
def test_no_spills_in_any_instance(arch: str, card: Card) -> None:
    check(CUDA_CASES, arch, card)


def loads_of_forward(instance: Instance, folder: Path) -> tuple[int, int] | None:
    """How many loads from global memory stand before the first exchange between lanes, and how many behind it; None if
    lanes exchange nothing. Without v, whose loads are a branch of their own."""
    constants = {**instance.constants, "V_HEADS": 0}
    path = folder / "forward.cubin"
    path.write_bytes(compiler.compile_cubin(dataclasses.replace(instance, constants=constants).source(), "sm_90"))
    listed = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True, check=True)
    code = re.findall(r"\b(SHFL|LDG?)\b", listed.stdout)
    if "SHFL" not in code:
        return None
    first = code.index("SHFL")
    loads = [place for place, name in enumerate(code) if name != "SHFL"]
    return sum(place < first for place in loads), sum(place > first for place in loads)


def loads_of_heads(instance: Instance) -> int:
    """What a thread loads of x, in instructions."""
    slots, access = instance.constants, instance.accesses["IN_BYTES"]
    vectors = 2 * int(slots["CHUNKS"]) * int(slots["UNROLL"])
    return vectors * -(-int(slots["PAIRS"]) * access.itemsize // access.bytes)


def check_loads(cases: list[Case], card: Card, folder: Path) -> None:
    """All loads of a forward are on their way before anything waits for one. (A LayerNorm's mean waits for x alone:
    ptxas takes the first sums before the tables are asked for.)"""
    seen: set[str] = set()
    late: dict[str, tuple[int, int]] = {}
    exchanging = 0
    for case in cases:
        instance: Instance = by_kernel(case, card)["forward"].launch.instance  # type: ignore[attr-defined]
        if instance.source() in seen:
            continue
        seen.add(instance.source())
        loads = loads_of_forward(instance, folder)
        if loads is None:
            assert instance.constants["NORM"] == "NO_NORM" or heads_per_warp(instance.constants) == 32, str(case)
            continue
        exchanging += 1
        before, behind = loads
        only_heads = instance.constants["NORM"] == "LAYER"
        if before < loads_of_heads(instance) or (behind and not only_heads):
            late[str(case)] = loads
    assert exchanging
    assert not late


@pytest.mark.parametrize("card", [H100, H200])
def test_nothing_waits_before_all_loads_are_on_their_way(card: Card, tmp_path: Path) -> None:
    """Interleaved MRoPE on an H200 took 90.1 us instead of 83.8 when two loads of a warp's second heads did not."""
    check_loads([*MODEL_SIZE, INTERLEAVED_MROPE], card, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("card", [H100, H200])
def test_nothing_waits_in_any_forward(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_loads(CUDA_CASES, card, tmp_path)
    monkeypatch.setattr(tiles, "PREFETCHES_FROM", 0)
    check_loads(CUDA_CASES, card, tmp_path)


def test_narrow_accesses_compile() -> None:
    """Addresses that are multiples of less than 16 bytes narrow the accesses."""
    works = by_kernel(MODEL_SIZE[0], H200)
    for alignment, kernel in ((8, "forward"), (4, "backward"), (2, "forward"), (2, "backward")):
        assert spilled_bytes(works[kernel].launch.instance, "sm_90", alignment) == 0  # type: ignore[attr-defined]


def test_arguments_packed_otherwise_do_not_compile() -> None:
    """The host and the source count the same words; this is the assertion that says so."""
    instance: Instance = by_kernel(MODEL_SIZE[0])["forward"].launch.instance  # type: ignore[attr-defined]
    words = int(instance.constants["ARGUMENT_WORDS"])
    wrong = instance.source().replace(f"ARGUMENT_WORDS = {words}", f"ARGUMENT_WORDS = {words + 1}")
    with pytest.raises(RuntimeError, match="the host packs these arguments in another way"):
        compiler.compile_cubin(wrong, "sm_90")
