"""A fusion of your own: `x * torch.sigmoid(x)` becomes one call of `aten::silu`, forward and backward.

A pattern finds places and describes the call that replaces each; the pass checks the plan (shapes, dtypes, readers,
memory), edits the graph and reports. A package brings a pattern without any line like `register` by an entry point:

    [project.entry-points."fusion_pass.patterns"]
    silu = "my_package.silu:PATTERN"
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx, nn

import fusion_pass
from fusion_pass.graph.site import Call, Operand, Output, Refusal, Site


class SiLU:
    """Matches `x * sigmoid(x)`. Refuses a sigmoid that something else reads: it must be computed all the same."""

    name = "silu"

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        for product in graph.find_nodes(op="call_function", target=operator.mul):
            x, gate = product.args
            if not isinstance(gate, fx.Node) or gate.target is not torch.sigmoid or gate.args != (x,):
                continue
            if len(gate.users) > 1:
                yield Refusal(self.name, "", product, f"{gate.name!r} is also read outside the product.")
                continue
            yield Site(
                fusion=self.name,
                layer="",
                call=Call("silu", {"self": Operand(x)}, {}, namespace="aten"),
                outputs=(Output(product, index=0),),
                region=frozenset({gate, product}),
                anchor=product,
            )


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = x * torch.sigmoid(x)
        weight = torch.sigmoid(once)
        return once * weight + weight


def main() -> None:
    fusion_pass.register(SiLU())
    report = fusion_pass.explain(Gate(), torch.randn(4, 8))
    for site in report.sites:
        print(f"{site.fusion}: {site.status}. {site.reason}")
    print(report.after)


if __name__ == "__main__":
    main()
