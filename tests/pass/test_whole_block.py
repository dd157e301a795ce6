"""`whole_block`: norm + rotation and attention of a layer as one operator, against the layer with the parts apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from training_steps import assert_no_worse, exact_step, step

import fusion_pass
from fusion_pass import FusionBackend, FusionConfig, zoo

pytest.importorskip("transformers")

JOINED = "norm_rope_attention"


class Compiler:
    """AOTAutograd, run eagerly; counts the operators of both graphs and what the forward keeps for the backward."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.kept_bytes = 0
        self.module: fx.GraphModule | None = None

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        self.module = module

        def forward(graph: fx.GraphModule, _: Any) -> Any:
            self._count(graph)
            return make_boxed_func(self._measured(graph))

        def backward(graph: fx.GraphModule, _: Any) -> Any:
            self._count(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(module, inputs)

    def _count(self, graph: fx.GraphModule) -> None:
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        self.operators.update(name for name in names if not name.startswith("<built-in"))

    def _measured(self, graph: fx.GraphModule) -> Callable[..., Any]:
        (output,) = graph.graph.find_nodes(op="output")
        computed = {node.name for node in output.args[0] if isinstance(node, fx.Node) and node.op != "placeholder"}

        def run(*args: Any) -> Any:
            results = graph(*args)
            memory = {}
            for node, value in zip(output.args[0], results, strict=True):
                if isinstance(value, Tensor) and node.name in computed:
                    memory[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            self.kept_bytes = sum(memory.values())
            return results

        return run


def compiled(module: nn.Module, whole_block: bool, **settings: Any) -> tuple[Any, FusionBackend, Compiler]:
    compiler = Compiler()
    config = FusionConfig(allow_reference=True, whole_block=whole_block, **settings)
    backend = FusionBackend(config, inner=compiler)
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True), backend, compiler


NAMED = ("qwen3", "gemma3", "qwen3_vl", "olmo2", "llama", "qwen3_fused_qkv")
MORE = (
    "gpt_neox",
    "gpt_oss",
    "modernbert",
    "gemma2",
    "glm4v",
)  # a grouped packing, sinks, no causality, a soft cap, ...


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in (*NAMED, *MORE)] + [(name, torch.bfloat16) for name in NAMED],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_training_step(name: str, dtype: torch.dtype) -> None:
    module, inputs = zoo.build(name, dtype=dtype)
    model, backend, compiler = compiled(module, True, expect={JOINED: 1})
    ours, plain, exact = step(model, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(dtype).eps)
    assert backend.reports[-1].counts == {JOINED: 1}
    called = {name for name in compiler.operators if name.startswith("fusion_pass.")}
    assert called == {f"fusion_pass.{JOINED}.default", f"fusion_pass.{JOINED}_backward.default"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_fused_qkv"])
def test_training_step_that_keeps_the_rotated(name: str) -> None:
    """The backward has q and k of the forward: norm + rotation is computed once. A copy of the values is not kept."""
    module, inputs = zoo.build(name)
    kept, results = {}, {}
    for label, settings in (("apart", {"whole_block": False}), ("joined", {"whole_block": True, "keep_rotated": True})):
        model, _, compiler = compiled(module, **settings)
        results[label], kept[label] = step(model, module, inputs), compiler.kept_bytes
    assert_no_worse(results["joined"], step(module, module, inputs), exact_step(module, inputs), 1.2e-7)
    batch, tokens = next(iter(inputs.values())).shape[:2]
    assert kept["apart"] - kept["joined"] == (batch * tokens * 2 * 16 * 4 if name == "qwen3_fused_qkv" else 0)


@pytest.mark.parametrize(("name", "packed"), [("qwen3", False), ("qwen3_fused_qkv", True)])
def test_less_is_kept_for_the_backward(name: str, packed: bool) -> None:
    """In the compiled step: the rotated queries and keys, and from a packed projection a copy of the values."""
    module, inputs = zoo.build(name)
    counted = {}
    for whole_block in (True, False):
        model, _, compiler = compiled(module, whole_block)
        step(model, module, inputs)
        counted[whole_block] = compiler
    joined, apart = counted[True], counted[False]
    config = getattr(module, "config", None)
    heads, kv_heads, head_dim = (4, 2, 16)
    if config is not None:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch, tokens = next(iter(inputs.values())).shape[:2]
    rows = heads + kv_heads * (2 if packed else 1)
    assert apart.kept_bytes - joined.kept_bytes == batch * tokens * rows * head_dim * 4
    assert sum(joined.operators.values()) < sum(apart.operators.values())
    for layout in ("transpose", "clone", "cat"):
        operator = {"transpose": "aten.transpose.int", "clone": "aten.clone.default", "cat": "aten.cat.default"}[layout]
        assert joined.operators[operator] <= apart.operators[operator], layout


def test_the_graph_before_and_after() -> None:
    module, inputs = zoo.build("qwen3")
    calls = {}
    for whole_block in (False, True):
        model, _, compiler = compiled(module, whole_block)
        model(**inputs)
        assert compiler.module is not None
        calls[whole_block] = "\n".join(_shown(compiler.module))
    assert_expected_inline(
        calls[False],
        """\
view: [2, 24, 4, 16] = view(linear, (2, 24, -1, 16))
view_1: [2, 24, 2, 16] = view(linear_1, (2, 24, -1, 16))
view_2: [2, 24, 2, 16] = view(linear_2, (2, 24, -1, 16))
unsqueeze_3: [1, 24, 8] = unsqueeze(narrow, 0)
unsqueeze_4: [1, 24, 8] = unsqueeze(narrow_1, 0)
qk_norm_rope_default = qk_norm_rope.default(
    q=view,
    k=view_1,
    cos=unsqueeze_3,
    sin=unsqueeze_4,
    q_weight=q_norm_parameters_weight_,
    k_weight=k_norm_parameters_weight_,
    norm=rms,
    eps=1e-06,
    rotary_dim=16,
    out_dtype=torch.float32,
    backend=reference,
)
getitem_17: [2, 24, 4, 16] = getitem(qk_norm_rope_default, 0)
getitem_18: [2, 24, 2, 16] = getitem(qk_norm_rope_default, 1)
attention_default = attention.default(
    q=getitem_17,
    k=getitem_18,
    v=view_2,
    scale=0.25,
    causal=top_left,
    backend=reference,
)
getitem_19: [2, 24, 4, 16] = getitem(attention_default, 0)""",
    )
    assert_expected_inline(
        calls[True],
        """\
view: [2, 24, 4, 16] = view(linear, (2, 24, -1, 16))
view_1: [2, 24, 2, 16] = view(linear_1, (2, 24, -1, 16))
view_2: [2, 24, 2, 16] = view(linear_2, (2, 24, -1, 16))
unsqueeze_3: [1, 24, 8] = unsqueeze(narrow, 0)
unsqueeze_4: [1, 24, 8] = unsqueeze(narrow_1, 0)
norm_rope_attention_default = norm_rope_attention.default(
    q=view,
    k=view_1,
    cos=unsqueeze_3,
    sin=unsqueeze_4,
    q_weight=q_norm_parameters_weight_,
    k_weight=k_norm_parameters_weight_,
    v=view_2,
    norm=rms,
    eps=1e-06,
    rotary_dim=16,
    out_dtype=torch.float32,
    scale=0.25,
    causal=top_left,
    backend=reference,
)
getitem_17: [2, 24, 4, 16] = getitem(norm_rope_attention_default, 0)""",
    )


def _shown(module: fx.GraphModule) -> list[str]:
    """The calls of our operators, without what is left at its default, and what leads from one to the next."""
    ours = [node for node in module.graph.nodes if str(node.target).startswith("fusion_pass.")]
    near = {user for node in ours for user in node.users} | {
        value for node in ours for value in node.kwargs.values() if isinstance(value, fx.Node)
    }
    chosen = set(ours) | {node for node in near if node.op != "placeholder"}
    lines = []
    for node in module.graph.nodes:
        if node not in chosen:
            continue
        value = node.meta.get("example_value")
        shape = f": {list(value.shape)}" if isinstance(value, Tensor) else ""
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if node not in ours:
            lines.append(f"{node.name}{shape} = {target}({', '.join(map(str, node.args))})")
            continue
        defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
        lines.append(f"{node.name} = {target}(")
        for name, given in node.kwargs.items():
            if given != defaults[name]:
                lines.append(f"    {name}={re.sub('^l_args_0_.*_self_attn_modules_', '', str(given))},")
        lines.append(")")
    return lines


# --- where the parts stay apart ---


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2)]


