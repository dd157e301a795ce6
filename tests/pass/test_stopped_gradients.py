"""Where a model stops a gradient (`detach`, `no_grad`, `inference_mode`), it is not fused into a call that has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import as_it_is, capture, eager
from torch import Tensor
from training_steps import assert_no_worse

import fusion_pass
from fusion_pass.graph.gradients import Stops

B, S, H, D = 2, 6, 4, 8
HALF = D // 2

Inputs = tuple[Tensor, ...]


def rms(x: Tensor, w: Tensor, factor: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    return x * factor(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


def swapped(x: Tensor) -> Tensor:
    return torch.cat((-x[..., HALF:], x[..., :HALF]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + swapped(x) * sin


def filled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same, written into memory that is like `x`, which has no gradient in any mode."""
    with torch.no_grad():
        out = torch.empty_like(x)
    turned = rotate(x, cos, sin)
    out[..., :HALF] = turned[..., :HALF]
    out[..., HALF:] = turned[..., HALF:]
    return out


def rotated_views(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Tensor:
    """The graph begins with views, whose results require a gradient in either mode."""
    q = x.view(B, S, 2, D)
    with torch.no_grad():
        both = torch.cat((angle, angle), -1)[None, :, None]
        cos, sin = both.cos(), both.sin()
    k = rotate(q * k_weight, cos, sin)
    return F.scaled_dot_product_attention(rotate(q, cos, sin).transpose(1, 2), k.transpose(1, 2), q.transpose(1, 2))


def without_grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with torch.no_grad():
            return function(*args)

    return run


def inferred(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Computed in inference mode, and made a tensor again that autograd takes."""

    def run(*args: Tensor) -> Tensor:
        with torch.inference_mode():
            result = function(*args)
        return result.clone()

    return run


def block(
    weight: Callable[[Tensor], Tensor] = lambda w: w,
    norm: Callable[[Tensor, Tensor], Tensor] = rms,
    between: Callable[[Tensor], Tensor] = lambda x: x,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate,
    after: Callable[[Tensor], Tensor] = lambda x: x,
    keys: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[..., Tensor]:
    """An attention whose parts can be exchanged. `keys`: what is done to k and v last."""

    def model(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Tensor:
        q, k, v = (x @ projection).view(B, S, 3 * H, D).split(H, dim=2)
        both = torch.cat((angle, angle), -1)[None, :, None]
        cos, sin = both.cos(), both.sin()
        q, k = (after(turn(between(norm(y, weight(w))), cos, sin)) for y, w in ((q, q_weight), (k, k_weight)))
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys(k).transpose(1, 2), keys(v).transpose(1, 2))

    return model


NAMES = ("x", "projection", "q_weight", "k_weight", "angle")


def inputs(dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    shapes = (B, S, 16), (16, 3 * H * D), (D,), (D,), (S, HALF)
    return tuple(torch.randn(n).to(dtype) for n in shapes)


def outcome(model: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The result, and the gradient of every input that gets one, in float64."""
    given = dict(zip(NAMES, (x.requires_grad_() for x in inputs(dtype)), strict=True))
    out = model(*given.values())
    if out.requires_grad:
        out.backward(torch.linspace(-1, 1, out.numel()).to(dtype).view(out.shape))
    found = {"out": out.detach(), **{name: x.grad for name, x in given.items() if x.grad is not None}}
    return {name: x.double() for name, x in found.items()}


def fused(model: Callable[..., Tensor], whole_block: bool = False) -> list[str]:
    """What of `model` is fused, after its result and its gradients were found no worse than eager's by float64."""
    compiler = fusion_pass.FusionBackend(
        fusion_pass.FusionConfig(allow_reference=True, whole_block=whole_block), inner=as_it_is
    )
    ours = outcome(torch.compile(model, backend=compiler, fullgraph=True))
    assert_no_worse(ours, outcome(model), outcome(model, torch.float64), torch.finfo(torch.float32).eps)
    return [site.fusion for report in compiler.reports for site in report.fused]


def test_nothing_stopped() -> None:
    """The blocks below are fused but for what they stop."""
    assert fused(block()) == ["qkv_norm_rope", "attention"]


STOPPED = {
    "detached weight": block(weight=torch.detach),
    "weight under no_grad": block(weight=without_grad(lambda w: w.view(1, D))),
    "detached factor of the norm": block(norm=lambda x, w: rms(x, w, torch.detach)),
    "factor under no_grad": block(norm=lambda x, w: x * without_grad(lambda x: rms(x, x * 0 + 1) / x)(x) * w),
    "norm under no_grad": block(norm=without_grad(rms)),
    "factor in inference mode": block(norm=lambda x, w: rms(x, w, inferred(lambda x: x * 1.0))),
    "norm in inference mode": block(norm=inferred(rms)),
    "detached between": block(between=torch.detach),
    "detached between, in place": block(between=lambda x: x.detach_()),
    "half of the rotation detached": block(turn=lambda x, cos, sin: x * cos + swapped(x).detach() * sin),
    "rotation under no_grad": block(turn=without_grad(rotate)),
    "sine detached for one half": block(
        turn=lambda x, cos, sin: torch.cat(
            (
                x[..., :HALF] * cos[..., :HALF] - x[..., HALF:] * sin[..., :HALF],
                x[..., HALF:] * cos[..., :HALF] + x[..., :HALF] * sin.detach()[..., :HALF],
            ),
            -1,
        )
    ),
    "detached after": block(after=torch.detach),
}


@pytest.mark.parametrize("name", STOPPED)
def test_stop_inside_a_site(name: str) -> None:
    assert fused(STOPPED[name]) == ["attention"]


WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x.data,
    "like it in shape": torch.zeros_like,
    "random": lambda x: torch.randint_like(x, 3),
    "truth": lambda x: x > 0,
    "places": lambda x: x.argmax(-1),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_graph_that_begins_with_a_result_without_a_gradient(name: str) -> None:
    """It is not taken for one that records none, where nothing stops."""

    def begun(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *rest: Tensor) -> Tensor:
            first = WITHOUT_GRADIENT[name](x)
            return model(x, *rest) + 0 * first.sum()

        return run

    assert fused(begun(STOPPED["detached weight"])) == ["attention"]
    assert fused(begun(block())) == ["qkv_norm_rope", "attention"]


def test_a_stop_where_nothing_is_recorded_at_all() -> None:
    """The whole graph runs under the caller's `no_grad`: there is no gradient to stop, though a view requires one."""

    def model(x: Tensor, *rest: Tensor) -> Tensor:
        return STOPPED["detached weight"](x.view(x.shape), *rest)

    compiler = fusion_pass.FusionBackend(fusion_pass.FusionConfig(allow_reference=True), inner=as_it_is)
    with torch.no_grad():
        torch.compile(model, backend=compiler, fullgraph=True)(*(x.requires_grad_() for x in inputs(torch.float32)))
    assert [site.fusion for report in compiler.reports for site in report.fused] == ["qk_norm_rope", "attention"]


def complex_product(x: Tensor, factors: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (HALF, 2)).contiguous()) * factors).flatten(-2)


