"""The operators as PyTorch sees them: schema, fake, autograd, compile, and what an argument error says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_rope_cases import CASES, Case, call, make_inputs
from torch import Tensor

from fusion_pass.kernels import norm_rope, qk_norm_rope, qkv_norm_rope, rope

ops = torch.ops.fusion_pass
CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
TRACED = [
    "no norm",
    "sectioned, positions",
    "packed grouped",
    "results bhsd",
]


@pytest.mark.parametrize("name", TRACED)
def test_opcheck(name: str) -> None:
    case = BY_NAME[name]
    inputs = make_inputs(case, CPU)
    kwargs = {**case.all_options, "backend": "reference"}
    op = ops.qk_norm_rope
    if case.packing is not None:
        op = ops.qkv_norm_rope
        sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
        kwargs |= {**sizes, "packing": case.packing}
    torch.library.opcheck(op, tuple(inputs.tensors()), kwargs)


@pytest.mark.parametrize("case", [c for c in CASES if c.head_dim == 16 and c.sequence < 10], ids=str)
def test_gradcheck_in_float64(case: Case) -> None:
    """The written backward is the derivative of the reference forward, for every input that has one."""
    inputs = make_inputs(case, CPU).to(torch.float64)
    kwargs = {**case.all_options, "out_dtype": None, "backend": "reference"}
    tensors = inputs.tensors()

    def run(*args: Tensor) -> Any:
        given = iter(args)
        full = [next(given) if t is not None and t.is_floating_point() else t for t in tensors]
        if case.packing is None:
            return ops.qk_norm_rope(*full, **kwargs)
        sizes = {
            "num_heads": case.heads,
            "num_kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "packing": case.packing,
        }
        return ops.qkv_norm_rope(*full, **sizes, **kwargs)

    assert torch.autograd.gradcheck(run, tuple(inputs.differentiable()), fast_mode=True)


def small(**options: Any) -> Tensor:
    x, table = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(1, 3, 4)
    return norm_rope(x, table, table, **{"norm": "rms", "eps": 1e-6, "rotary_dim": 8, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": None}, "eps is missing: norm='rms' has no default; pass the model's eps."),
        ({"eps": -1.0}, "eps is -1.0; it must be zero or positive."),
        ({"norm": "rmsnorm"}, "norm is 'rmsnorm'; it takes one of 'none', 'rms', 'rms_one_plus', 'layer'."),
        ({"pairing": "neox"}, "pairing is 'neox'; it takes one of 'halves', 'adjacent', 'adjacent_to_halves'."),
        ({"norm_scope": "row"}, "norm_scope is 'row'; it takes one of 'head', 'hidden'."),
        ({"out_order": "sbhd"}, "out_order is 'sbhd'; it takes one of 'bshd', 'bhsd'."),
        ({"rotary_dim": 7}, "rotary_dim is 7; it must be even and not negative (0 means no rotation)."),
        ({"rotary_start": 2}, "rotary_start is 2 and rotary_dim is 8, but a head has only 8 lanes;"),
        ({"rotary_dim": 0}, "cos, sin or positions is given, but rotary_dim is 0; pass the number of rotated lanes."),
        ({"rotary_dim": 2}, "cos has 4 entries a position; with rotary_dim=2 it takes 1 (one a pair) or 2 (one a lane)."),  # noqa: E501
        ({"mrope_section": [2, 1, 1]}, "mrope_section is [2, 1, 1], but mrope_layout is 'none';"),
        ({"mrope_layout": "sectioned", "mrope_section": [2, 2]}, "mrope_section is [2, 2]; it takes three sizes, for T, H and W."),  # noqa: E501
        ({"mrope_layout": "sectioned", "mrope_section": [2, 2, 2]}, "mrope_section is [2, 2, 2] (sum 6);"),
        ({"mrope_layout": "sectioned", "mrope_section": [2, 1, 1]}, "cos has shape [1, 3, 4]; for 2 x 3 tokens it takes [3, 1 or 2,"),  # noqa: E501
        ({"backend": "fastest"}, "backend is 'fastest'; norm_rope takes 'auto' or one of:"),
        ({"weight": torch.ones(7)}, "weight has shape [7]; it takes [8] or, one row a head, [4, 8]."),
        ({"weight": torch.ones(8), "norm_scope": "hidden"}, "weight has shape [8]; with norm_scope='hidden' it takes [32]."),  # noqa: E501
        ({"weight": torch.ones(8), "norm": "none"}, "weight is given, but norm is 'none'; drop it or name the norm."),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "cos has shape [1, 3, 4]; with positions it takes [max_position, entries]."),  # noqa: E501
    ],
)  # fmt: skip
def test_errors_name_argument_value_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole sentence is compared
        small(**options)
    assert str(error.value).startswith(message)


def test_tensor_errors() -> None:
    x, table = torch.randn(2, 3, 4, 8), torch.randn(1, 3, 4)
    options: dict[str, Any] = {"norm": "none", "rotary_dim": 8}
    with pytest.raises(ValueError, match=r"x has strides \[96, 32, 1, 4\]; the last must be 1"):
        norm_rope(torch.randn(2, 3, 8, 4).transpose(2, 3), table, table, **options)
    with pytest.raises(ValueError, match=r"x has shape \[3, 4, 8\]; it takes \[batch, sequence, heads, head_dim\]"):
        norm_rope(x[0], table, table, **options)
    with pytest.raises(TypeError, match=r"x has dtype torch.int32"):
        norm_rope(x.int(), table, table, **options)
    with pytest.raises(TypeError, match=r"positions has dtype torch.float32; it takes an integer dtype"):
        norm_rope(x, table[0], table[0], torch.zeros(3), **options)
    with pytest.raises(ValueError, match=r"positions has shape \[4\]; for 2 x 3 tokens it takes \[3\] or \[2, 3\]"):
        norm_rope(x, table[0], table[0], torch.zeros(4, dtype=torch.int32), **options)
    with pytest.raises(ValueError, match=r"sin has shape \[1, 3, 2\] and cos has \[1, 3, 4\]; they must be equal"):
        norm_rope(x, table, table[..., :2], **options)
    with pytest.raises(ValueError, match=r"q has shape \[2, 3, 4, 8\] and k \[2, 2, 4, 8\]"):
        qk_norm_rope(x, x[:, :2], table, table, **options)
    with pytest.raises(TypeError, match=r"q has dtype torch.float32 and k torch.float16; they must be equal"):
        qk_norm_rope(x, x.half(), table, table, **options)
    with pytest.raises(ValueError, match=r"qkv has shape \[2, 3, 64\]; it takes \[batch, sequence, 96\]"):
        qkv_norm_rope(torch.randn(2, 3, 64), table, table, num_heads=8, num_kv_heads=2, head_dim=8, **options)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_position_outside_the_table(wrong: int) -> None:
    x, table = torch.randn(1, 3, 2, 8), torch.randn(11, 4)
    positions = torch.tensor([0, wrong, 3])
    with pytest.raises(IndexError, match="but the table has 11 rows"):
        rope(x, table, table, positions, backend="reference")
    # A kernel cannot raise without a synchronisation: the token becomes NaN, and nothing outside the table is read.
    rotated = rope(x, table, table, positions, backend="triton")
    assert rotated.isnan().flatten(2).all(-1).tolist() == [[False, True, False]]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8)])
def test_no_tokens(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    table, weight = torch.randn(1, shape[1], 4), torch.randn(8, requires_grad=True)
    y = norm_rope(x, table, table, None, weight, norm="rms", eps=1e-6, rotary_dim=8, backend=backend)
    y.sum().backward()
    assert y.shape == shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_strides(backend: str, kind: str) -> None:
    case = BY_NAME["rms"]
    inputs = make_inputs(case, CPU)
    results = call(case, inputs, backend)
    grads = []
    for result in results:
        grad = torch.randn(result.shape)
        if kind == "expanded":
            grad = torch.randn(()).expand(result.shape)
        elif kind == "transposed":
            grad = torch.randn(result.shape[::-1]).permute(3, 2, 1, 0)
        else:
            grad = torch.randn(*result.shape[:3], 2 * result.shape[3])[..., ::2]
        grads.append(grad)
    given = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
    dense = torch.autograd.grad(results, inputs.differentiable(), [g.contiguous() for g in grads])
    for a, b in zip(given, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_only_needed_gradients_are_computed() -> None:
    case = BY_NAME["packed"]
    inputs = make_inputs(case, CPU)
    for tensor in (inputs.cos, inputs.sin, *inputs.parameters):
        if tensor is not None:
            tensor.requires_grad_(False)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(
        lambda: call(case, inputs, "reference"), backend=aot_autograd(fw_compiler=keep), fullgraph=True
    )
    results = compiled()
    torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    backward = [n for n in graphs[-1].graph.nodes if "norm_rope_backward" in str(n.target)]
    assert len(backward) == 1
    assert backward[0].kwargs["output_mask"] == [True] + [False] * 6


def test_rotation_alone_does_not_keep_its_input() -> None:
    x, table = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(1, 3, 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(x, table, table)
    assert all(t.shape == table.shape for t in kept)


def test_packed_inference_does_not_move_v() -> None:
    case = BY_NAME["packed"]
    inputs = make_inputs(case, CPU)
    sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
    with torch.no_grad():
        v = qkv_norm_rope(*inputs.tensors(), **sizes, **case.all_options)[2]
    assert v.untyped_storage().data_ptr() == inputs.x[0].untyped_storage().data_ptr()


def test_second_derivative_is_refused() -> None:
    x, table = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 3, 4)
    y = norm_rope(x, table, table, norm="rms", eps=1e-6, rotary_dim=8)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="norm_rope cannot be differentiated twice"):
        dx.sum().backward()


def test_eps_as_a_symbol() -> None:
    """Under dynamic=True a Python float argument is a SymFloat: the operator guards on it, no value is baked in."""

    def model(x: Tensor, table: Tensor, eps: float) -> Tensor:
        return ops.norm_rope(x, table, table, norm="rms", eps=eps, rotary_dim=8, backend="reference")

    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    x, table = torch.randn(2, 3, 4, 8), torch.randn(1, 3, 4)
    for eps in (1e-6, 1e-2, 1.0):
        torch.testing.assert_close(compiled(x, table, eps), model(x, table, eps), rtol=0, atol=0)


def test_backward_is_reproducible() -> None:
    case = BY_NAME["packed grouped"]
    inputs = make_inputs(case, CPU)
    results = call(case, inputs, "triton")
    grads = [torch.randn_like(t) for t in results]
    runs = [torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
def test_backward_is_reproducible_on_gpu(device: torch.device) -> None:
    case = Case("", 16, 8, 128, 2, 2000, torch.bfloat16, packing="blocked", affine="wb", options={"norm": "layer"})
    inputs = make_inputs(case, device)
    results = call(case, inputs, "triton")
    grads = [torch.randn_like(t) for t in results]
    first = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def check_the_end_of_a_packed_call(device: torch.device, tokens: int, checked: int = 50) -> None:
    """The last tokens of a packed call, forward and backward, against the reference in float64."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 128, **sizes}
    qkv = torch.randn(1, tokens, 48 * 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (torch.randn(1, tokens, 64, device=device) for _ in range(2))
    weights = torch.randn(2, 128, device=device, requires_grad=True)
    results = qkv_norm_rope(qkv, cos, sin, None, weights[0], weights[1], **options, backend="triton")
    grads = [t.detach() for t in results]  # as random as any, and no more memory
    found = [t.detach() for t in (*results, torch.autograd.grad(results, qkv, grads)[0])]

    end = [t[:, -checked:].detach().double() for t in (qkv, cos, sin, *grads)]
    exact = end[0].requires_grad_()
    double = weights.detach().double()
    expected = qkv_norm_rope(exact, end[1], end[2], None, double[0], double[1], **options, backend="reference")
    gradient = torch.autograd.grad(expected, exact, end[3:])[0]
    # Half a step of bfloat16 (Triton's interpreter truncates: a whole one), and float32 sums of terms that cancel.
    rtol = 2**-8 if device.type == "cuda" else 2**-7
    for a, b in zip(found, (*expected, gradient), strict=True):
        torch.testing.assert_close(a[:, -checked:].double(), b, rtol=rtol, atol=1e-5 * b.abs().max().item())


def test_the_end_of_a_packed_call() -> None:
    check_the_end_of_a_packed_call(CPU, 3, 2)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """2.3e9 elements: offsets of the last tokens do not fit in 32 bits."""
    check_the_end_of_a_packed_call(device, 375_000)


@pytest.mark.gpu
def test_cuda_graph_capture(device: torch.device) -> None:
    case = Case("", 8, 2, 64, 1, 5, torch.bfloat16)
    inputs = make_inputs(case, device)
    with torch.no_grad():
        expected = [t.clone() for t in call(case, inputs, "triton")]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(case, inputs, "triton")
        graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_results_can_be_written_in_place(order: str) -> None:
    """Autograd forbids that for views of what the operator made."""
    x, table = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 3, 4)
    rotated = torch.ops.fusion_pass.rope(x, table, table, rotary_dim=8, out_order=order)
    attended, _ = torch.ops.fusion_pass.attention(x, x, x, out_order=order)
    for result in (rotated, attended):
        assert not result._is_view()
        result.transpose(1, 2).mul_(2.0)
