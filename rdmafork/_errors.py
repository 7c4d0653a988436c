"""The exceptions and warnings of rdmafork."""


class InheritedError(RuntimeError):
    """A forked child used an object that belongs to the parent process.

    The message says what the child gets of the memory. Register the memory, or open the
    device, in the child itself.
    """

    __module__ = "rdmafork"


class UnprotectedWarning(RuntimeWarning):
    """Memory was registered before fork_init(), so a fork() may move its pages.

    Call fork_init() first, or set RDMAV_FORK_SAFE=1.
    """

    __module__ = "rdmafork"


class SharedPageWarning(RuntimeWarning):
    """Memory was registered on a page that forked children need, but get too late or never.

    The message says which code uses the page: fork() or malloc(). This happens only where
    partial pages are marked: on kernels whose copying at fork cannot be trusted, and with
    RDMAFORK_TRUST_COPYING=0. Register a Buffer instead.
    """

    __module__ = "rdmafork"
