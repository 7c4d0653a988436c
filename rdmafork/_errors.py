"""What rdmafork raises and warns of."""


class InheritedError(RuntimeError):
    """Used in a forked child: an object that belongs to the parent process.

    The memory it names is absent here. Register afresh in the child.
    """

    __module__ = "rdmafork"


class UnprotectedWarning(RuntimeWarning):
    """Memory was registered before fork_init(): a fork() may take its pages away."""

    __module__ = "rdmafork"


class SharedPageWarning(RuntimeWarning):
    """Memory was registered on a page that forked children need, and will not have.

    Only where whole pages leave children: on kernels whose copying at fork cannot be
    trusted, and with RDMAFORK_EDGES=whole.
    """

    __module__ = "rdmafork"
