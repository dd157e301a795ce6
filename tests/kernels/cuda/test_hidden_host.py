"""What the host decides for a norm over the whole row: blocks, slots in shared memory, parameters, refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cuda_cases
import pytest
import torch
from cuda_cases import by_kernel
from hidden_cases import BF16, DOUBLE, FLOAT, HIDDEN, HIDDEN_CASES, MODELS, OLMO2_7B, SECTIONED
from norm_rope_cases import Case, Inputs, make_inputs
from torch import Tensor

from fusion_pass.kernels import cuda, registry
from fusion_pass.kernels.card import H200, Card
from fusion_pass.kernels.choice import backend as measured
from fusion_pass.kernels.cuda import hidden, launch
from fusion_pass.kernels.cuda.instance import heads_per_warp
from fusion_pass.kernels.cuda.norm_rope import forward_work
from fusion_pass.kernels.options import Options
from fusion_pass.kernels.registry import Request
from fusion_pass.kernels.streams import Stream

A100 = Card(80, 2039)
OPTIONS: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "norm_scope": "hidden"}


def constants(case: Case, kernel: str, card: Card = H200) -> dict[str, Any]:
    return dict(by_kernel(case, card)[f"hidden_{kernel}"].launch.instance.constants)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", HIDDEN_CASES, ids=str)
def test_a_block_holds_every_head_of_a_token_once(case: Case) -> None:
    """`Team` of source/hidden.cuh: whole warps of one stream, no more than the registers are enough for."""
    for kernel in ("forward", "backward"):
        found = constants(case, kernel)
        a_warp = heads_per_warp(found) * found["UNROLL"]
        assert found["WARPS"] == -(-case.heads // a_warp) + -(-case.kv_heads // a_warp)
        assert found["WARPS"] <= hidden.MOST_WARPS[found["UNROLL"] * found["CHUNKS"]]


@pytest.mark.parametrize(
    ("heads", "itemsize", "forward", "backward"),
    [
        ((16, 16), 2, (1, 8), (1, 8)),
        ((32, 32), 2, (2, 8), (1, 16)),
        ((40, 8), 2, (2, 6), (1, 12)),
        ((40, 40), 2, (2, 10), (2, 10)),
        ((64, 64), 2, (4, 8), (4, 8)),
        ((32, 32), 4, (4, 8), (4, 8)),
    ],
)
def test_longer_rows_are_several_slots_a_thread(
    heads: tuple[int, int], itemsize: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """`UNROLL` and warps."""
    case = Case("", *heads, 128, 1, 3, {2: BF16, 4: FLOAT}[itemsize], options=HIDDEN)
    for kernel, expected in (("forward", forward), ("backward", backward)):
        found = constants(case, kernel)
        assert (found["UNROLL"], found["WARPS"]) == expected


@pytest.mark.parametrize("case", HIDDEN_CASES, ids=str)
def test_slots_have_room(case: Case) -> None:
    """Of each team's row, and of a row of either table where those come with it."""
    for kernel, kinds in (("forward", 1), ("backward", 2)):
        found = constants(case, kernel)
        shared = by_kernel(case, H200)[f"hidden_{kernel}"].launch._shared  # type: ignore[attr-defined]
        row = kinds * (case.heads + case.kv_heads) * case.head_dim * case.dtype.itemsize
        entries = found["ROTARY_DIM"] // (1 if case.per_lane else 2)
        tables = 4 * entries * case.table_dtype.itemsize if found["TABLES"] == "STAGED" else 0
        assert shared == found["STAGES"] * (row + tables)
        assert found["BLOCKS"] * shared <= hidden.SHARED_BYTES


@pytest.mark.parametrize(
    ("change", "tables"),
    [
        ({}, "STAGED"),
        ({"positions": "shared"}, "LAST"),
        ({"options": {**HIDDEN, **SECTIONED}}, "LAST"),
        ({"options": {**HIDDEN, "rotary_dim": 0}}, "LAST"),
    ],
)
def test_tables_come_with_the_rows(change: dict[str, Any], tables: str) -> None:
    """By copies of whole rows; what is gathered, or put together, is loaded."""
    assert constants(replace(OLMO2_7B, **change), "backward")["TABLES"] == tables


def test_tokens_come_through_shared_memory_where_it_was_measured() -> None:
    for case in MODELS:
        assert constants(case, "forward")["STAGES"] > 0
        assert constants(case, "backward")["STAGES"] > 0
        assert constants(case, "backward", A100)["STAGES"] == 0
    of_8_bytes = Case("", 32, 32, 4, 1, 3, BF16, options=HIDDEN)
    assert constants(of_8_bytes, "forward")["STAGES"] == 0


