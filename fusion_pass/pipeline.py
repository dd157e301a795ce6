"""The way of one graph: read and recognise (patterns), plan, verify, rewrite, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._guards import CompileContext

from fusion_pass import recognise, report, rewrite
from fusion_pass.config import FusionConfig
from fusion_pass.control_flow import ControlFlow
from fusion_pass.errors import FusionError
from fusion_pass.graph.gradients import Stops
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.plan import Planned, Repeats, Unplannable, plan_site
from fusion_pass.report import Report, SiteReport
from fusion_pass.verify import Verifier


def fuse(module: fx.GraphModule, config: FusionConfig, *, texts: bool = False) -> Report:
    """Fuse what `config` asks for in `module` and in the graphs it holds (bodies of activation checkpoints and other
    higher-order operators), in place, and report on every place.

    `texts`: keep the graph before and after as text in the report.
    Raises `FusionError` as `FusionConfig` describes, or when a rewrite fails half-way; then the module is not to be
    used.
    """
    if not config.enabled:
        return Report(graph=graph_id(), attempt=_attempt())
    started = time.perf_counter()
    before = _text(module) if texts else ""
    verifier = Verifier(config)
    with _no_collection():
        _complete(module)
        flow = ControlFlow(module)
        sites = [record for body in _bodies_first(module) for record in _fuse_one(body, config, verifier, flow)]
    report.log.debug("%d places read in %.1f ms", len(sites), 1e3 * (time.perf_counter() - started))
    return Report(tuple(sites), before, _text(module) if texts else "", graph_id(), _attempt())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running in between: the pass makes many small objects and few cycles, and behind
    Dynamo a collection walks millions of objects, which costs more than the pass."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def conclude(result: Report, config: FusionConfig, history: list[Report]) -> None:
    """Publish the report of one captured graph, append it to `history`, hold it against what was asked for."""
    report.append(history, result)
    if config.enabled:
        report.publish(result, config)
        report.check_expectations(result, config)


def graph_id() -> str:
    """Dynamo's name of the graph being compiled (`frame/recompile`); the attempts of one compilation share it."""
    return str(CompileContext.current_compile_id() or "?")


def _attempt() -> int:
    """How often Dynamo has started this compilation over."""
    context = CompileContext.try_get()
    return 0 if context is None else context.attempt


def _fuse_one(module: fx.GraphModule, config: FusionConfig, verifier: Verifier, flow: ControlFlow) -> list[SiteReport]:
    """Fuse in one graph, without those that it calls. Returns the record of every place, in the graph's order."""
    failures: list[SiteReport] = []
    found = recognise.places(module.graph, config, failures)
    sites = _Sites(module.graph, config, verifier, flow)
    index_of = {id(place): index for index, place in enumerate(found)}
    records: dict[int, SiteReport] = {}
    joined: set[int] = set()
    for block in recognise.whole_blocks(module.graph, found, config, failures):
        record = sites.fuse(block.site)
        if record.status == report.FUSED:
            records[index_of[id(block.attention)]] = record
            joined.add(index_of[id(block.norm_rope)])
        elif record.status == report.FAILED:
            failures.append(record)
        # Skipped: its parts are tried below, each with its own reason.
    for index, place in _largest_first(found):
        if index in records or index in joined:
            continue
        if isinstance(place, Refusal):
            records[index] = report.skipped(place, place.reason)
        elif sites.overlap(place):
            records[index] = report.skipped(place, "The place is part of a larger fusion.")
        else:
            records[index] = sites.fuse(place)
    if sites.renamed:
        module.recompile()
    return [*(records[index] for index in range(len(found)) if index not in joined), *failures]


class _Sites:
    """The sites of one graph that have become calls, and what the next one has to know of them."""

    def __init__(self, graph: fx.Graph, config: FusionConfig, verifier: Verifier, flow: ControlFlow) -> None:
        self._config = config
        self._verifier = verifier
        self._flow = flow
        self._taken: set[fx.Node] = set()
        self.renamed: dict[fx.Node, fx.Node] = {}
        """Which node took the place of which."""
        self._repeats, self._views, self._stops = Repeats(), rewrite.Views(graph), Stops(graph)

    def overlap(self, site: Site) -> bool:
        """Whether a part of `site` has become part of another call."""
        return not self._taken.isdisjoint(site.region)

    def fuse(self, site: Site) -> SiteReport:
        """Plan, verify and rewrite `site`; its record, which says why not where it is left alone."""
        try:
            plan = plan_site(site, self._config, self.renamed, self._repeats, self._stops)
            self._flow.check(plan)
        except Unplannable as reason:
            return report.skipped(site, str(reason))
        except FusionError:
            raise
        except Exception as error:
            return recognise.failure("Planning", site.fusion, site.layer, error, self._config)
        self._verifier.check(plan)
        self._taken.update(site.region)
        self._rewrite(plan)
        return report.fused(plan)

    def _rewrite(self, plan: Planned) -> None:
        try:
            self.renamed.update(rewrite.apply(plan, self._views))
        except Exception as error:
            # What can fail has failed in the plan. This is a bug of the pass, and the graph may be neither old nor new.
            site = plan.site
            raise FusionError(
                f"Rewriting {site.fusion} of {site.layer!r} raised {recognise.in_words(error)}. The graph may be half "
                f"rewritten, so it is not compiled. skip_fusions=({site.fusion!r},) leaves such places alone."
            ) from error


def _largest_first(found: list[Site | Refusal]) -> Iterator[tuple[int, Site | Refusal]]:
    """A site that holds another one wins over it; among equals the graph's order."""

    def size(place: Site | Refusal) -> int:
        return len(place.region) if isinstance(place, Site) else 0

    return iter(sorted(enumerate(found), key=lambda pair: (-size(pair[1]), pair[0])))


def _bodies_first(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`module` and every graph it calls, each once, callees before callers."""
    seen: set[int] = set()

    def walk(current: fx.GraphModule) -> Iterator[fx.GraphModule]:
        seen.add(id(current))
        for node in current.graph.find_nodes(op="get_attr"):
            child = getattr(current, str(node.target), None)
            if isinstance(child, fx.GraphModule) and id(child) not in seen:
                yield from walk(child)
        yield current

    return walk(module)


def _complete(module: fx.GraphModule) -> None:
    """Give the inputs of bodies that Dynamo makes of equal regions (`use_graph_deduplication`) their fake values.

    Those are the values that the first call passes: of its region are those of the other nodes. Dynamo sets none.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        body, _, *passed = node.args
        child = getattr(module, str(body.target), None) if isinstance(body, fx.Node) else None
        if not isinstance(child, fx.GraphModule):
            continue
        placeholders = child.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(passed):
            for placeholder, value in zip(placeholders, passed, strict=True):
                if isinstance(value, fx.Node) and "example_value" in value.meta:
                    placeholder.meta.setdefault("example_value", value.meta["example_value"])
        _complete(child)


def _text(module: fx.GraphModule) -> str:
    return module.print_readable(print_output=False, include_stride=True)
