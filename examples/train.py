"""A training script that opts in to the pass with a flag.

    python examples/train.py                                      without the pass
    python examples/train.py --fusion-pass                        with it
    python examples/train.py --fusion-pass --fusion-pass-strict   and stop when a layer cannot be fused

On a machine without a GPU add `--fusion-pass-allow-reference`: there the only kernel is the reference one.
"""

from __future__ import annotations

import argparse

import torch

import fusion_pass
from fusion_pass import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_fused_qkv", choices=zoo.names())
    parser.add_argument("--steps", type=int, default=5)
    fusion_pass.add_arguments(parser)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, inputs = zoo.build(args.model, layers=2, device=device)
    backend = fusion_pass.backend(fusion_pass.FusionConfig.from_args(args))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        output = compiled(**inputs)
        logits = output if isinstance(output, torch.Tensor) else output[0]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    for report in backend.reports:
        print(report)


if __name__ == "__main__":
    main()
