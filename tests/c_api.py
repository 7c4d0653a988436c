"""The C API by ctypes, for calls that Python's own functions hide: see csrc/rdmafork.h."""

import ctypes

import rdmafork


class Handle(ctypes.Structure):
    _fields_ = (
        ("serial", ctypes.c_uint64),
        ("slot", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
    )


class Error(ctypes.Structure):
    _fields_ = (
        ("cause", ctypes.c_int),
        ("start", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("address", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("text", ctypes.c_char * 256),
    )


def load():
    library = ctypes.CDLL(rdmafork.get_library(), use_errno=True)
    library.rf_register.argtypes = [
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_uint,
        ctypes.c_int,
        ctypes.POINTER(Handle),
        ctypes.POINTER(Error),
    ]
    library.rf_release.argtypes = [Handle, ctypes.c_uint]
    return library
