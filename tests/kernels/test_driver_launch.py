"""What the driver is given: the grid, the stream and every parameter, read back through pointers as the driver does."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_pass.kernels import driver_launch as module
from fusion_pass.kernels.driver_launch import ADDRESS, Shape, driver_launch

SIGNATURE = {
    "x": "*bf16", "map": "tensordesc<bf16[1, 64],layout>", "y": "*fp32", "n": "i32", "m": "i64", "one": "constexpr",
    "eps": "fp32", "BLOCK": "constexpr",
}  # fmt: skip
ARGUMENTS = (ADDRESS, Shape([5, 64], [64, 1]), ADDRESS, -3, 1 << 40, 1, 0.5, 128)
SIZES = (8, 128, 4, 4, 8, 8, 8, 4, 8, 4, 8, 8)
"""Of the parameters, two scratch buffers last."""
MAP = bytes(range(128))


TensorMap: Any = SimpleNamespace(__basicsize__=256)
"""Stands for the type of Triton's object around a tensor map, which has the map at offset 128."""


class Driver:
    """The two functions of the driver, called as C functions are."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes, self.error, self.launches, self.contexts = sizes, 0, [], 0
        self.filled: list[tuple[int, ...]] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch)
        self.parameter = ctypes.CFUNCTYPE(ctypes.c_int, pointer, size, pointer, pointer)(self._parameter)

        self.fill = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, size, pointer)(self._fill)

    def context(self) -> int:
        """Give this thread a context."""
        self.contexts += 1
        self.error = 0
        return 0

    def _fill(self, *arguments: int) -> int:
        self.filled.append(arguments)
        return self.error

    def _launch(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        fields = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        places = struct.unpack(f"{len(self.sizes)}Q", ctypes.string_at(parameters, 8 * len(self.sizes)))
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.launches.append((fields, function, values, extra))
        return self.error

    def _parameter(self, function: int, index: int, offset: int, size: int) -> int:
        if index >= len(self.sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = self.sizes[index]
        return 0


def compiled(**changes: Any) -> Any:
    run = {
        "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False,
        **changes.pop("run", {}),
    }  # fmt: skip
    fields = {"name": "kernel", "function": 77, "packed_metadata": (4, 1, 1000), **changes}
    return SimpleNamespace(src=SimpleNamespace(signature=SIGNATURE), run=SimpleNamespace(**run), **fields)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pytest.importorskip("triton", reason="what is tested is Triton's, which is not installed")
    made = Driver()
    monkeypatch.setattr(module, "_driver", lambda: made)
    return made


@pytest.fixture
def map_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An "object" whose id is the address of 128 bytes and a tensor map."""
    memory = ctypes.create_string_buffer(b"\0" * 128 + MAP, 256)
    monkeypatch.setattr(module, "id", lambda _: ctypes.addressof(memory), raising=False)
    return memory


def test_what_the_driver_reads(driver: Driver, map_at: Any) -> None:
    launch = driver_launch(compiled(), (5, 2), ARGUMENTS, TensorMap)
    assert launch is not None
    for stream, x, y in ((9, 4096, 512), (0, 1 << 47, 16)):
        launch(stream, (x, y), [map_at])
        (*grid, warps_x, block_y, block_z, shared, on, attributes, count), function, values, extra = driver.launches[-1]
        assert (grid, warps_x, block_y, block_z, shared) == ([5, 2, 1], 128, 1, 1, 1000)
        assert (on, attributes, count, function, extra) == (stream, 0, 0, 77, None)
        numbers = [struct.pack("<i", n) for n in (5, 64)] + [struct.pack("<q", n) for n in (64, 1)]
        scalars = [struct.pack("<i", -3), struct.pack("<q", 1 << 40), struct.pack("<f", 0.5)]
        assert values == [struct.pack("Q", x), MAP, *numbers, struct.pack("Q", y), *scalars, b"\0" * 8, b"\0" * 8]


def test_overlapping_launches(driver: Driver, map_at: Any) -> None:
    """Programmatic dependent launch is an attribute: id 6, value 1 (cuda.h)."""
    launch = driver_launch(compiled(run={"launch_pdl": True}), (1,), ARGUMENTS, TensorMap)
    assert launch is not None
    launch(0, [16, 16], [map_at])
    *_, attributes, count = driver.launches[-1][0]
    assert count == 1
    assert struct.unpack("II16i", ctypes.string_at(attributes, 72)) == (6, 0, 1, *[0] * 15)


