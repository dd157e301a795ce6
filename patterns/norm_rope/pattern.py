"""The pattern of norm + rotation: readings of single tensors become sites of one operator call.

    q and k of one attention, read alike           qk_norm_rope
    the same, lanes of one packed projection,
      in training                                  qkv_norm_rope   (one gradient buffer, written in one pass)
    one tensor, or q and k where the rotated q
      is read before k is there                    norm_rope, or rope without a norm

Requires    of a site: nobody else reads what the call no longer computes; no memory that the call reads is written
            between its use and the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.repeats import Repeats
from fusion_pass.graph.site import Call, Literal, Operand, Output, Refusal, Site
from fusion_pass.graph.vocabulary import layer_of

from ..consumers import Use, use_of
from ..refused import Refused, check_written_for_itself
from .axes import result_steps
from .facts import Norm
from .packed import Packed, packed
from .pairing import Pair, difference, same_scalar, same_tables
from .reading import Reading, read, transferred
from .rotation_places import roots
from .unrotated import unrotated


class NormRope:
    """`patterns.base.Pattern` for QK-norm and rotary position embedding."""

    name = "norm_rope"

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        """Every site of this fusion in `graph`, and a refusal for every near miss."""
        effects = Effects.of(graph)
        readings, refusals = _readings(effects)
        found: list[Site | Refusal] = list(refusals)
        for group in _groups(effects, readings):
            found += _sites(effects, group)
        return sorted(unrotated(effects, found), key=lambda place: effects.order[place.anchor])


def _readings(effects: Effects) -> tuple[list[Reading], list[Refusal]]:
    readings: list[Reading] = []
    refusals: list[Refusal] = []
    taken: set[fx.Node] = set()
    known: Repeats[Reading | Refused | None] = Repeats(effects)
    for node in roots(effects, taken):
        verdict = _verdict(effects, node, known)
        if isinstance(verdict, Reading):
            try:
                _check_private(effects, verdict.region, [verdict.end])
            except Refused as refused:
                verdict = refused
        if isinstance(verdict, Refused):
            refusals.append(Refusal("norm_rope", layer_of(node), node, str(verdict)))
            taken |= set(node.all_input_nodes)
        elif verdict is not None:
            readings.append(verdict)
            taken |= verdict.region
    return sorted(readings, key=lambda r: effects.order[r.end]), refusals


def _verdict(effects: Effects, node: fx.Node, known: Repeats[Reading | Refused | None]) -> Reading | Refused | None:
    """What ends at `node`, taken over from a place built the same way where there is one."""
    found = known.lookup(node)
    if found is not None:
        verdict, counterparts = found
        return transferred(verdict, counterparts) if isinstance(verdict, Reading) else verdict
    fresh: Reading | Refused | None
    try:
        fresh = read(effects, node)
    except Refused as refused:
        fresh = refused
    known.add(node, fresh)
    return fresh


def _groups(effects: Effects, readings: Sequence[Reading]) -> list[Pair | Reading | Refusal]:
    """Readings of one attention paired, as query and key in that order; then what is left of one layer, as where the
    keys are written into a cache and only that reaches the attention."""
    groups: list[Pair | Reading | Refusal] = []
    alone: list[tuple[Reading, Use | None]] = [(reading, use_of(reading.end)) for reading in readings]
    for belong_together in (_one_attention, _one_layer):
        alone, waiting = [], alone
        for reading, use in waiting:
            partner = next((w for w in alone if belong_together(effects, w, (reading, use))), None)
            if partner is None:
                alone.append((reading, use))
                continue
            alone.remove(partner)
            groups.append(_pair(partner, (reading, use)))
    return groups + [reading for reading, _ in alone]


def _pair(a: tuple[Reading, Use | None], b: tuple[Reading, Use | None]) -> Pair | Refusal:
    (first, first_use), (second, second_use) = a, b
    if _is("key", first_use) or (_is("query", second_use) and not _is("query", first_use)):
        first, second = second, first
    if not _same_eps(first, second):
        return Refusal(
            "qk_norm_rope",
            layer_of(b[0].end),
            b[0].end,
            "q and k are normalised with two different eps "
            f"({cast(Norm, first.norm).eps} and {cast(Norm, second.norm).eps}).",
        )
    return Pair(first, second)


def _is(place: str, use: Use | None) -> bool:
    return use is not None and use.place == place


def _same_eps(x: Reading, y: Reading) -> bool:
    return x.norm is None or y.norm is None or same_scalar(x.norm.eps, y.norm.eps)


def _one_attention(effects: Effects, a: tuple[Reading, Use | None], b: tuple[Reading, Use | None]) -> bool:
    (x, use_x), (y, use_y) = a, b
    if use_x is not None and use_y is not None:
        if use_x.attention is not use_y.attention or (use_x.place == use_y.place and use_x.place):
            return False
    elif use_x is not use_y or layer_of(x.end) != layer_of(y.end):
        return False
    return _one_call(effects, x, y)


def _one_layer(effects: Effects, a: tuple[Reading, Use | None], b: tuple[Reading, Use | None]) -> bool:
    (x, use_x), (y, use_y) = a, b
    if (use_x is None) is (use_y is None) or layer_of(x.end) != layer_of(y.end):
        return False
    if not x.end.users or not y.end.users:
        return False  # what nobody reads costs nothing, unless a call computes it
    return _same_eps(x, y) and _one_call(effects, x, y)


def _one_call(effects: Effects, x: Reading, y: Reading) -> bool:
    return difference(x, y) is None and same_tables(effects, x, y)


def _sites(effects: Effects, group: Pair | Reading | Refusal) -> list[Site | Refusal]:
    if isinstance(group, Refusal):
        return [group]
    if isinstance(group, Reading):
        return [_site(effects, _single_call(group), [group])]
    site = _packed_site(effects, group)
    if site is not None:
        return [site]
    parts, call = [group.q, group.k], _pair_call(group)
    if not _in_time(effects, call, {p.end for p in parts}, group.q.region | group.k.region):
        return [_site(effects, _single_call(part), [part]) for part in parts]
    return [_site(effects, call, parts)]


def _site(effects: Effects, call: Call, parts: Sequence[Reading]) -> Site | Refusal:
    region = frozenset().union(*(p.region for p in parts))
    outputs = tuple(Output(p.end, index, result_steps(list(p.names))) for index, p in enumerate(parts))
    try:
        return _checked(effects, call, outputs, region, parts[0].notes)
    except Refused as refused:
        return Refusal(call.name, layer_of(parts[0].end), parts[0].end, str(refused))


def _in_time(effects: Effects, call: Call, replaced: set[fx.Node], region: frozenset[fx.Node]) -> bool:
    """Whether all that `call` reads is there before anybody reads a result of it, the call itself included."""
    if any(o.node in replaced for o in call.tensors.values() if o is not None):
        return False  # q is made of the rotated k
    readers = [effects.order[u] for n in replaced for u in n.users if u not in region and u not in replaced]
    operands = [effects.order[o.node] for o in call.tensors.values() if o is not None]
    return not readers or min(readers) > max(operands)


def _packed_site(effects: Effects, pair: Pair) -> Site | None:
    """The packed form of `pair`, if it has one and can be called in time for the first reader of v."""
    form = packed(effects, pair)
    if form is None:
        return None
    region = form.region | pair.q.region | pair.k.region
    outputs = (
        Output(pair.q.end, 0, result_steps(list(pair.q.names))),
        Output(pair.k.end, 1, result_steps(list(pair.k.names))),
        form.value,
    )
    call = _packed_call(pair, form)
    replaced = {o.node for o in outputs}
    if not _in_time(effects, call, replaced, region):
        return None
    try:
        _check_private(effects, region, list(replaced))
        return _checked(effects, call, outputs, region, pair.q.notes)
    except Refused:
        return None


def _checked(
    effects: Effects,
    call: Call,
    outputs: tuple[Output, ...],
    region: frozenset[fx.Node],
    notes: Mapping[str, str],
) -> Site:
    anchor = max(region, key=effects.order.__getitem__)
    _check_memory(effects, call, region, anchor)
    return Site(call.name, layer_of(outputs[0].node), call, outputs, region, anchor, notes)


def _check_private(effects: Effects, region: frozenset[fx.Node], ends: Sequence[fx.Node]) -> None:
    """A second reader would keep the work alive that the call is to replace, or miss what that work wrote."""
    shared = [node for node in region if not region.issuperset(node.users) and node not in ends]
    if shared:
        node = min(shared)
        user = next(user for user in node.users if user not in region)
        raise Refused(f"{node.name!r} is computed inside the site and also read outside it, by {user.name!r}.")
    check_written_for_itself(effects, region, ends)


def _check_memory(effects: Effects, call: Call, region: frozenset[fx.Node], anchor: fx.Node) -> None:
    first = min(region, key=effects.order.__getitem__)
    for name, operand in call.tensors.items():
        if operand is None:
            continue
        writes = [w for w in effects.written_between(operand.node, first, anchor) if w not in region]
        if writes:
            raise Refused(
                f"{operand.node.name!r}, the {name} of the call, is written by {writes[0].name!r} inside the site."
            )


def _pair_call(pair: Pair) -> Call:
    q, k = pair.q, pair.k
    tensors: dict[str, Operand | None] = {"q": q.x, "k": k.x, "cos": q.cos, "sin": q.sin}
    if q.norm is not None and k.norm is not None:
        tensors |= {"q_weight": q.norm.weight, "k_weight": k.norm.weight, "q_bias": q.norm.bias, "k_bias": k.norm.bias}
    return Call("qk_norm_rope", tensors, {**_norm_options(q), **_options(q)})


def _packed_call(pair: Pair, form: Packed) -> Call:
    call = _pair_call(pair)
    tensors = {name: operand for name, operand in call.tensors.items() if name not in ("q", "k")}
    shape: dict[str, Literal | fx.Node] = {
        "num_heads": form.num_heads,
        "num_kv_heads": form.num_kv_heads,
        "head_dim": pair.q.head_dim,
        "packing": form.packing,
    }
    return Call("qkv_norm_rope", {"qkv": Operand(form.qkv), **tensors}, {**shape, **call.options})


def _single_call(reading: Reading) -> Call:
    tensors: dict[str, Operand | None] = {"x": reading.x, "cos": reading.cos, "sin": reading.sin}
    if reading.norm is None:
        return Call("rope", tensors, _options(reading))
    tensors |= {"weight": reading.norm.weight, "bias": reading.norm.bias}
    return Call("norm_rope", tensors, {**_norm_options(reading), **_options(reading)})


def _norm_options(reading: Reading) -> dict[str, Literal | fx.Node]:
    if reading.norm is None:
        return {"norm": "none"}
    return {
        "norm": reading.norm.kind,
        "eps": reading.norm.eps,
        "norm_scope": reading.norm_scope,
        "norm_first": reading.norm_first,
    }


def _options(reading: Reading) -> dict[str, Literal | fx.Node]:
    return {
        "rotary_dim": reading.rotary_dim,
        "rotary_start": reading.rotary_start,
        "pairing": reading.pairing,
        "conjugate": reading.conjugate,
        "mrope_layout": reading.mrope_layout,
        "mrope_section": list(reading.mrope_section),
        "out_order": reading.out_order,
        "out_dtype": reading.out_dtype,
    }
