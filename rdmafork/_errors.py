"""What rdmafork raises and warns of."""


class InheritedError(RuntimeError):
    """A forked child used an object that belongs to the parent process.

    The message says what the child has of the memory. Register, or open the device,
    afresh in the child.
    """

    __module__ = "rdmafork"


class UnprotectedWarning(RuntimeWarning):
    """Memory was registered before fork_init(), so a fork() may move its pages.

    Call fork_init() first, or set RDMAV_FORK_SAFE=1.
    """

    __module__ = "rdmafork"


class SharedPageWarning(RuntimeWarning):
    """Memory was registered on a page that forked children need, and lack or get too late.

    The message says whose page it is: fork()'s own, or malloc()'s. This happens only where
    partial pages are kept from children: on kernels whose copying at fork cannot be
    trusted, and with RDMAFORK_TRUST_COPYING=0. Register a Buffer instead.
    """

    __module__ = "rdmafork"
