"""The choice of a kernel: order, reasons, restriction, and what a machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fusion_pass.kernels import registry
from fusion_pass.kernels.registry import Kernel, Request

REQUEST = Request("norm_rope", torch.device("cpu"), {"x": torch.float32}, {"x": (1, None, 2, 8)})


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    registry.kernels()
    before = list(registry._kernels)
    yield
    registry._kernels[:] = before


def kernel(name: str, **answers: str | None) -> Kernel:
    return Kernel(
        name=name,
        ops=frozenset({"norm_rope"}),
        load=lambda: None,
        available=lambda: answers.get("available"),
        supports=lambda _: answers.get("supports"),
        gate=lambda _: answers.get("gate"),
    )


def test_reference_only_where_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused = registry.choose(REQUEST)
    assert refused.kernel is None
    assert "allow_reference is off" in refused.sentence()
    allowed = registry.choose(REQUEST, allow_reference=True)
    assert allowed.kernel is not None
    assert allowed.kernel.name == "reference"
    assert "triton" in allowed.reasons


def test_third_party_stands_first_and_every_answer_is_a_reason() -> None:
    for name in ("available", "supports", "gate"):
        registry.register(kernel(name, **{name: f"not {name}."}))
    registry.register(kernel("mine"))
    assert [k.name for k in registry.kernels("norm_rope")][:4] == ["mine", "gate", "supports", "available"]
    assert registry.choose(REQUEST).kernel == registry.get("norm_rope", "mine")
    named = registry.choose(REQUEST, only=["available", "supports"])
    assert named.kernel is None
    assert named.reasons == {"supports": "not supports.", "available": "not available."}


def test_a_named_kernel_is_not_gated() -> None:
    registry.register(kernel("slow", gate="slower than Inductor."))
    chosen = registry.choose(REQUEST, only=["slow"]).kernel
    assert chosen is not None
    assert chosen.name == "slow"


def test_a_gated_kernel_stands_before_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is slower than both: an operator that is called runs what there is."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    registry.register(kernel("slow", gate="slower than Inductor."))
    chosen = registry.choose(REQUEST, allow_reference=True)
    assert chosen.kernel is not None
    assert chosen.kernel.name == "slow"
    assert chosen.reasons["slow"] == "slower than Inductor."
    assert registry.choose(REQUEST).kernel is None


def asked(
    kernel_name: str,
    tokens: tuple[int | None, int | None],
    training: bool,
    head_dim: int = 128,
    scope: str = "head",
    heads: int = 32,
    norm: str = "rms",
) -> str | None:
    gate = next(k.gate for k in registry.kernels("qk_norm_rope") if k.name == kernel_name)
    shapes, options = {"q": (*tokens, heads, head_dim)}, {"norm_scope": scope, "norm": norm}
    return gate(Request("qk_norm_rope", torch.device("cuda"), {}, shapes, options, training))


@pytest.mark.parametrize("name", ["measured", "triton", "cuda"])
def test_the_cost_gate(name: str) -> None:
    """What was measured slower than Inductor's code, and nothing near it."""
    one, many, unknown = (1, 1), (1, 1024), (None, None)
    assert "0.94x" in (asked(name, one, True, scope="hidden") or "")
    assert asked(name, one, False, scope="hidden") is None
    assert asked(name, many, True, scope="hidden") is None
    assert asked(name, unknown, True, scope="hidden") is None
    assert "0.98x" in (asked(name, one, False, head_dim=80) or "")
    assert asked(name, one, True, head_dim=80) is None
    assert asked(name, one, False) is None


def test_long_rows_are_left_to_inductor_without_cuda() -> None:
    """Of Triton alone, which pads them to the next power of two."""
    many, fewer, unknown = (4, 4096), (1, 4096), (None, None)
    assert "pip install 'fusion-pass[cuda]'" in (asked("triton", many, True, scope="hidden", heads=40) or "")
    for tokens, training, scope, heads in (
        (fewer, True, "hidden", 40),
        (unknown, True, "hidden", 40),
        (many, False, "hidden", 40),
        (many, True, "head", 40),
        (many, True, "hidden", 32),
    ):
        assert asked("triton", tokens, training, scope=scope, heads=heads) is None
    assert asked("measured", many, True, scope="hidden", heads=40) is None
    assert asked("cuda", many, True, scope="hidden", heads=40) is None


@pytest.mark.parametrize(("head_dim", "left"), [(72, True), (80, True), (96, False), (112, False), (128, False)])
def test_padded_rotations_are_left_to_inductor(head_dim: int, left: bool) -> None:
    """Of Triton alone, where they fill less than two thirds of the lanes that it computes; by CUDA C++, too, where
    tokens are few."""
    for training in (True, False):
        for tokens in ((1, 257), (4, 4096), (None, None)):
            reason = asked("triton", tokens, training, head_dim=head_dim, norm="none")
            assert (reason is not None and "pip install 'fusion-pass[cuda]'" in reason) == left
            assert asked("triton", tokens, training, head_dim=head_dim) is None
            assert asked("measured", tokens, training, head_dim=head_dim, norm="none") is None
        for tokens in ((1, 16), (2, 128)):
            for name in ("measured", "cuda"):
                reason = asked(name, tokens, training, head_dim=head_dim, norm="none")
                assert (reason is not None and "0.75x" in reason) == left


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="kernel 'reference' is registered already"):
        registry.register(replace(kernel("reference"), ops=frozenset({"rope"})))


def test_unusable_kernel_cannot_be_named() -> None:
    registry.register(kernel("elsewhere", available="there is no such device."))
    with pytest.raises(RuntimeError, match="backend='elsewhere' cannot run here: there is no such device"):
        registry.get("norm_rope", "elsewhere")
    assert {s.name: s.reason for s in registry.doctor()}["elsewhere"] == "there is no such device."