def rotated(*tensors: Tensor) -> list[Tensor]:
    angle = torch.arange(tensors[0].shape[2])[:, None] * 0.5 ** torch.arange(8)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    return [x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attend(*rotated(q, k), v)


def read_by_the_caller(q: Tensor, k: Tensor, v: Tensor) -> Any:
    queries, keys = rotated(q, k)
    return attend(queries, keys, v), keys


def cast_on_the_way(q: Tensor, k: Tensor, v: Tensor) -> Any:
    queries, keys = rotated(q, k)
    return attend(queries.double(), keys.double(), v.double())


def input_written_before_the_end(q: Tensor, k: Tensor, v: Tensor) -> Any:
    k = k.clone()
    queries, keys = rotated(q, k)
    k.zero_()
    return attend(queries, keys, v), k


def gradient_stopped_on_the_way(q: Tensor, k: Tensor, v: Tensor) -> Any:
    queries, keys = rotated(q, k)
    with torch.no_grad():
        return attend(queries, keys, v)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Two attentions; each takes the queries of the other's pair."""
    (q1, k1), (q2, k2) = rotated(q, k), rotated(2 * q, 3 * k)
    return attend(q2, k1, v) + attend(q1, k2, v)


def transposed_on_the_way(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """As many tokens as heads, so that only the numbers tell."""
    queries, keys = rotated(*(x.repeat_interleave(2, 1)[:, :, :4] for x in (k, v)))
    values = v.repeat_interleave(2, 1)[:, :, :4]
    return nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (queries, keys, values)))


