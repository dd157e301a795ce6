#!/usr/bin/env bash
# Makes the environment of the Ascend tests in DIR (default .venv-ascend): Triton-Ascend (which installs itself as `triton`,
# so it cannot share an environment with upstream Triton), Huawei's compiler as far as it is public, LLVM 19 with MLIR tools
# unpacked (not installed) from Debian packages, and the operator schemas out of the torch_npu wheel.
set -euo pipefail
directory=${1:-.venv-ascend}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3.11}  # triton-ascend 3.2.0 has wheels up to Python 3.11
stamp="$directory/complete-$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-12)"
[ -e "$stamp" ] && exit 0

"$python" -m venv "$directory"
pip="$directory/bin/pip --quiet --disable-pip-version-check"
# triton-ascend does not declare pybind11; its interpreter breaks with numpy 2.4 (range over a 1-element array).
# (--no-compile: most of what is installed is never imported.)
$pip install --no-compile "setuptools>=77" torch==2.13.0 triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11 numpy==1.26.4 \
  "pytest>=8" pytest-timeout pytest-xdist hypothesis
$pip install --no-deps --no-build-isolation --editable "$root"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
$pip download --no-deps --dest "$scratch" torch-npu==2.13.0
"$directory/bin/python" - "$scratch" "$directory/torch_npu_schemas.yaml" <<'PY'
import pathlib, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("torch_npu-*.whl"))
text = zipfile.ZipFile(wheel).read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml")
pathlib.Path(sys.argv[2]).write_bytes(text)
PY

if command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null; then
  packages="mlir-19-tools libmlir-19 libllvm19 llvm-19 libclang-cpp19"
  (cd "$scratch" && { apt-get -qq download $packages 2> /dev/null || { apt-get -qq update && apt-get -qq download $packages; }; })
  mkdir -p "$directory/llvm"
  for package in "$scratch"/*.deb; do dpkg-deb --extract "$package" "$directory/llvm"; done
else
  echo "apt-get is not here: without LLVM 19 the lowered kernels are not executed (ASCEND_TESTS_LLVM19 names another copy)" >&2
fi
touch "$stamp"
