"""What the pass does to one layer of a model, as text: the statements it takes out, and those it puts in.

    -   a statement that goes away
    +   a statement that is put in
        a statement that stays: what the site is computed from, up to the projections and to the cosine and the sine,
        and who reads its results (before, and again after)

A name means the same value before and after. A value that is read once, by a statement of the same sort, is written
where it is read, so a text has fewer lines than the graph has nodes.
"""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from compiling import capture
from torch import fx

from fusion_pass import FusionConfig, pipeline, zoo
from fusion_pass.graph.vocabulary import layer_of
from fusion_pass.graph.writes import written_arguments

NORM_AND_ROTATION = ("qkv_norm_rope", "qk_norm_rope", "norm_rope", "rope")

WIDTH, NESTED = 106, 70
"""Characters of a line, and of a value that is written in the place where it is read."""

_INFIX = {
    operator.add: "+",
    operator.iadd: "+=",
    operator.sub: "-",
    operator.mul: "*",
    operator.imul: "*=",
    operator.truediv: "/",
    operator.pow: "**",
    operator.and_: "&",
    operator.eq: "==",
    "__eq__": "==",  # as torch 2.11 captures it
    operator.le: "<=",
    operator.gt: ">",
}

_SOURCES = frozenset({"linear", "cos", "sin", "polar", "embedding", "layer_norm"})
"""Further up than these is the rest of the model."""


def change_of(
    name: str, layer: str, fusions: tuple[str, ...] = NORM_AND_ROTATION, given: Mapping[str, Any] | None = None
) -> str:
    """The change that the pass makes to `layer` of the zoo's model `name`, as text. `given`: inputs beside its own."""
    model, inputs = zoo.build(name)
    module = capture(model, **inputs, **(given or {}))
    before = fx.Graph()
    before.graph_copy(module.graph, {})
    for copied, original in zip(before.nodes, module.graph.nodes, strict=False):
        assert copied.name == original.name
    # The reference kernels, whatever else could run here: the text is then the same on every machine.
    config = FusionConfig(allow_reference=True, kernels=("reference",), fusions=fusions)
    sites = pipeline.fuse(module, config).sites
    fused = [site.fusion for site in sites if site.layer == layer and not site.reason]
    assert fused, f"nothing fused in {layer!r}: {[(site.layer, site.fusion, site.reason) for site in sites]}"
    gone, new = _only_in(before, module.graph, layer), _only_in(module.graph, before, layer)
    after = _statements(sorted({*new, *_readers(new)}), {*new}, "+", named=())
    named = set(re.findall(r"\w+", " ".join(after)))
    return "\n".join([*_statements(sorted({*_origin(gone), *_readers(gone)}), {*gone}, "-", named), "", *after])


def _only_in(graph: fx.Graph, other: fx.Graph, layer: str) -> list[fx.Node]:
    names = {node.name for node in other.nodes}
    return [node for node in graph.nodes if node.name not in names and f"{layer_of(node)}.".startswith(f"{layer}.")]


def _origin(nodes: list[fx.Node]) -> set[fx.Node]:
    """`nodes` and what they are computed from, with the writes to memory on the way."""
    found, queue, last = set(nodes), list(nodes), max(nodes)
    while queue:
        node = queue.pop()
        parents = [] if _operator(node) in _SOURCES else node.all_input_nodes
        writers = [user for user in node.users if user < last and node in written_arguments(user)]
        more = {other for other in (*parents, *writers) if other.op != "placeholder"} - found
        found |= more
        queue += more
    return found


def _readers(nodes: list[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users} - set(nodes)


def _operator(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _statements(nodes: list[fx.Node], marked: set[fx.Node], mark: str, named: Collection[str]) -> list[str]:
    """One statement a line. A value keeps a line of its own when its name is among `named`."""
    texts: dict[fx.Node, str] = {}
    lines: list[str] = []
    writers = [node for node in nodes if written_arguments(node)]
    for node in nodes:
        expression = _expression(node, texts)
        if _is_nested(node, nodes, marked, writers) and node.name not in named and len(expression) <= NESTED:
            texts[node] = expression
            continue
        texts[node] = node.name
        sign = mark if node in marked else " "
        lines += _wrapped(f"{node.name} = {expression}", sign)
    return lines


def _wrapped(statement: str, sign: str) -> list[str]:
    """`statement` on lines of at most `WIDTH`, never broken among the arguments of a call inside a call."""
    calls: list[bool] = []
    glued = ""
    for previous, character in zip(" " + statement, statement, strict=False):
        if character in "([":
            calls.append(previous.isalnum() or previous in "_)]")
        elif character in ")]":
            calls.pop()
        glued += "~" if character == " " and sum(calls) > 1 else character
    lines = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=f"{sign} ",
        subsequent_indent=f"{sign}     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("~", " ") for line in lines]


def _is_nested(node: fx.Node, nodes: list[fx.Node], marked: set[fx.Node], writers: list[fx.Node]) -> bool:
    """Whether one statement of the same kind reads `node` once, and no memory is written in between."""
    if len(node.users) != 1 or _operator(node) in _SOURCES or node in writers:
        return False
    (reader,) = node.users
    return (
        reader in nodes
        and (reader in marked) == (node in marked)
        and (*reader.args, *reader.kwargs.values()).count(node) <= 1
        and not any(node < writer <= reader for writer in writers)
    )


def _expression(node: fx.Node, texts: dict[fx.Node, str]) -> str:
    def text(value: Any, *, operand: bool = False) -> str:
        if isinstance(value, fx.Node):
            written = texts.get(value, _short(value))
            infix = value.target in _INFIX or value.target is operator.neg
            return f"({written})" if operand and infix and written != value.name else written
        if isinstance(value, tuple | list):
            return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            bounds = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
            return ":".join("" if bound is None else text(bound) for bound in bounds)
        return "..." if value is Ellipsis else repr(value)

    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return f"{text(node.args[0], operand=True)}[{', '.join(map(text, index))}]"
    if node.target is operator.neg:
        return f"-{text(node.args[0], operand=True)}"
    if node.target in _INFIX:
        left, right = (text(value, operand=True) for value in node.args)
        return f"{left} {_INFIX[node.target]} {right}"
    arguments = [text(value) for value in node.args] + [f"{name}={text(value)}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{text(node.args[0], operand=True)}.{node.target}({', '.join(arguments[1:])})"
    return f"{_operator(node)}({', '.join(arguments)})"


def _short(node: fx.Node) -> str:
    """`..._modules_self_attn_modules_q_norm_parameters_weight_` is `q_norm.weight`."""
    if node.op != "placeholder":
        return node.name
    return ".".join(re.split(r"_(?:modules|parameters|buffers)_", node.name.rstrip("_"))[-2:])
