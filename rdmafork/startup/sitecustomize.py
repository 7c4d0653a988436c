"""Under `rdmafork exec --trace-forks` any Python finds this first, and tells who forks.

Then the program's own sitecustomize is imported, if it has one. Nothing of rdmafork is: this
Python may have another version, and not have it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _trace() -> None:
    from importlib import util

    path = os.path.join(os.path.dirname(_HERE), "_trace.py")
    spec = util.spec_from_file_location("rdmafork._trace", path)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["rdmafork._trace"] = module  # the one that `import rdmafork` finds
    module.begin()


def _make_way() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    if hasattr(os, "register_at_fork"):  # Python 3.7
        _trace()
    _make_way()