def keys_that_are_values(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The joined operator gives no rotated keys to be read as values."""
    queries, keys = rotated(q, k)
    return attend(queries, keys, keys)


def values_of_another(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Those of the packed projection are read by nobody."""
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
    parts = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in packed.split((64, 32, 32), -1))
    queries, keys, _ = parts
    return attend(*rotated(queries, keys), v * 2)


def counts_of(function: Callable[..., Any], **settings: Any) -> dict[str, int]:
    inputs = qkv()
    model, backend, _ = compiled(function, True, **settings)  # type: ignore[arg-type]
    for actual, expected in zip(
        torch.utils._pytree.tree_leaves(model(*inputs)), torch.utils._pytree.tree_leaves(function(*inputs)), strict=True
    ):
        torch.testing.assert_close(actual, expected)
    return dict(backend.reports[-1].counts)


def test_joined() -> None:
    assert counts_of(plain) == {JOINED: 1}
    assert counts_of(plain, verify=True) == {JOINED: 1}


@pytest.mark.parametrize(
    "function",
    [
        read_by_the_caller,
        cast_on_the_way,
        input_written_before_the_end,
        gradient_stopped_on_the_way,
        crossed,
        transposed_on_the_way,
        values_of_another,
        keys_that_are_values,
    ],
    ids=lambda f: f.__name__,
)
def test_apart(function: Callable[..., Any]) -> None:
    counts = counts_of(function)
    assert counts
    assert JOINED not in counts


def test_a_part_that_is_not_wanted_leaves_the_other_alone() -> None:
    assert counts_of(plain, skip_fusions=("attention",)) == {"qk_norm_rope": 1}
    assert counts_of(plain, fusions=("attention",)) == {"attention": 1}


def test_gradients_with_dynamic_shapes() -> None:
    module, inputs = zoo.build("qwen3", layers=2)
    compiler = Compiler()
    config = FusionConfig(allow_reference=True, whole_block=True, verify=True, expect={JOINED: 2})
    torch._dynamo.reset()
    model = torch.compile(module, backend=FusionBackend(config, inner=compiler), fullgraph=True, dynamic=True)
    ours, plain_, exact = step(model, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain_, exact, torch.finfo(torch.float32).eps)


def test_explain_shows_it() -> None:
    module, inputs = zoo.build("qwen3")
    report = fusion_pass.explain(module, config=FusionConfig(allow_reference=True, whole_block=True), **inputs)
    (site,) = report.fused
    assert (site.fusion, site.kernel) == (JOINED, "reference")
    assert site.arguments["norm"] == "rms"
    assert site.arguments["causal"] == "top_left"