def test_a_forward_of_many_tokens_has_less_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that run far ahead of the writes slow the memory down, where there is much of either."""
    few = constants(OLMO2_7B, "forward")["STAGES"]
    monkeypatch.setattr(hidden, "FEW_BYTES", 0)
    assert constants(OLMO2_7B, "forward")["STAGES"] < few


@pytest.mark.parametrize(("gaps", "heads_a_copy"), [(False, 16), (True, 1)])
def test_a_copy_has_heads_that_adjoin(gaps: bool, heads_a_copy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gaps:

        def dense(case: Case, device: torch.device) -> Inputs:
            inputs = make_inputs(case, device)
            inputs.x = [x.detach().contiguous() for x in inputs.x]
            return inputs

        monkeypatch.setattr(cuda_cases, "make_inputs", dense)
    assert constants(OLMO2_7B, "backward")["HEADS_A_COPY"] == heads_a_copy


@pytest.mark.parametrize(("card", "blocks"), [(H200, 132), (A100, 600)])
def test_blocks_walk_where_tokens_are_on_their_way(card: Card, blocks: int) -> None:
    """Else there is one a token, which asks for nothing ahead."""
    forward = by_kernel(OLMO2_7B, card)["hidden_forward"].launch
    resident = forward.instance.constants["BLOCKS"] if card == H200 else 1  # type: ignore[attr-defined]
    assert forward._grid == blocks * resident  # type: ignore[attr-defined]
    assert by_kernel(OLMO2_7B, card)["hidden_backward"].launch._grid == 132  # type: ignore[attr-defined]


def test_gradients_of_weights_are_written_where_they_are_needed() -> None:
    """One row of all heads, as the parameter is: nothing is copied behind the launches."""
    reduce = by_kernel(OLMO2_7B, H200)["reduce"]
    partial, *targets = reduce.tensors
    assert partial.shape == (132, 2 * 4096)
    assert [t.shape for t in targets] == [(4096,), (4096,)]


def test_v_is_moved_beside_the_sums() -> None:
    works = by_kernel(Case("", 16, 4, 128, 1, 150, BF16, packing="blocked", options=HIDDEN), H200)
    assert "reduce_and_move" in works
    assert works["hidden_backward"].launch.instance.constants["V_HEADS"] == 0  # type: ignore[attr-defined]


def test_shared_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 48 KB a block has to be; and the launch says how much."""
    calls: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(handle=7)

    def attribute(*given: Any) -> int:
        calls.append(given)
        return 0

    driver = SimpleNamespace(cuKernelSetAttribute=attribute, cuLaunchKernelEx=lambda *_: 0)
    monkeypatch.setattr(launch, "_current_device", lambda: None)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "load", lambda *_: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    made = by_kernel(OLMO2_7B, H200)["hidden_backward"].launch
    bytes_ = made._shared  # type: ignore[attr-defined]
    assert bytes_ > 48 * 1024
    made.here([16] * len(made._slots))  # type: ignore[attr-defined, call-arg]
    assert [call[:3] for call in calls] == [(8, bytes_, 7)]
    assert made._configs[0][0].shared_bytes == bytes_  # type: ignore[attr-defined]
    driver.cuKernelSetAttribute = lambda *_: 1
    made._functions.clear()  # type: ignore[attr-defined]
    with pytest.raises(
        RuntimeError, match="cuKernelSetAttribute of norm_rope_hidden_backward failed with CUDA error 1"
    ):
        made.here([16] * len(made._slots))  # type: ignore[attr-defined, call-arg]


# --- refusals ------------------------------------------------------------------------------------------------------

TOO_LONG = (
    "norm_scope is 'hidden', and the 128 + 128 heads of 128 lanes that a token has, 2 bytes each, are more than a "
    "block holds."
)


@pytest.mark.parametrize(
    ("op", "shapes", "options"),
    [
        ("qk_norm_rope", {"q": (1, 8, 128, 128), "k": (1, 8, 128, 128)}, {}),
        ("qkv_norm_rope", {"qkv": (1, 8, 384 * 128)}, {"num_heads": 128, "num_kv_heads": 128, "head_dim": 128}),
    ],
)
def test_rows_that_no_block_holds_are_refused(
    op: str, shapes: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def reason(dtype: torch.dtype, **more: Any) -> str | None:
        dtypes = dict.fromkeys(shapes, dtype)
        return cuda._supports(Request(op, torch.device("cuda"), dtypes, shapes, {**OPTIONS, **options, **more}))

    assert reason(BF16) == TOO_LONG
    assert "8 bytes each" in str(reason(DOUBLE))
    assert reason(BF16, norm_scope="head") is None


def test_half_of_them_fit() -> None:
    assert hidden.unsupported(Options(**OPTIONS), 128, (64, 64), 2) is None
    assert hidden.unsupported(Options(**OPTIONS), 128, (128, 128), 2) == TOO_LONG


def test_named_for_such_rows_it_says_so() -> None:
    x = torch.empty(1, 2, 256, 128, dtype=BF16)
    with pytest.raises(NotImplementedError, match="backend='cuda' cannot compute this: norm_scope is 'hidden', and"):
        forward_work([Stream(x, torch.empty_like(x))], None, Options(**OPTIONS))


@pytest.mark.parametrize(("heads", "asked"), [(64, True), (128, False)])
def test_the_faster_of_the_two_is_triton_there(heads: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request does not always say how many heads k has: the call does, and is not handed to CUDA C++."""
    taken: list[str] = []

    class Backend:
        def __init__(self, name: str) -> None:
            self.name = name

        def forward(self, *_: Any) -> None:
            taken.append(self.name)

    monkeypatch.setattr(measured, "_backend", Backend)
    monkeypatch.setattr(measured, "choice", lambda *_: "cuda")
    streams = [Stream(x := _empty(count), torch.empty_like(x)) for count in (64, heads)]
    measured.forward(streams, None, Options(**OPTIONS))
    assert taken == ["cuda" if asked else "triton"]
    assert registry.kernels("qk_norm_rope")[0].name == "measured"


def _empty(heads: int) -> Tensor:
    return torch.empty(1, 2, heads, 128, dtype=BF16)
