"""What the host decides without a GPU: constants, widths of access, arguments, the cache of cubins, refusals."""

from __future__ import annotations

import ctypes
import os
import re
import stat
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_cases import (
    BESIDE_THE_SUMS,
    INTERLEAVED,
    MODEL_SIZE,
    SECTIONED,
    STAGED,
    STAGED_TABLES,
    by_kernel,
    over_one_head,
    prepared,
)
from norm_rope_cases import CASES, Case
from test_norm_rope_numerics import LARGE

from fusion_pass import FusionConfig
from fusion_pass.kernels import cuda, registry
from fusion_pass.kernels.card import H100, H200, Card
from fusion_pass.kernels.cuda import compiler, launch, norm_rope, tiles
from fusion_pass.kernels.cuda.instance import Access, entry_rows, lane_access, slot_constants, table_access
from fusion_pass.kernels.cuda.norm_rope import forward_work
from fusion_pass.kernels.options import Options
from fusion_pass.kernels.registry import Request
from fusion_pass.kernels.streams import Stream

BY_NAME = {case.name: case for case in CASES}
BF16 = torch.bfloat16


def test_constants_are_explained_in_one_place() -> None:
    """source/constants.cuh names all that is generated, and no constant that is not."""
    table = (compiler.SOURCES / "constants.cuh").read_text().partition("#pragma once")[0]
    types: set[str] = set()
    constants: set[str] = set()
    for case in [*MODEL_SIZE, BESIDE_THE_SUMS, *(case for case in LARGE if not over_one_head(case))]:
        for work in prepared(case):
            instance = work.launch.instance  # type: ignore[attr-defined]
            types |= set(instance.types)
            constants |= {*instance.constants, *instance.accesses}
    assert types <= set(re.findall(r"\w+", table))
    assert constants == set(re.findall(r"\b[A-Z][A-Z_]*[A-Z]\b", table))


INTERLEAVED_80 = {"mrope_layout": "interleaved", "mrope_section": [14, 13, 13]}


# --- how a head is cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("itemsize", "head_dim", "options", "pairs", "chunks"),
    [
        (2, 128, {"rotary_dim": 128}, 8, 1),
        (2, 72, {"rotary_dim": 72}, 4, 1),  # half of it, 36, is no multiple of 8
        (2, 128, {"rotary_dim": 64, "rotary_start": 4}, 4, 1),
        (2, 80, {"rotary_dim": 0}, 8, 1),
        (4, 256, {"rotary_dim": 256}, 4, 1),
        (8, 256, {"rotary_dim": 256}, 2, 2),
        (2, 74, {"rotary_dim": 74}, 1, 2),
    ],
)
def test_slots(itemsize: int, head_dim: int, options: dict[str, Any], pairs: int, chunks: int) -> None:
    slots = slot_constants(itemsize, head_dim, Options(**options))
    assert (slots["PAIRS"], slots["CHUNKS"]) == (pairs, chunks)


@pytest.mark.parametrize("case", [BY_NAME["packed"], BY_NAME["partial from 4, adjacent"], *MODEL_SIZE], ids=str)
def test_slots_cover_every_lane_once(case: Case) -> None:
    """`vector_lane` of source/lanes.cuh, written again: every lane of a head belongs to one vector."""
    c = {k: int(v) for k, v in by_kernel(case)["forward"].launch.instance.constants.items() if not isinstance(v, str)}  # type: ignore[attr-defined]
    pairs, slots, rotated = c["PAIRS"], c["HEAD_DIM"] // (2 * c["PAIRS"]), c["ROTARY_DIM"] // (2 * c["PAIRS"])
    for adjacent in (c["READS_ADJACENT"], c["WRITES_ADJACENT"]):
        lanes: list[int] = []
        for slot in range(slots):
            for which in (0, 1):
                if slot < rotated:
                    vector = 2 * slot + which if adjacent and not c["SPLIT_PAIRS"] else slot + which * rotated
                    first = c["ROTARY_START"] + vector * pairs
                else:
                    first = (slot - rotated + which * (slots - rotated)) * pairs
                    first += 0 if first < c["ROTARY_START"] else c["ROTARY_DIM"]
                lanes += range(first, first + pairs)
        assert sorted(lanes) == list(range(case.head_dim))


# --- how wide memory is accessed -----------------------------------------------------------------------------------