@pytest.mark.parametrize("polar", [False, True])
def test_complex_table_with_a_gradient(polar: bool) -> None:
    """`table.view(float)` has none: what the complex numbers are made of is passed, or, where it is no table, nothing
    is fused."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[..., :HALF], sin[..., :HALF]
        return complex_product(x, torch.polar(cos.exp(), sin) if polar else torch.complex(cos, sin))

    assert fused(block(turn=turn)) == (["attention"] if polar else ["qkv_norm_rope", "attention"])


def test_repeated_heads_under_no_grad() -> None:
    """The operator repeats no heads, it would read the keys themselves, which have a gradient."""

    def model(x: Tensor, projection: Tensor, *_: Tensor) -> Tensor:
        q, k, v = ((x @ projection[:, : 3 * D]).view(B, S, 3, D).transpose(1, 2)).split(1, dim=1)
        with torch.no_grad():
            k, v = k.repeat_interleave(H, 1), v.repeat_interleave(H, 1)
        return F.scaled_dot_product_attention(q.repeat(1, H, 1, 1), k, v)

    assert fused(model) == []


def less_the_maximum(read: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An attention that takes what is made of the maximum of each row from it, as if for the softmax's sake."""

    def model(x: Tensor, projection: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (x @ projection).view(B, S, 3 * H, D).transpose(1, 2).split(H, dim=1)
        scores = q @ k.mT
        return (scores - read(scores.amax(-1, keepdim=True))).to(x.dtype).softmax(-1) @ v

    return model


def test_detached_maximum_of_a_row() -> None:
    """Its gradient is zero whether it is stopped or not."""
    assert fused(less_the_maximum(torch.detach)) == ["attention"]
    assert fused(less_the_maximum(lambda maximum: maximum)) == ["attention"]


SHIFTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a row": (lambda x: (x - x.amax(-1, keepdim=True).detach()).softmax(-1), True),
    "an axis by its number": (lambda x: torch.softmax(x - x.amax(1, keepdim=True).detach(), dim=1), True),
    "one number": (lambda x: (x - x.amax().detach()).softmax(-1), True),
    "cast before the softmax": (lambda x: (x - x.amax(-1, keepdim=True).detach()).double().softmax(-1), True),
    "columns": (lambda x: (x - x.amax(-2, keepdim=True).detach()).softmax(-1), False),
    "rows where columns are meant": (lambda x: (x - x.amax(-1, keepdim=True).detach()).softmax(-2), False),
    "every element": (lambda x: (x - x.detach()).softmax(-1), False),
    "the row from itself": (lambda x: (x.amax(-1, keepdim=True).detach() - x).softmax(-1), False),
    "twice": (lambda x: torch.sub(x, x.amax(-1, keepdim=True).detach(), alpha=2).softmax(-1), True),
    "a factor": (lambda x: (x * x.amax(-1, keepdim=True).detach()).softmax(-1), False),
    "no softmax": (lambda x: (x - x.amax(-1, keepdim=True).detach()).exp(), False),
    "read again": (lambda x: (x - (m := x.amax(-1, keepdim=True).detach())).softmax(-1) * m, False),
    "the difference read again": (lambda x: (y := x - x.amax(-1, keepdim=True).detach()).softmax(-1) * y, False),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_what_a_softmax_does_not_see(name: str) -> None:
    function, unseen = SHIFTS[name]
    module = capture(function, torch.randn(B, S, 5, requires_grad=True))
    nodes = [node for node in module.graph.nodes if node.op == "call_function" or node.op == "call_method"]
    operands = module.graph.find_nodes(op="placeholder")
    reason = Stops(module.graph).reason(frozenset(nodes), operands, nodes[-1])
    assert (reason is None) is unseen


PACKED, APART = ["qkv_norm_rope", "attention"], ["qk_norm_rope", "attention"]

OUTSIDE: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "detached input": (lambda x, *rest: block()(x.detach(), *rest), PACKED),
    "tables under no_grad": (
        block(turn=lambda x, cos, sin: rotate(x, *map(without_grad(lambda table: table * 1.0), (cos, sin)))),
        PACKED,
    ),
    "tables in inference mode": (
        block(turn=lambda x, cos, sin: rotate(x, *map(inferred(lambda table: table * 1.0), (cos, sin)))),
        PACKED,
    ),
    "detached sine": (block(turn=lambda x, cos, sin: rotate(x, cos, sin.detach())), PACKED),
    "memory taken under no_grad": (block(turn=filled), PACKED),
    "tables under no_grad, views before": (rotated_views, APART),
    "detached keys and values": (block(keys=torch.detach), ["attention"]),
    "all under no_grad": (without_grad(block()), APART),
    "all in inference mode": (inferred(block()), APART),
    "all in an inference mode that is off": (torch.inference_mode(False)(block()), PACKED),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("whole_block", [False, True])
def test_stop_outside_of_the_sites(name: str, whole_block: bool) -> None:
    """A detached operand is an operand like any other."""
    model, expected = OUTSIDE[name]
    joined = whole_block and len(expected) > 1
    assert fused(model, whole_block) == (["norm_rope_attention"] if joined else expected)


def learned(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Inputs:
    """Weights and tables that calls read through views, then q, k and v."""
    q, k, v = (x @ projection).view(B, S, 3 * H, D).split(H, dim=2)
    cos, sin = torch.cat((angle, angle), -1).view(1, S, 1, D), torch.cat((angle, angle), -1).view(1, S, 1, D) + 1.0
    return q_weight.view(1, 1, 1, D), k_weight.view(1, 1, 1, D), cos.transpose(1, 2), sin.transpose(1, 2), q, k, v


def twice(first: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """Two attentions of the same queries, keys, weights and tables, the first computed in a mode of its own."""

    def one(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(rms(x.transpose(1, 2), w), cos, sin)

    def attention(q_w: Tensor, k_w: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(one(q, q_w, cos, sin), one(k, k_w, cos, sin), v.transpose(1, 2))

    def model(*given: Tensor) -> Tensor:
        read = learned(*given)
        return first(attention)(*read) + attention(*read)

    return model


@pytest.mark.parametrize(
    "mode", [without_grad, inferred, lambda function: function], ids=["no_grad", "inference", "no"]
)
def test_views_that_two_calls_read_in_two_modes(mode: Callable[..., Callable[..., Tensor]]) -> None:
    """A view made under `no_grad` is none that the call behind it may read: it passes no gradient on."""
    assert fused(twice(mode)) == ["qk_norm_rope", "attention"] * 2


def differentiated(**options: bool) -> Callable[..., Tensor]:
    """The gradient of a rotation's sum of cubes, taken in the graph: of x, or of what x is projected by."""
    create_graph, towards_x = options.get("create_graph", False), options.get("towards_x", False)

    def model(x: Tensor, projection: Tensor, *rest: Tensor) -> Tensor:
        angle = torch.cat((rest[-1], rest[-1]), -1).detach()
        y = (x @ projection[:, : H * D]).view(B, S, H, D)
        read = y if towards_x else projection
        turned = rotate(y, angle.cos()[:, None], angle.sin()[:, None])
        (gradient,) = torch.autograd.grad(turned.pow(3).sum(), read, create_graph=create_graph)
        return gradient.view(-1) * (x.sum() if not create_graph else 1.0)

    return model


GRADIENTS = {"towards_x": [], "create_graph": [], "neither": ["rope"]}


@pytest.mark.parametrize("what", GRADIENTS)
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_gradients_taken_in_the_graph(what: str) -> None:
    assert fused(differentiated(**{what: True})) == GRADIENTS[what]


@pytest.mark.parametrize("inner", [as_it_is, eager])
def test_result_that_has_no_gradient_beside_one_that_has(inner: Callable[..., Callable[..., Tensor]]) -> None:
    """One call rotates a q without a gradient and a k with one; q has none behind it either."""

    def model(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Inputs:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, F.scaled_dot_product_attention(q, k, k)

    torch.manual_seed(0)
    q, k = torch.randn(2, B, H, S, D)
    angle = torch.randn(S, HALF).repeat(1, 2)
    settings = fusion_pass.FusionConfig(allow_reference=True, expect={"qk_norm_rope": 1, "attention": 1})
    compiled = torch.compile(model, backend=fusion_pass.FusionBackend(settings, inner=inner))
    results = compiled(q, k.requires_grad_(), angle.cos(), angle.sin())
    assert [x.requires_grad for x in results] == [False, True, True]
    for ours, expected in zip(results, model(q, k, angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(ours, expected)


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous, which it is": lambda x: x.contiguous(),
    "cast to its own dtype": lambda x: x.to(x.dtype),
    "transposed": lambda x: x.transpose(1, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_result_that_is_moved_under_no_grad(name: str) -> None:
    """What is contiguous already is the same tensor in any mode, with its gradient; a call under no_grad has none."""

    def rotated(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Tensor:
        both = torch.cat((angle, angle), -1).detach()
        turned = rotate((x @ projection[:, :D]).view(B, S, 1, D).transpose(1, 2), both.cos(), both.sin())
        return without_grad(MOVED[name])(turned) * x.sum()

    def attended(x: Tensor, projection: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (x @ projection).view(B, S, 3 * H, D).transpose(1, 2).split(H, dim=1)
        return without_grad(MOVED[name])((q @ k.mT).softmax(-1) @ v) * x.sum()

    for model in (rotated, attended):
        fused(model)
