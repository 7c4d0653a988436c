"""Where rdmafork's header and library are; the rest is in pyproject.toml."""

import os

from setuptools import Extension, setup

import rdmafork

# No rpath: registered_pool imports rdmafork first, and the loader goes by the library's name.
pool = Extension(
    "registered_pool._pool",
    ["registered_pool/_pool.pyx"],
    include_dirs=[rdmafork.get_include()],
    library_dirs=[os.path.dirname(rdmafork.get_library())],
    libraries=["rdmafork"],
)
setup(ext_modules=[pool])
