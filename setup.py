"""Which folder is which package; everything else is in pyproject.toml.

`kernels/` and `patterns/` stand at the top of the repository and install inside `fusion_pass`: a top-level package
named `kernels` would replace the unrelated PyPI package `kernels`, which transformers imports.
"""

from setuptools import find_packages, setup

FOLDERS = {"fusion_pass": "fusion_pass", "fusion_pass.patterns": "patterns", "fusion_pass.kernels": "kernels"}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(folder)))
    ],
)