def test_threads_have_parameters_of_their_own(driver: Driver, map_at: Any) -> None:
    launch = driver_launch(compiled(), (1,), ARGUMENTS, TensorMap)
    assert launch is not None

    def work(address: int) -> None:
        for _ in range(50):
            launch(address, [address, address], [map_at])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 200
    assert all(values[0] == values[6] == struct.pack("Q", fields[7]) for fields, _, values, _ in driver.launches)


def test_errors(driver: Driver, map_at: Any) -> None:
    launch = driver_launch(compiled(), (1,), ARGUMENTS, TensorMap)
    assert launch is not None
    driver.error = 201  # the thread has no context yet
    launch(0, [16, 16], [map_at])
    assert (driver.contexts, len(driver.launches)) == (1, 2)
    driver.error = 700
    with pytest.raises(RuntimeError, match="refused to launch kernel: CUDA error 700"):
        launch(0, [16, 16], [map_at])


def test_zeros(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    fill = module.zeros(4, torch.device("cuda", 1))
    assert fill is not None
    fill.here([1 << 40])
    assert driver.filled == [(1 << 40, 0, 4, 101)]
    assert module.zeros(4, torch.device("cpu")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"packed_metadata": (4, 2, 0)},
        {"run": {"global_scratch_size": 16}},
        {"run": {"launch_cooperative_grid": True}},
        {"src": SimpleNamespace(signature={**SIGNATURE, "n": "i8"})},
        {"src": SimpleNamespace(signature={**SIGNATURE, "n": ("i32", "i32")})},
        {"src": SimpleNamespace(signature={**SIGNATURE, "eps": "bf16"})},
        {"src": SimpleNamespace(signature=dict(list(SIGNATURE.items())[:-1]))},
        {"run": {}, "sizes": SIZES[:-1]},
        {"run": {}, "sizes": (*SIZES, 8)},
    ],
)
def test_kernels_that_go_through_triton(driver: Driver, change: dict[str, Any]) -> None:
    driver.sizes = change.pop("sizes", SIZES)
    made = compiled(**{k: v for k, v in change.items() if k != "src"})
    made.src = change.get("src", made.src)
    assert driver_launch(made, (1,), ARGUMENTS, TensorMap) is None


def test_a_launcher_that_nobody_read(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._triton_was_read()  # or read the new one, and say so in `_READ`
    monkeypatch.setattr(module, "_triton_was_read", lambda: False)
    assert driver_launch(compiled(), (1,), ARGUMENTS, TensorMap) is None


def test_other_map_objects_and_empty_grids(driver: Driver) -> None:
    assert driver_launch(compiled(), (1,), ARGUMENTS, None) is None
    assert driver_launch(compiled(), (0,), ARGUMENTS, TensorMap) is None
    too_large = (*ARGUMENTS[:3], 1 << 31, *ARGUMENTS[4:])
    assert driver_launch(compiled(), (1,), too_large, TensorMap) is None
    assert driver_launch(compiled(), (1,), ARGUMENTS, TensorMap) is not None


def test_parameters_are_those_of_a_compiled_kernel(tmp_path: Path) -> None:
    """Number and sizes as Triton's compiler writes them to the kernel's entry point. In a process of its own: in this
    one kernels are interpreted."""
    pytest.importorskip("triton", reason="what is tested is Triton's, which is not installed")
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, entry = done.stdout.splitlines()
    assert ours == entry


COMPILED = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from fusion_pass.kernels import driver_launch as module
from fusion_pass.kernels.driver_launch import ADDRESS

@triton.jit
def kernel(x, pair, n, big, eps, nothing, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(pair[0] + at * pair[1]) * eps + n + big)

signature = {
    "x": "*fp32", "pair": ("*fp32", "i32", "constexpr"), "n": "i32", "big": "i64", "eps": "fp32",
    "nothing": "constexpr", "BLOCK": "constexpr",
}
source = triton.compiler.ASTSource(kernel, signature, {(1, 2): None, (5,): None, (6,): 64})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
arguments = (ADDRESS, (ADDRESS, 3, None), 5, 1 << 40, 0.5, None, 64)
print([module._size(p) for p in module._parameters(tuple(made.src.signature.values()), arguments)])
entry = made.asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
kinds = [line.split(".param", 1)[1].replace(".ptr .global .align 1", "").split()[0] for line in entry.splitlines()
         if ".param" in line]
print([{".u64": 8, ".b64": 8, ".u32": 4, ".b32": 4, ".f32": 4}[kind] for kind in kinds])
"""
