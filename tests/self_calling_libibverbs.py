"""A libibverbs that calls its own functions directly, as Ubuntu's does, made from the system's.

Linking with -Wl,-Bsymbolic-functions leaves no relocation by which a library's references to its
own functions could go elsewhere. The copy made here has none either: those relocations name no
symbol any more (R_X86_64_RELATIVE), only the function's place. To the loader, and to who reads
relocations, that is the same, and it needs neither the source nor what building it takes.
"""

import os
import struct
import subprocess
import sys

import pytest

NAMED = "RDMAFORK_TEST_BOUND_LIBIBVERBS"  # one that was linked so, to be taken instead
LOADED = """
import ctypes
ctypes.CDLL("libibverbs.so.1")
print(next(line.split()[-1] for line in open("/proc/self/maps") if "libibverbs" in line))
"""

PT_LOAD, PT_DYNAMIC = 1, 2
DT_PLTRELSZ, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 6, 7, 8, 23
GLOB_DAT, JUMP_SLOT, RELATIVE = 6, 7, 8
FUNCTION = 2


class Elf:
    """As much of a 64-bit little-endian shared library as its relocations take."""

    def __init__(self, data):
        self.data = data
        start, size, count = *self.read("<Q", 32), *self.read("<HH", 54)
        self.headers = [self.read("<IIQQQQ", start + i * size) for i in range(count)]
        self.loads = [header for header in self.headers if header[0] == PT_LOAD]
        (place,) = (header[2] for header in self.headers if header[0] == PT_DYNAMIC)
        self.dynamic = {}
        while (entry := self.read("<QQ", place))[0]:
            self.dynamic[entry[0]] = entry[1]
            place += 16

    def read(self, form, place):
        return struct.unpack_from(form, self.data, place)

    def place(self, address):
        """The place in the file of the byte that will be at this address."""
        for _, _, offset, start, _, size in self.loads:
            if start <= address < start + size:
                return address - start + offset
        raise ValueError(f"{address:#x} is not in the file")

    def relocations(self):
        """(place, kind, symbol)"""
        for table, nbytes in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
            start = self.place(self.dynamic[table])
            for place in range(start, start + self.dynamic[nbytes], 24):
                _, info = self.read("<QQ", place)
                yield place, info & 0xFFFFFFFF, info >> 32

    def bind(self):
        """Every reference to a function of its own."""
        symbols = self.place(self.dynamic[DT_SYMTAB])
        for place, kind, symbol in self.relocations():
            _, info, _, section, value = self.read("<IBBHQ", symbols + 24 * symbol)
            if kind in (GLOB_DAT, JUMP_SLOT) and section and info & 15 == FUNCTION:
                struct.pack_into("<QQ", self.data, place + 8, RELATIVE, value)


def make(directory):
    """The path of one; a test that cannot have it is skipped."""
    named = os.environ.get(NAMED)
    if named:
        return named
    if os.uname().machine != "x86_64":
        pytest.skip("only references of x86-64 are bound")
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"libibverbs is not installed: {done.stderr.splitlines()[-1]}")
    with open(done.stdout.strip(), "rb") as file:
        elf = Elf(bytearray(file.read()))
    elf.bind()
    path = directory / "libibverbs.so.1"
    path.write_bytes(elf.data)
    return str(path)