def test_lane_access_follows_the_strides() -> None:
    x = torch.empty(2, 3, 4, 64, dtype=BF16)
    assert lane_access([x, x.transpose(1, 2)], 8).bytes == 16
    assert lane_access([x], 4).bytes == 8
    assert lane_access([torch.empty(2, 3, 4, 68, dtype=BF16)[..., :64]], 8).bytes == 8
    assert lane_access([x, torch.empty(2, 3, 4, 65, dtype=BF16)[..., :64]], 8).bytes == 2
    # The stride of an axis with one entry is never used.
    assert lane_access([torch.empty(2, 3, 1, 64, dtype=BF16).as_strided((2, 3, 1, 64), (192, 64, 7, 1))], 8).bytes == 16
    assert Access(16, 2).narrowed(4) == 4
    assert Access(4, 4).narrowed(1) == 4


@pytest.mark.parametrize(
    ("section", "layout", "entries"),
    [
        ((16, 24, 24), "sectioned", 4),
        ((18, 22, 24), "sectioned", 2),
        ((15, 24, 25), "sectioned", 1),
        ((24, 20, 20), "interleaved", 1),
    ],
)
def test_table_access_stays_within_a_row(section: tuple[int, ...], layout: str, entries: int) -> None:
    options = Options(rotary_dim=128, mrope_layout=layout, mrope_section=section)
    slots = slot_constants(2, 128, options)
    table = torch.empty(3, 1, 5, 64)
    assert table_access(table, slots, options) == Access(4 * entries, 4)
    rows = entry_rows(options, per_lane=False)
    assert all(len(set(rows[i : i + entries])) == 1 for i in range(0, 64, entries))


def test_table_access_of_a_complex_view() -> None:
    options = Options(rotary_dim=128, pairing="adjacent")
    table = torch.empty(1, 5, 64, dtype=torch.complex64).real
    assert table_access(table, slot_constants(2, 128, options), options) == Access(4, 4)


# --- the arguments -------------------------------------------------------------------------------------------------


