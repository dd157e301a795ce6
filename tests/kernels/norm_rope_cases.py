"""Variants of the norm + rotation operators, and what they mean written a second time: lane by lane, as a model's
eager code would round.

Nothing here uses `kernels/reference.py`; in float64 this is the oracle, in the inputs' dtype it is what a kernel has
to be as exact as.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion_pass.kernels  # noqa: F401  registers the operators


@dataclass(frozen=True)
class Case:
    """One variant. `packing` None: separate q and k. `entries` None: one table entry a pair."""

    name: str
    heads: int = 3
    kv_heads: int = 2
    head_dim: int = 16
    batch: int = 2
    sequence: int = 3
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.float32
    packing: str | None = None
    affine: str = "w"
    per_head: bool = False
    per_lane: bool = False
    table_batch: int = 1
    positions: str = ""
    memory: str = "bshd"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def all_options(self) -> dict[str, Any]:
        return {"norm": "rms", "eps": 1e-5, "rotary_dim": self.head_dim, **self.options}


@dataclass
class Inputs:
    x: list[Tensor]  # [qkv] or [q, k]
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    parameters: list[Tensor | None]  # q_weight, k_weight, q_bias, k_bias

    def tensors(self) -> list[Tensor | None]:
        return [*self.x, self.cos, self.sin, self.positions, *self.parameters]

    def differentiable(self) -> list[Tensor]:
        return [t for t in self.tensors() if t is not None and t.is_floating_point()]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        def move(t: Tensor | None) -> Tensor | None:
            if t is None or not t.is_floating_point():
                return t if t is None else t.to(device)
            return t.detach().to(device, dtype, copy=True).requires_grad_()

        return Inputs(
            [move(t) for t in self.x],  # type: ignore[misc]
            move(self.cos),
            move(self.sin),
            move(self.positions),
            [move(p) for p in self.parameters],
        )


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Fresh random inputs; every activation is a view into a buffer of NaN, so that a read outside of it shows."""
    generator = torch.Generator().manual_seed(seed)
    options = case.all_options

    def random(*shape: int, dtype: torch.dtype, offset: float = 0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) + offset).to(dtype).to(device)

    def activation(heads: int) -> Tensor:
        shape = (case.batch, case.sequence, heads, case.head_dim)
        order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[case.memory]
        sizes = [shape[i] for i in order]
        buffer = torch.full(
            [sizes[0], sizes[1], sizes[2] + 2, sizes[3] + 16], float("nan"), dtype=case.dtype, device=device
        )
        view = buffer[:, :, 1:-1, 8:-8].permute([order.index(i) for i in range(4)])
        with torch.no_grad():
            view.copy_(random(*shape, dtype=case.dtype))
        return view.detach().requires_grad_()

    if case.packing is None:
        x = [activation(case.heads), activation(case.kv_heads)]
    else:
        width = (case.heads + 2 * case.kv_heads) * case.head_dim
        buffer = torch.full((case.batch, case.sequence, width + 16), float("nan"), dtype=case.dtype, device=device)
        buffer[..., 8:-8] = random(case.batch, case.sequence, width, dtype=case.dtype)
        x = [buffer[..., 8:-8].detach().requires_grad_()]
    cos = sin = positions = None
    rotary = options["rotary_dim"]
    if rotary:
        rows = (3,) if options.get("mrope_layout", "none") != "none" else ()
        entries = rotary if case.per_lane else rotary // 2
        shape = (11, entries) if case.positions else (*rows, case.table_batch, case.sequence, entries)
        # Not points of the unit circle: the operator must not assume cos^2 + sin^2 = 1.
        cos = random(*shape, dtype=case.table_dtype).requires_grad_()
        sin = random(*shape, dtype=case.table_dtype).requires_grad_()
        if case.positions:
            tokens = (case.sequence,) if case.positions == "shared" else (case.batch, case.sequence)
            positions = torch.randint(0, 11, (*rows, *tokens), generator=generator).to(device)
    parameters: list[Tensor | None] = []
    for kind in "wb":
        for heads in (case.heads, case.kv_heads):
            if kind not in case.affine or options["norm"] == "none":
                parameters.append(None)
                continue
            hidden = options.get("norm_scope") == "hidden"
            size = (heads * case.head_dim,) if hidden else (heads, case.head_dim) if case.per_head else (case.head_dim,)
            parameters.append(random(*size, dtype=case.dtype, offset=0.5).requires_grad_())
    return Inputs(x, cos, sin, positions, parameters)


