"""What the host decides before a launch: kind of mask and band, chunks of heads, the assembler, tensor maps, and the
reasons for a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from attention_oracle import visible

from fusion_pass.kernels.attention_ops import problem_of
from fusion_pass.kernels.hopper import _gate, _supports
from fusion_pass.kernels.hopper.templates import forward_template
from fusion_pass.kernels.registry import Kernel, Request, kernels

pytest.importorskip("triton")


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5), (1, 4)])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (0, 0), (100, 3)])
def test_band_is_the_mask(queries: int, keys: int, causal: str, window: tuple[int, int]) -> None:
    from fusion_pass.kernels.hopper.plans import Call

    q, k = torch.empty(1, queries, 1, 8), torch.empty(1, keys, 1, 8)
    conditions = {"causal": causal, "window_left": window[0], "window_right": window[1]}
    call = Call.of(problem_of(q, k, k, **conditions))  # type: ignore[arg-type]
    low, high, *strides = call.band(3)
    assert strides == [0, 0]
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    assert torch.equal((key >= row + low) & (key <= row + high), visible(q, k, **conditions)[0, 0])
    expected = "band" if window[0] != -1 else "right" if causal != "none" or window[1] != -1 or keys % 4 else "none"
    assert call.mask(4) == expected


def test_chunks_of_heads() -> None:
    from fusion_pass.kernels.hopper.plans import _chunk

    assert [_chunk(heads, 4) for heads in (1, 4, 6, 7, 64)] == [1, 4, 3, 1, 4]
    assert _chunk(70_002, 1) == 2  # 65535 chunks are the most


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # batch, tokens, query heads, key heads, head_dim. K and V of 32 MB together,
        ((4, 4096, 16, 16, 128), 16),
        ((2, 8192, 32, 8, 128), 32),
        ((16, 1024, 8, 8, 256), 32),
        # but of four key heads at least,
        ((1, 32768, 32, 8, 128), 16),
        # and at head_dim 256 of 64 MB from 2k tokens on.
        ((8, 2048, 8, 8, 256), 32),
        ((4, 4096, 8, 8, 256), 16),
        ((1, 16384, 8, 8, 256), 4),
    ],
)
def test_heads_of_a_forward(sizes: tuple[int, int, int, int, int], expected: int) -> None:
    """How many query heads run together."""
    from fusion_pass.kernels.hopper.plans import Call, forward_template_of, heads_of_forward

    batch, tokens, heads, kv_heads, dim = sizes
    q, k = (torch.empty(batch, tokens, n, dim, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))
    call = Call.of(problem_of(q, k, k, causal="top_left"))
    template = forward_template_of(call)
    assert template is not None
    assert heads_of_forward(call, template) == expected


@pytest.fixture
def order_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, int]]]:
    """`plans.order_of` of a problem on 132 multiprocessors."""
    from fusion_pass.kernels.hopper import plans

    monkeypatch.setattr(plans, "_multiprocessors", lambda _device: 132)

    def order(batch: int, keys: int, heads: int, kv_heads: int, **options: object) -> tuple[int, int]:
        dim = options.pop("head_dim", 128)
        q, k = (torch.empty(batch, keys, n, dim, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))  # type: ignore[call-overload]
        return plans.order_of(plans.Call.of(problem_of(q, k, k, **options)))  # type: ignore[arg-type]

    plans.order_of.cache_clear()
    yield order
    plans.order_of.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Few and long blocks of keys: the order that leaves nobody idle in the end, with the fewest parts.
        ((2, 4096, 32, 8), {"causal": "top_left"}, (1, 4)),
        ((1, 4096, 32, 8), {"causal": "top_left"}, (1, 4)),
        ((1, 4096, 32, 8), {"causal": "top_left", "head_dim": 64}, (1, 4)),
        ((1, 4096, 32, 1), {"causal": "top_left"}, (8, 4)),
        ((1, 4096, 12, 2), {"causal": "top_left"}, (6, 6)),
        ((4, 1024, 32, 8), {"causal": "top_left"}, (1, 16)),
        ((4, 2048, 32, 8), {"causal": "bottom_right"}, (1, 8)),
        ((1, 2048, 16, 16), {"causal": "top_left", "head_dim": 256}, (1, 4)),
        # Other numbers of heads would do no better.
        ((2, 8192, 32, 8), {"causal": "top_left"}, (1, 2)),
        ((1, 16384, 32, 8), {"causal": "top_left"}, (1, 2)),
        # Many blocks.
        ((4, 4096, 16, 16), {"causal": "top_left"}, (1, 2)),
        ((2, 8192, 64, 8), {"causal": "top_left"}, (2, 2)),
        ((1, 32768, 32, 8), {"causal": "top_left"}, (4, 1)),
        # Blocks of equal length: as many parts as it takes to give every multiprocessor one.
        ((1, 4096, 32, 1), {}, (4, 4)),
        ((1, 4096, 28, 4), {}, (1, 4)),
        ((1, 2048, 32, 8), {}, (1, 4)),
        ((1, 256, 6, 2), {}, (3, 3)),
        ((2, 8192, 64, 8), {}, (1, 4)),
        # A window leaves blocks of equal length but the last.
        ((1, 2048, 32, 8), {"causal": "top_left", "window_left": 511}, (1, 1)),
        ((1, 8192, 32, 8), {"causal": "top_left", "window_left": 4095}, (1, 4)),
        ((2, 8192, 32, 8), {"causal": "top_left", "window_left": 1023}, (1, 2)),
        # Where the model does not know the lengths: three and a half blocks a multiprocessor.
        ((2, 4096, 32, 8), {"causal": "top_left", "deterministic": True}, (4, 2)),
        ((1, 4096, 16, 16), {"deterministic": True}, (1, 4)),
        ((1, 4096, 32, 8), {"causal": "top_left", "window_left": 1023, "deterministic": True}, (2, 2)),
        # It does if they are few.
        ((1, 4096, 32, 8), {"causal": "top_left", "deterministic": True}, (1, 4)),
        ((1, 4096, 16, 16), {"causal": "top_left", "deterministic": True}, (1, 4)),
    ],
)
def test_order_of_blocks(
    sizes: tuple[int, int, int, int],
    options: dict[str, object],
    expected: tuple[int, int],
    order_of: Callable[..., tuple[int, int]],
) -> None:
    """Over how many parts a group is spread, and how many heads run together."""
    assert order_of(*sizes, **options) == expected


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (1024, 1024, {}),
        (1024, 1024, {"causal": "top_left"}),
        (1000, 640, {"causal": "bottom_right"}),
        (640, 1024, {"causal": "bottom_right", "window_left": 200}),
        (1024, 1024, {"window_left": 100, "window_right": 30}),
        (1024, 256, {"causal": "top_left", "window_left": 63}),
    ],
)
def test_tiles_of_blocks(queries: int, keys: int, options: dict[str, object]) -> None:
    from fusion_pass.kernels.hopper import plans

    q, k = (torch.empty(1, n, 2, 128, device="meta", dtype=torch.bfloat16) for n in (queries, keys))
    call = plans.Call.of(problem_of(q, k, k, **options))  # type: ignore[arg-type]
    low, high, *_ = call.band(0)
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    seen = (distance >= low) & (distance <= high)
    expected = [sum(bool(tile.any()) for tile in block.split(64)) for block in seen.split(128, 1)]
    assert list(plans._tiles_of_blocks(call)) == expected


def test_time_of_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two multiprocessors and two heads of three blocks of 3, 2 and 1 pairs of tiles, each 3 tiles' time longer."""
    from fusion_pass.kernels.hopper import plans

    monkeypatch.setattr(plans, "_multiprocessors", lambda _device: 2)
    q, k = (torch.empty(1, 384, n, 128, device="meta", dtype=torch.bfloat16) for n in (2, 2))
    call = plans.Call.of(problem_of(q, k, k, causal="top_left"))
    # Blocks of 9, 7 and 5. By heads: 9 and 7 + 5, then 9, 7 and 5 as they come. Together: 9 and 9, 7 and 7, 5 and 5.
    assert plans._time_of(call, (1, 2)) == 21
    assert plans._time_of(call, (1, 1)) == 23