def test_arguments_hold_addresses_and_byte_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packed call: what `cuLaunchKernelEx` is handed."""
    work = by_kernel(BY_NAME["packed"])["forward"]
    launched: list[list[int]] = []

    def record(config: Any, function: int, pointers: Any, extra: None) -> int:
        words = (ctypes.c_uint64 * len(work.launch._words)).from_address(pointers[0])  # type: ignore[attr-defined]
        launched.append(list(words))
        return 0

    kernel = SimpleNamespace(handle=1)
    monkeypatch.setattr(launch, "_current_device", lambda: None)
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=record))
    monkeypatch.setattr(launch, "load", lambda *_: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    work.launch.here([tensor.data_ptr() for tensor in work.tensors])
    (words,) = launched
    case = BY_NAME["packed"]
    row = (case.heads + 2 * case.kv_heads) * case.head_dim + 16  # the buffer around the view
    q, k, v = (words[i : i + 5] for i in (0, 5, 10))
    first = work.tensors[0].data_ptr()
    # In bytes; the tables are shared by the batch entries, so batch and sequence are not folded.
    assert q == [first, 2 * row * case.sequence, 2 * row, 0, 2 * case.head_dim]
    assert k[0] - q[0] == 2 * case.heads * case.head_dim
    assert v[0] - k[0] == 2 * case.kv_heads * case.head_dim
    assert words[-3:-1] == [case.batch * case.sequence, case.sequence]
    assert array("d", array("Q", words[-1:]).tobytes())[0] == 1e-5


def test_backward_walks_whole_rounds_of_groups() -> None:
    """Each slice of the tokens is walked by all groups of heads (source/backward.cuh)."""
    for case in MODEL_SIZE:
        works = by_kernel(case)
        if case.all_options["norm"] == "none":
            continue  # a forward
        launch_ = works["backward"].launch
        constants = launch_.instance.constants  # type: ignore[attr-defined]
        slots = int(constants["HEAD_DIM"]) // (2 * int(constants["PAIRS"]))
        heads = sum(int(constants[name]) for name in ("Q_HEADS", "K_HEADS"))
        groups = -(-heads // (32 // -(-slots // int(constants["CHUNKS"]))))
        blocks = launch_._words[-5]  # type: ignore[attr-defined]
        assert blocks * int(constants["WARPS"]) % groups == 0


def test_instances_do_not_depend_on_eps_or_tokens() -> None:
    sources = {
        work.launch.instance.source()  # type: ignore[attr-defined]
        for tokens, eps in ((64, 1e-6), (72, 1e-5))
        for work in prepared(Case("", 4, 2, 64, 1, tokens, BF16, packing="blocked", options={"eps": eps}))
        if work.launch.instance.kernel == "forward"  # type: ignore[attr-defined]
    }
    assert len(sources) == 1


# --- the launches of a backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (Case("q and k", dtype=BF16), ["backward", "reduce"]),
        (BESIDE_THE_SUMS, ["backward", "reduce_and_finish"]),
        (Case("packed", dtype=BF16, packing="blocked"), ["backward", "reduce_and_move"]),
        (Case("packed, no weights", dtype=BF16, packing="blocked", affine=""), ["backward"]),
    ],
    ids=str,
)
def test_v_is_moved_beside_the_sums(case: Case, kernels: list[str]) -> None:
    """Or by the only launch, where nothing is added up."""
    launches = {work.launch.instance.kernel: work.launch for work in prepared(case)}  # type: ignore[attr-defined]
    assert [name for name in launches if name not in ("forward", "table_gradient")] == kernels
    moving = {name: bool(launches[name].instance.constants.get("V_HEADS")) for name in kernels}
    assert moving == {name: case.packing is not None and name == kernels[-1] for name in kernels}


@pytest.mark.parametrize(
    ("case", "card", "stages"),
    [
        (BESIDE_THE_SUMS, H200, 2),
        (BESIDE_THE_SUMS, Card(90, 4200), 2),
        (BESIDE_THE_SUMS, H100, 0),
        (BESIDE_THE_SUMS, Card(90, 0), 0),
        (BESIDE_THE_SUMS, Card(80, 2000), 0),
        (Case("biases", 32, 8, 128, 1, 64, BF16, affine="wb"), H200, 0),
        (Case("heads of 128 bytes", 32, 8, 64, 1, 64, BF16), H200, 2),
        (Case("shorter heads", 32, 8, 48, 1, 64, BF16), H200, 0),
        (Case("no bulk copies", 32, 8, 72, 1, 64, BF16), H200, 0),
    ],
    ids=lambda value: str(value),
)
def test_tokens_come_through_shared_memory_where_it_was_measured(case: Case, card: Card, stages: int) -> None:
    assert by_kernel(case, card)["backward"].launch.instance.constants["STAGES"] == stages  # type: ignore[attr-defined]


def test_without_a_norm_the_backward_is_a_forward() -> None:
    """By the transpose of the rotation; not where results and inputs differ in dtype."""

    def kernels(**options: Any) -> list[tuple[str, object]]:
        case = Case("", 4, 2, 64, 1, 8, BF16, packing="blocked", affine="", options={"norm": "none", **options})
        instances = [work.launch.instance for work in prepared(case, card=H200)]  # type: ignore[attr-defined]
        return [(i.kernel, i.constants.get("TRANSPOSED")) for i in instances if i.kernel != "table_gradient"]

    assert kernels() == [("forward", False), ("forward", True)]
    assert kernels(out_dtype=torch.float32) == [("forward", False), ("backward", None)]


def test_tables_come_with_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies of whole rows: a row that is gathered by a position, or read entry by entry, does not. With few tokens
    they come with q and k apart, too."""

    def tables(case: Case, card: Card = H200) -> object:
        return by_kernel(case, card)["backward"].launch.instance.constants["TABLES"]  # type: ignore[attr-defined]

    assert {tables(case) for case in STAGED_TABLES} == {"STAGED"}
    apart = [case for case in STAGED if case.packing is None]
    assert [tables(case) for case in apart].count("STAGED") == 4
    monkeypatch.setattr(norm_rope, "FEW_BYTES", 0)
    assert "STAGED" not in {tables(case) for case in apart}
    case = STAGED_TABLES[0]
    assert tables(case, H100) == "FIRST"
    for other in ({"positions": "shared"}, {"options": INTERLEAVED}, {"head_dim": 256, "options": {}}):
        assert tables(replace(case, **other)) != "STAGED"


@pytest.mark.parametrize(("packing", "heads_a_copy"), [("blocked", 2), ("grouped", 1)])
def test_only_heads_that_adjoin_are_one_copy(packing: str, heads_a_copy: int) -> None:
    """And of those two: more were slower."""
    case = Case("", 16, 4, 128, 1, 64, BF16, packing=packing)
    constants = by_kernel(case, H200)["backward"].launch.instance.constants  # type: ignore[attr-defined]
    assert constants["HEADS_A_COPY"] == heads_a_copy


