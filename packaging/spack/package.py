# For spack_repo/builtin/packages/py_rdmafork/package.py.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyRdmafork(PythonPackage):
    """fork() with RDMA-registered memory: safe and cheap."""

    pypi = "rdmafork/rdmafork-0.1.0.tar.gz"

    license("BSD-3-Clause")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-cython@3.1:", type="build")
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-setuptools-scm@8:", type="build")

    conflicts("platform=darwin", msg="rdmafork needs Linux")