def test_map_of_spread_rows() -> None:
    """Row 8 a + 2 j + h of a tile is row 8 a + 4 h + j of the accumulator of dQ."""
    from fusion_pass.kernels.hopper.descriptors import spread_rows_map

    found = spread_rows_map(2, 16, 64, (1, 2, 4, 2, 32))
    rows = torch.arange(2 * 16)[:, None].expand(-1, 64).contiguous()
    seen = rows.as_strided(found.shape, found.strides)[..., 0].reshape(2, 16)
    assert seen[1].tolist() == [16 + 8 * (r // 8) + 4 * (r % 2) + r % 8 // 2 for r in range(16)]
    assert found.block == [1, 2, 4, 2, 32]


def test_assembler_is_chosen_without_a_trace() -> None:
    from triton import knobs

    from fusion_pass.kernels.hopper import assembler

    chosen = assembler.choose()
    assert isinstance(chosen, assembler.Assembler)
    assert tuple(map(int, chosen.version.split("."))) >= assembler.OLDEST
    before = dict(os.environ), knobs.nvidia.ptxas.path
    with assembler.assembling_with(chosen):
        from triton.backends.nvidia.compiler import get_ptxas

        assert get_ptxas(90).path == chosen.path
    assert (dict(os.environ), knobs.nvidia.ptxas.path) == before


def test_old_assemblers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_pass.kernels.hopper import assembler

    monkeypatch.setattr(assembler, "OLDEST", (99, 0))
    assembler.choose.cache_clear()
    try:
        assert "ptxas 99.0 or newer" in str(assembler.choose())
    finally:
        assembler.choose.cache_clear()


def test_what_tensor_maps_can_read() -> None:
    from fusion_pass.kernels.hopper.descriptors import fits, readable, tensor_map

    x = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16)
    assert fits(x)
    assert fits(x.transpose(1, 2))
    assert fits(x[:, :1, :1])  # the stride of an axis of one element does not matter
    assert not fits(x[..., 1:])  # misaligned
    assert not fits(x[:, :, :1].expand(2, 5, 3, 64))  # stride 0
    assert not fits(x.transpose(2, 3))
    assert fits(readable(x[..., 1:57]))
    described = tensor_map(x.shape, x.stride(), x.dtype, 64, 64)
    assert (described.shape, described.strides) == ([2, 3, 5, 64], [960, 64, 192, 1])


def request(**changes: object) -> Request:
    shapes = dict.fromkeys("qkv", (2, 128, 4, 64)) | changes.pop("shapes", {})  # type: ignore[operator]
    dtypes = dict.fromkeys("qkv", torch.bfloat16) | changes.pop("dtypes", {})  # type: ignore[operator]
    op = str(changes.pop("op", "attention"))
    return Request(op=op, device=torch.device("cuda", 0), shapes=shapes, dtypes=dtypes, options=changes)


LONG = dict.fromkeys("qkv", (1, 16384, 4, 64))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (request(), None),
        (request(causal="bottom_right", window_left=3, softcap=20.0), None),
        (request(dtypes={"cu_seqlens_q": torch.int32}), None),
        (request(dtypes={"q": torch.float32}), "q is torch.float32"),
        (request(dtypes={"v": torch.float16}), "v is torch.float16"),
        (request(dtypes={"mask": torch.bool}, shapes={"mask": (2, 1, 128, 128)}), None),
        (request(dtypes={"mask": torch.bool}, shapes={"mask": (128, 128)}), None),
        (request(dtypes={"mask": torch.bool}, shapes={"mask": (2, 4, 128, 128)}), None),
        (request(dtypes={"mask": torch.bool, "q_segment_ids": torch.int32}, shapes={"mask": (128, 128)}), None),
        (request(dtypes={"mask": torch.bool, "cu_seqlens_q": torch.int32}, shapes={"mask": (128,)}), None),
        (request(dtypes={"mask": torch.float32}, shapes={"mask": (2, 1, 1, 128)}), None),
        (request(dtypes={"mask": torch.float64}, shapes={"mask": (2, 1, 1, 128)}), "mask is torch.float64"),
        (
            request(
                dtypes={"mask": torch.bfloat16, "sinks": torch.float32}, shapes={"mask": (128, 128), "sinks": (4,)}
            ),
            "sinks are given beside an additive mask",
        ),
        (
            request(
                dtypes={"mask": torch.float32}, shapes=dict.fromkeys("qkv", (1, 16384, 4, 64)) | {"mask": (4, 1, 1)}
            ),
            "it copies an additive mask, and this one would take 4.0 GiB",
        ),
        (request(dtypes={"mask": torch.bool}, shapes={"mask": (2, 1, 1, 128)}), None),
        (request(dtypes={"q_segment_ids": torch.int32}), None),
        (request(scale=-1.0), "scale is -1.0"),
        (request(shapes={"v": (2, 128, 4, 60)}), "head_dim of v is 60"),
        (request(shapes={"q": (2, 128, 4, 264)}), "head_dim of q is 264"),
    ],
)
def test_reasons(call: Request, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    given = _supports(call)
    assert given == reason if reason is None else str(given).startswith(reason)


@pytest.mark.parametrize(
    ("op", "keys", "head_dim", "causal", "gated"),
    [
        ("attention", 1024, 256, "top_left", False),
        ("attention", 4096, 160, "none", True),
        ("attention", 16384, 160, "none", False),
        ("attention", 4096, 192, "none", True),
        ("attention", 4096, 128, "top_left", False),
        ("attention", 1024, 128, "top_left", False),
        ("attention", 1024, 64, "top_left", False),
        ("attention", 1024, 128, "none", False),
        ("attention_backward", 4096, 256, "none", False),
        ("attention_backward", 4096, 64, "none", False),
        ("attention_backward", 4096, 64, "top_left", False),
        ("attention_backward", 1024, 128, "top_left", False),
    ],
)
def test_what_is_left_to_cudnn(
    op: str, keys: int, head_dim: int, causal: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cuDNN is faster, and can be used."""
    cudnn = Kernel("sdpa", frozenset({op}), load=lambda: None, available=lambda: None)
    monkeypatch.setattr("fusion_pass.kernels.hopper.kernels", lambda _: (cudnn,))
    call = replace(request(shapes=dict.fromkeys("qkv", (1, keys, 4, head_dim)), causal=causal), op=op)
    assert (_gate(call) is not None) == gated
    cudnn = replace(cudnn, supports=lambda _: "a mask is given.")
    assert _gate(call) is None


@pytest.mark.parametrize(
    ("keys", "causal", "gated"),
    [(4096, "top_left", True), (None, "top_left", True), (2048, "top_left", False), (4096, "none", False)],
)
def test_backwards_of_192_and_128_lanes_that_are_left_to_cudnn(
    keys: int | None, causal: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the `sdpa` back end says it supports, as on a card that has cuDNN."""
    sdpa = next(kernel for kernel in kernels("attention_backward") if kernel.name == "sdpa")
    cudnn = replace(sdpa, available=lambda: None, gate=lambda _: None)
    monkeypatch.setattr("fusion_pass.kernels.hopper.kernels", lambda _: (cudnn,))
    shapes = {"q": (4, keys, 16, 192), "k": (4, keys, 16, 192), "v": (4, keys, 16, 128)}
    call = request(shapes=shapes, causal=causal)
    assert (_gate(replace(call, op="attention_backward")) is not None) == gated
    assert _gate(call) is None


@pytest.mark.parametrize(
    ("head_dim", "mask", "uneven", "queries", "heads", "sinks", "tile", "skip_hidden", "programs"),
    [
        (64, "right", True, 8192, 64, False, (192, 128), True, 1),
        (64, "right", True, 8192, 64, True, (128, 128), False, 1),  # the long tile would spill beside sinks
        (64, "right", True, 8191, 64, False, (128, 128), False, 1),
        (64, "right", True, 1025, 512, False, (128, 128), False, 1),
        (64, "right", True, 1024, 512, False, (128, 64), True, 2),
        (64, "right", True, 1024, 128, False, (128, 64), True, 2),
        (64, "right", True, 1024, 127, False, (128, 128), False, 1),  # too few tiles for two at a time
        (64, "right", True, 512, 512, True, (128, 64), True, 2),
        (64, "rows", True, 8192, 64, False, (128, 128), False, 1),
        (64, "rows", True, 1024, 512, False, (128, 128), False, 1),
        (64, "right", False, 8192, 64, False, (192, 128), False, 1),  # every key, of which the last block is ragged
        (64, "right", False, 1024, 512, False, (128, 128), False, 1),
        (128, "right", True, 8192, 64, False, (128, 128), False, 1),
        (128, "right", True, 1024, 512, False, (128, 128), False, 1),
    ],
)
def test_tile_by_length(
    head_dim: int,
    mask: str,
    uneven: bool,
    queries: int,
    heads: int,
    sinks: bool,
    tile: tuple[int, int],
    skip_hidden: bool,
    programs: int,
) -> None:
    found = forward_template(
        head_dim, head_dim, mask=mask, softcap=False, sinks=sinks, uneven=uneven, queries=queries, heads=heads
    )
    assert found is not None
    assert ((found.block_m, found.block_n), found.skip_hidden, found.programs) == (tile, skip_hidden, programs)


@pytest.mark.parametrize(("queries", "registers", "at_launch"), [(1024, 104, 80), (4096, 240, 168), (8192, 160, 128)])
def test_registers(queries: int, registers: int, at_launch: int) -> None:
    """What the warps of a multiprocessor may have together: after `setmaxnreg` no more than at launch."""
    found = forward_template(64, 64, mask="right", softcap=False, sinks=False, uneven=True, queries=queries, heads=512)
    assert found is not None
    assert (found.registers, found.max_registers) == (registers, at_launch)
    threads = 128 * (found.warpgroups + 1)
    assert 128 * (found.warpgroups * registers + 24) <= threads * at_launch
    assert found.programs * threads * at_launch <= 65536


@pytest.mark.parametrize(
    ("programs", "together", "blocks", "expected"),
    [(132, 2, 8, (4, 18)), (132, 4, 8, (4, 20)), (132, 2, 32, (2, 6)), (132, 1, 128, (1, 2)), (3, 4, 1, (32, 32))],
)
def test_heads_are_zeroed_before_they_are_drawn(
    programs: int, together: int, blocks: int, expected: tuple[int, int]
) -> None:
    """By blocks of keys that are drawn before those that add; the blocks that run first find zeros."""
    from fusion_pass.kernels.hopper.plans import heads_ahead

    ahead, ready = heads_ahead(programs, together, blocks)
    assert (ahead, ready) == expected
    drawn = [chunk * together + i % together for chunk in range(40) for i in range(together * blocks)]
    assert max(drawn[:programs]) < ready
    for head in range(ready, ready + 2 * ahead):
        last_zeros = max(at for at, other in enumerate(drawn) if other == head - ahead)
        assert last_zeros < drawn.index(head)


def test_a_mask_of_every_head_has_blocks_of_one_query_head() -> None:
    """Its planes, and the thread blocks of the backward, which each read one of them."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper.plans import Call, parts_of

    q, k = torch.zeros(2, 64, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 2, 64, dtype=torch.bfloat16)
    for batch, heads, planes in ((1, 8, (0, 1)), (2, 8, (8, 1)), (2, 1, (1, 0)), (1, 1, (0, 0))):
        call = Call.of(problem_of(q, k, k, mask=torch.ones(batch, heads, 64, 64, dtype=torch.bool)))
        assert (call.data, call.band(1)[2:]) == ("bits", planes)
        if heads > 1:
            assert parts_of(call) == 4


@pytest.mark.parametrize(("causal", "parts"), [("top_left", 4), ("none", 1)])
def test_deterministic_causal_blocks_visit_one_query_head(
    causal: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import plans

    monkeypatch.setattr(plans, "_multiprocessors", lambda _device: 132)
    q, k = (torch.empty(2, 8192, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    call = plans.Call.of(problem_of(q, k, k, causal=causal, deterministic=True))
    assert plans.order_of.__wrapped__(call)[0] == parts


@pytest.mark.parametrize(
    ("shape", "more", "forward", "backward"),
    [
        ((2, 1, 128, 128), {}, True, False),
        ((1, 1, 128, 128), {}, False, False),
        ((128, 128), {}, False, False),
        ((1, 1, 1, 128), {}, False, False),
        ((1, 2, 128, 128), {}, True, False),
        ((1, 4, 128, 128), {}, True, True),
        ((2, 4, 128, 128), {}, True, True),
        ((2, 128, 128), {"q_segment_ids": (2, 128)}, True, True),
    ],
)
def test_numbers_of_every_head_are_left_to_others(
    shape: tuple[int, ...],
    more: dict[str, tuple[int, ...]],
    forward: bool,
    backward: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To copy them takes longer than the attention. Booleans are taken."""
    monkeypatch.setattr("fusion_pass.kernels.hopper.kernels", lambda _: ())
    for op, sharing, gated in (("attention", 8, forward), ("attention_backward", 4, backward)):
        for dtype, expected in ((torch.bfloat16, gated), (torch.bool, False)):
            dtypes = {"mask": dtype, **dict.fromkeys(more, torch.int64)}
            given = _gate(request(op=op, dtypes=dtypes, shapes={"mask": shape, **more}))
            assert (f"fewer than {sharing} query heads share" in (given or "")) == expected


def test_other_chips_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert _supports(request()) == "these tensors are on a GPU that is not sm_90."