@pytest.mark.parametrize(
    ("case", "prefetched"),
    [
        (STAGED_TABLES[0], "heads"),
        (Case("heads of two tokens", 16, 2, 128, 1, 64, BF16, packing="blocked"), ""),
        (Case("adjacent", 32, 8, 128, 1, 64, BF16, options={"pairing": "adjacent"}), ""),
        (Case("heads of 80", 16, 16, 80, 1, 64, BF16, packing="blocked"), "heads tables"),
        (Case("tables in two bytes", 32, 8, 128, 1, 64, BF16, per_lane=True, table_dtype=BF16), ""),
        (Case("long heads", 16, 8, 256, 1, 64, BF16, per_lane=True, table_dtype=BF16), "heads"),
        (Case("interleaved", 32, 8, 128, 1, 64, BF16, options=INTERLEAVED), ""),
        (Case("interleaved, heads of 80", 16, 4, 80, 1, 64, BF16, options=INTERLEAVED_80), "tables"),
        (Case("positions", 32, 8, 128, 1, 64, BF16, positions="shared"), ""),
        (Case("no norm", 32, 8, 128, 1, 64, BF16, options={"norm": "none"}), ""),
    ],
    ids=str,
)
def test_what_a_forward_asks_for_early(case: Case, prefetched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was measured faster; never on an H100."""
    monkeypatch.setattr(tiles, "PREFETCHES_FROM", 0)
    for card, expected in ((H200, prefetched), (H100, "")):
        constants = by_kernel(case, card)["forward"].launch.instance.constants  # type: ignore[attr-defined]
        assert [name for name in ("heads", "tables") if constants[f"PREFETCHES_{name.upper()}"]] == expected.split()


def test_few_tokens_are_not_prefetched() -> None:
    """And their kernel has no code for it."""
    assert tiles.prefetched_tokens(2048, 10240, H200) == 0
    assert tiles.prefetched_tokens(16384, 10240, H200) == 256
    assert tiles.prefetched_tokens(16384, 10240, H100) == 0
    instance = by_kernel(STAGED_TABLES[0], H200)["forward"].launch.instance  # type: ignore[attr-defined]
    assert not instance.constants["PREFETCHES_HEADS"]
    assert not instance.constants["PREFETCHES_TABLES"]


def test_a_forward_of_many_tokens_prefetches() -> None:
    forward = by_kernel(Case("", 32, 8, 128, 1, 5000, BF16, packing="blocked"), H200)["forward"].launch
    assert forward.instance.constants["PREFETCHES_HEADS"]  # type: ignore[attr-defined]
    assert forward._words[-4] == 5 * 2**19 // (40 * 256)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("case", "unroll"),
    [
        (Case("half a head is nine times eight bytes", 16, 16, 72, 1, 64, BF16), 3),
        (Case("six heads: two times three", 4, 2, 72, 1, 64, BF16, options={"norm": "none"}), 2),
        (Case("three heads", 2, 1, 72, 1, 64, BF16), 1),
        (Case("rotated lanes begin in the middle", 8, 8, 128, 1, 64, BF16,
              options={"rotary_dim": 64, "rotary_start": 4}), 3),
        (Case("float32", 8, 8, 36, 1, 64), 3),
        (Case("vectors of 16 bytes", 16, 16, 80, 1, 64, BF16), 1),
        (Case("no norm", 16, 16, 80, 1, 64, BF16, options={"norm": "none"}), 2),
        (Case("no norm, an entry a lane", 16, 16, 80, 1, 64, BF16, per_lane=True, options={"norm": "none"}), 2),
        (Case("no norm, an entry a lane, heads of 72", 16, 16, 72, 1, 64, BF16, per_lane=True,
              options={"norm": "none"}), 3),
        (Case("no norm, float32", 16, 16, 80, 1, 64, options={"norm": "none"}), 1),
        (Case("no norm, tables in two bytes", 16, 16, 80, 1, 64, BF16, table_dtype=BF16, options={"norm": "none"}), 1),
        (Case("no norm, positions", 16, 16, 80, 1, 64, BF16, positions="shared", options={"norm": "none"}), 1),
        (Case("no norm, partial", 16, 16, 128, 1, 64, BF16, options={"norm": "none", "rotary_dim": 64}), 1),
        (Case("no norm, adjacent", 16, 16, 128, 1, 64, BF16, options={"norm": "none", "pairing": "adjacent"}), 1),
        (Case("no norm, sectioned", 16, 16, 128, 1, 64, BF16, options={**SECTIONED, "norm": "none"}), 1),
        (Case("vectors of 4 bytes", 16, 16, 76, 1, 64, BF16), 1),
    ],
    ids=str,
)  # fmt: skip
def test_heads_share_tables(case: Case, unroll: int) -> None:
    """A warp of the forward takes several times as many heads, where it was measured; on an H100 it was not."""
    for card, expected in ((H200, unroll), (H100, 1)):
        constants = by_kernel(case, card)["forward"].launch.instance.constants  # type: ignore[attr-defined]
        assert constants["UNROLL"] == expected


def test_heads_of_two_tokens_share_a_warp() -> None:
    """Where a token's heads fill no whole number of warps; 32-bit numbers must do for the heads of all tokens."""

    def forward(case: Case, card: Card = H200) -> Any:
        return by_kernel(case, card)["forward"].launch

    case = Case("", 16, 2, 128, 1, 1001, BF16, packing="blocked", options=SECTIONED)
    launch_ = forward(case)
    assert launch_.instance.constants["FLAT"]
    assert launch_._words[-5] == -(-1001 * 18 // 4 // 2)  # four heads a warp, two warps a block
    assert not forward(case, H100).instance.constants["FLAT"]
    assert forward(case, H100)._words[-5] == -(-1001 * 5 // 4)
    assert not forward(replace(case, heads=14)).instance.constants["FLAT"]  # four warps
    assert not forward(replace(case, heads=2, kv_heads=1)).instance.constants["FLAT"]  # one warp
    assert not forward(replace(case, options=INTERLEAVED)).instance.constants["FLAT"]  # a warp takes eight at once


def test_more_heads_than_32_bits_count_keep_to_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("", 16, 2, 128, 1, 1001, BF16, packing="blocked")
    monkeypatch.setattr(norm_rope, "_MOST_FLAT", 1001 * 18)
    instance = by_kernel(case, H200)["forward"].launch.instance  # type: ignore[attr-defined]
    assert not instance.constants["FLAT"]


@pytest.mark.parametrize(
    ("change", "handed"),
    [
        ({}, True),
        ({"options": INTERLEAVED}, True),
        ({"per_lane": True, "table_dtype": BF16}, True),
        ({"positions": "shared"}, False),
        ({"options": {"norm": "none"}}, False),
        ({"options": {"rotary_dim": 4}}, False),  # rows of 8 bytes
        ({"head_dim": 80}, False),  # five lanes a head
    ],
    ids=str,
)
def test_a_warp_loads_its_tables_once(change: dict[str, Any], handed: bool) -> None:
    case = replace(Case("", 32, 8, 128, 1, 64, BF16), **change)
    for card, expected in ((H200, handed), (H100, False)):
        constants = by_kernel(case, card)["forward"].launch.instance.constants  # type: ignore[attr-defined]
        assert (constants["TABLES"] == "HANDED") == expected


def test_tables_that_sequences_share_stay_in_the_l2() -> None:
    """On an H100 all do."""

    def kept(card: Card, **change: Any) -> object:
        case = replace(Case("", 16, 8, 128, 3, 40, BF16), **change)
        return by_kernel(case, card)["forward"].launch.instance.constants["KEEPS_TABLES"]  # type: ignore[attr-defined]

    assert kept(H200)
    assert not kept(H200, batch=1)
    assert not kept(H200, table_batch=3)
    assert kept(H100, batch=1)


def test_every_dx_is_written_once() -> None:
    """The last 1.5 MB by the launch of the sums, where it begins while the backward ends."""
    works = by_kernel(BESIDE_THE_SUMS)
    tokens = 1024
    stored = tokens - 153
    assert works["backward"].launch._words[-4] == works["reduce_and_finish"].launch._words[-4] == stored  # type: ignore[attr-defined]
    adding, warps = 2 * 128 // 8, -(-(tokens - stored) * 10)  # four heads a warp
    assert works["reduce_and_finish"].launch._grid == adding + -(-warps // 8)  # type: ignore[attr-defined]
    one_after_the_other = {w.launch.instance.kernel: w.launch for w in prepared(BESIDE_THE_SUMS, overlaps=False)}  # type: ignore[attr-defined]
    assert "reduce" in one_after_the_other
    assert not one_after_the_other["backward"].instance.constants["DEFERS"]


def test_rows_of_sums_begin_at_multiples_of_32_bytes() -> None:
    """The sums are read 16 bytes at a time, whatever head_dim is."""
    reduce = by_kernel(Case("head_dim 6", head_dim=6, dtype=BF16))["reduce"]
    assert reduce.tensors[0].shape[1] == 16  # of q and of k six columns each


# --- the cache -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled; nothing really is."""
    sources: list[str] = []

    def compile_cubin(source: str, arch: str, log: Any = None) -> bytes:
        sources.append(f"{arch} {source}")
        return f"cubin of {source}".encode()

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compiler, "_nvrtc_version", lambda: "13.0")
    return sources


def test_cubins_are_kept(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "new"))
    for _ in range(2):
        assert compiler.cached_cubin("a", "sm_90") == b"cubin of a"
    assert compiler.cached_cubin("a", "sm_80") == compiler.cached_cubin("a", "sm_80")
    assert compiled == ["sm_90 a", "sm_80 a"]
    monkeypatch.setattr(compiler, "_nvrtc_version", lambda: "13.1")
    compiler.cached_cubin("a", "sm_90")
    assert len(compiled) == 3
    files = list((tmp_path / "new").iterdir())
    assert len(files) == 3
    assert all(file.suffix == ".cubin" for file in files)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "fusion_pass" / "cuda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler.cache_folder() == Path.home() / ".cache" / "fusion_pass" / "cuda"
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert compiler.cache_folder() == tmp_path / "mine"


def test_the_variable_is_no_setting_of_the_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unknown FUSION_PASS_* variables are errors of the pass's configuration; this one is known."""
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    assert FusionConfig.load() == FusionConfig()


def test_a_damaged_cubin_is_compiled_again(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    compiler.cached_cubin("damaged", "sm_90")
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"half of")

    def from_cubin(cubin: bytes) -> SimpleNamespace:
        if cubin == b"half of":
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        return SimpleNamespace(get_kernel=lambda name: (name, cubin))

    core = SimpleNamespace(ObjectCode=SimpleNamespace(from_cubin=from_cubin))
    monkeypatch.setattr(compiler.importlib, "import_module", lambda _: core)
    assert compiler.load("damaged", "sm_90", "kernel") == ("kernel", b"cubin of damaged")
    assert compiled == ["sm_90 damaged"] * 2


def test_a_cache_that_cannot_be_written_is_no_error(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file, not a folder"
    file.write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(file))
    assert compiler.cached_cubin("a", "sm_90") == b"cubin of a"
    assert compiler.cached_cubin("a", "sm_90") == b"cubin of a"
    assert len(compiled) == 2


def test_an_interrupted_write_leaves_no_cubin(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))

    def fail(source: str, target: Path) -> None:
        assert stat.S_ISREG(os.stat(source).st_mode)
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert compiler.cached_cubin("a", "sm_90") == b"cubin of a"
    assert list(tmp_path.iterdir()) == []


# --- refusals ------------------------------------------------------------------------------------------------------


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ImportError("No module named 'cuda.core'")

    monkeypatch.setattr(compiler, "_nvrtc_version", missing)
    reason = compiler.unavailable()
    assert reason is not None
    assert "cuda-core or cuda-bindings is not installed (No module named 'cuda.core')" in reason
    assert reason.endswith("Install fusion-pass[cuda].")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_cannot_be_named() -> None:
    with pytest.raises(RuntimeError, match="backend='cuda' cannot run here: there is no CUDA device"):
        registry.get("rope", "cuda")


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def reason(device: str = "cuda", head_dim: int = 128, **options: Any) -> str | None:
        shapes = {"x": (1, 8, 4, head_dim)}
        return cuda._supports(Request("rope", torch.device(device), {"x": BF16}, shapes, options))

    assert reason() is None
    assert reason(norm="rms", norm_scope="hidden") is None
    assert reason(device="cpu") == "the tensors are on cpu, it takes cuda."
    assert reason(head_dim=127) == "head_dim is 127, it takes even ones up to 512."
    capability = (7, 5)
    assert "older than sm_80" in str(reason())


def test_auto_asks_triton_first() -> None:
    names = [kernel.name for kernel in registry.kernels("rope")]
    assert names.index("triton") < names.index("cuda") < names.index("reference")


def test_what_is_not_supported_is_refused_when_named() -> None:
    x = torch.randn(1, 2, 4, 7)
    with pytest.raises(NotImplementedError, match="backend='cuda' cannot compute this: head_dim is 7"):
        forward_work([Stream(x, torch.empty_like(x))], None, Options())
