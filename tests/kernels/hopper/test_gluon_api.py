"""What `gluon_api.py` adds to Gluon. (That its names work is seen wherever a kernel is compiled: test_compile.py.)"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="what is tested is Triton's, which is not installed")


def of_fields(*names: str) -> Any:
    from fusion_pass.kernels.hopper.gluon_api import aggregate

    return aggregate(type("Some", (), {"__annotations__": dict.fromkeys(names, int)}))


def test_an_aggregate_takes_its_fields_in_order() -> None:
    some = of_fields("q", "k")(1, 2)
    assert (some.q, some.k) == (1, 2)
    with pytest.raises(ValueError, match="shorter"):
        of_fields("q", "k")(1)


def test_kernels_with_other_fields_are_not_taken_for_each_other() -> None:
    """A compiled kernel is kept by what it refers to: the same source must not find it after fields changed places."""
    keys = [of_fields(*names).hash_attrs[0].cache_key for names in (("q", "k"), ("q", "k"), ("k", "q"), ("q",))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
