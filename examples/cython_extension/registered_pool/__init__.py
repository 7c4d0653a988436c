"""Blocks of registered memory, taken and given back without the GIL."""

import rdmafork  # noqa: F401  loads the library that _pool is linked with
from registered_pool._pool import Pool

__all__ = ["Pool"]