def call(case: Case, inputs: Inputs, backend: str) -> tuple[Tensor, ...]:
    """The operator."""
    ops = torch.ops.fusion_pass
    if case.packing is None:
        return ops.qk_norm_rope(*inputs.tensors(), **case.all_options, backend=backend)
    sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim, "packing": case.packing}
    return ops.qkv_norm_rope(*inputs.tensors(), **sizes, **case.all_options, backend=backend)


def model(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """The same in plain PyTorch: float32 inside the norm, the inputs' dtype everywhere else."""
    if case.packing is None:
        q, k = inputs.x
        v = None
    else:
        (qkv,) = inputs.x
        batch, sequence, _ = qkv.shape
        if case.packing == "blocked":
            heads = qkv.view(batch, sequence, -1, case.head_dim)
            q, k, v = heads[:, :, : case.heads], heads[:, :, case.heads : -case.kv_heads], heads[:, :, -case.kv_heads :]
        else:
            group = case.heads // case.kv_heads
            rows = qkv.view(batch, sequence, case.kv_heads, group + 2, case.head_dim)
            q, k, v = rows[..., :group, :].flatten(2, 3), rows[..., group, :], rows[..., group + 1, :]
    qw, kw, qb, kb = inputs.parameters
    tables = _lane_tables(case, inputs)
    results = []
    for x, weight, bias in ((q, qw, qb), (k, kw, kb)):
        options = case.all_options
        if options.get("norm_first", True):
            y = _rotate(_norm(x, weight, bias, options), tables, options)
        else:
            y = _norm(_rotate(x, tables, options), weight, bias, options)
        results.append(y.to(options.get("out_dtype") or x.dtype))
    return (*results, v) if v is not None else tuple(results)


def _lane_tables(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """cos and sin of every lane of the result, [B, S, 1, R], one lane at a time."""
    options = case.all_options
    rotary = options["rotary_dim"]
    if not rotary:
        return None
    layout, section = options.get("mrope_layout", "none"), options.get("mrope_section", ())
    adjacent = options.get("pairing", "halves") == "adjacent"
    result = []
    for table in (inputs.cos, inputs.sin):
        assert table is not None
        if inputs.positions is not None:
            table = table[inputs.positions]
            if inputs.positions.dim() == (1 if layout == "none" else 2):
                table = table.unsqueeze(-3)
        lanes = []
        for lane in range(rotary):
            pair = lane // 2 if adjacent else lane % (rotary // 2)
            row = table
            if layout == "sectioned":
                row = table[0 if pair < section[0] else 1 if pair < section[0] + section[1] else 2]
            elif layout == "interleaved":
                row = table[0]
                for axis, start in ((1, 1), (2, 2)):
                    if pair in range(start, 3 * section[axis], 3):
                        row = table[axis]
            lanes.append(row[..., lane if case.per_lane else pair])
        result.append(torch.stack(lanes, -1).expand(case.batch, case.sequence, rotary).unsqueeze(2))
    return result[0], result[1]


def _rotate(x: Tensor, tables: tuple[Tensor, Tensor] | None, options: dict[str, Any]) -> Tensor:
    if tables is None:
        return x
    cos, sin = (t.to(x.dtype) for t in tables)
    if options.get("conjugate"):
        sin = -sin
    start, rotary, pairing = options.get("rotary_start", 0), options["rotary_dim"], options.get("pairing", "halves")
    inner = x[..., start : start + rotary]
    if pairing == "adjacent_to_halves":
        inner = torch.cat((inner[..., ::2], inner[..., 1::2]), -1)
    if pairing == "adjacent":
        turned = torch.stack((-inner[..., 1::2], inner[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-inner[..., rotary // 2 :], inner[..., : rotary // 2]), -1)
    return torch.cat((x[..., :start], inner * cos + turned * sin, x[..., start + rotary :]), -1)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    kind = options["norm"]
    if kind == "none":
        return x
    shape = x.shape
    if options.get("norm_scope") == "hidden":
        x = x.flatten(2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "layer":
        wide = F.layer_norm(wide, wide.shape[-1:], eps=options["eps"])
    else:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + options["eps"])
    y = wide.to(x.dtype)
    if weight is not None:
        y = y * (1 + weight if kind == "rms_one_plus" else weight)
    return (y if bias is None else y + bias).view(shape)


SECTIONED = {"mrope_layout": "sectioned", "mrope_section": [3, 3, 2]}
INTERLEAVED = {"mrope_layout": "interleaved", "mrope_section": [4, 2, 2]}
HALF, BF16, DOUBLE = torch.float16, torch.bfloat16, torch.float64

CASES = [
    Case("rms"),
    Case("rms bf16", dtype=BF16, per_lane=True, table_dtype=BF16),
    Case("rms fp16", dtype=HALF),
    Case("rms fp64", dtype=DOUBLE, table_dtype=DOUBLE),
    Case("no norm", options={"norm": "none"}),
    Case("no norm, conjugate, adjacent", options={"norm": "none", "conjugate": True, "pairing": "adjacent"}),
    Case("no rotation", options={"rotary_dim": 0}),
    Case("no weight", affine=""),
    Case("one plus", dtype=BF16, options={"norm": "rms_one_plus"}),
    Case("layer", affine="wb", options={"norm": "layer"}),
    Case("layer, row a head, adjacent", affine="wb", per_head=True, options={"norm": "layer", "pairing": "adjacent"}),
    Case("rms with bias", affine="wb"),
    Case("hidden", options={"norm_scope": "hidden"}, per_lane=True),
    Case("hidden layer, five heads", heads=5, affine="wb", options={"norm_scope": "hidden", "norm": "layer"}),
    Case("hidden one plus, adjacent", options={"norm_scope": "hidden", "norm": "rms_one_plus", "pairing": "adjacent"}),
    Case("norm last", options={"norm_first": False}),
    Case(
        "norm last, to halves",
        affine="wb",
        options={"norm_first": False, "pairing": "adjacent_to_halves", "norm": "layer"},
    ),
    Case("norm last, adjacent, no weight", affine="", dtype=BF16, options={"norm_first": False, "pairing": "adjacent"}),
    Case("adjacent", options={"pairing": "adjacent"}, per_lane=True),
    Case("to halves", options={"pairing": "adjacent_to_halves"}, per_lane=True),
    Case("partial", options={"rotary_dim": 8}),
    Case(
        "partial from 4, adjacent", options={"rotary_dim": 8, "rotary_start": 4, "pairing": "adjacent"}, per_lane=True
    ),
    Case("partial at the end", affine="wb", options={"rotary_dim": 12, "rotary_start": 4, "norm": "layer"}),
    Case("partial, norm last", options={"rotary_dim": 4, "norm_first": False, "pairing": "adjacent_to_halves"}),
    Case("partial, no norm, 64 lanes pass", head_dim=72, options={"norm": "none", "rotary_dim": 8}),
    *(
        Case(f"{layout['mrope_layout']}, {pairing}", options={**layout, "pairing": pairing}, per_lane=index == 1)
        for layout in (SECTIONED, INTERLEAVED)
        for index, pairing in enumerate(("halves", "adjacent", "adjacent_to_halves"))
    ),
    Case("sectioned per sample", table_batch=2, options=SECTIONED, packing="blocked", heads=4),
    Case("sectioned, positions", positions="per sample", options=SECTIONED),
    Case("interleaved, positions, packed", positions="shared", options=INTERLEAVED, packing="blocked"),
    Case("positions", positions="shared", per_lane=True),
    Case("positions per sample, packed", positions="per sample", packing="grouped", heads=4),
    Case("table per sample", table_batch=2),
    Case("packed", packing="blocked", dtype=BF16),
    Case("packed grouped", packing="grouped", heads=6),
    Case("packed grouped, hidden", packing="grouped", heads=4, options={"norm_scope": "hidden"}),
    Case("packed, partial, layer", packing="blocked", affine="wb", options={"norm": "layer", "rotary_dim": 8}),
    Case("transposed memory", memory="bhsd"),
    Case("sequence first", memory="sbhd", dtype=BF16),
    Case("results bhsd", options={"out_order": "bhsd"}),
    Case("results float32", dtype=BF16, options={"out_dtype": torch.float32}),
    Case("one head", heads=1, kv_heads=1),
    Case("eleven heads", heads=11, kv_heads=1, packing="blocked"),
    Case("one token", batch=1, sequence=1),
    Case("long", batch=1, sequence=37, heads=9, kv_heads=3),
    *(Case(f"head_dim {d}", head_dim=d, heads=2, kv_heads=1, packing="blocked") for d in (72, 80, 96, 112, 192, 256)),
]
