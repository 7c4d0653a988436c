"""How the dynamic loader will load an ELF file, read from the file itself.

    header ─ program headers ─ PT_INTERP   the loader; a static program has none
                             ├ PT_DYNAMIC  DT_NEEDED: the libraries it is linked with
                             │             DT_JMPREL, DT_RELA, DT_REL: relocations, each of a symbol
                             ├ PT_NOTE     the build id: another for every other file
                             └ PT_LOAD     what lies where in memory, and so in the file
           └ section headers ─ SHT_SYMTAB  all functions, unless it was stripped
                             └ SHT_DYNSYM  those that other files may call

A library's call of a function of its own can be answered by another library only where it has a
relocation for it: linked with -Bsymbolic-functions it has none, and calls itself directly.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE = 1, 2, 3, 4
_NT_GNU_BUILD_ID = 3
_SHT_SYMTAB, _SHT_DYNSYM, _STT_FUNC = 2, 11, 2
_DT_NEEDED, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB = 1, 2, 5, 6
_DT_RELA, _DT_RELASZ, _DT_REL, _DT_RELSZ, _DT_PLTREL, _DT_JMPREL = 7, 8, 17, 18, 20, 23

_MACHINES = {
    3: "i386", 8: "MIPS", 20: "PowerPC", 21: "PowerPC64", 22: "S/390", 40: "ARM", 62: "x86-64",
    183: "AArch64", 243: "RISC-V", 258: "LoongArch",
}  # fmt: skip


class NotElf(ValueError):
    """No ELF file, or one that is cut short."""


class Machine(NamedTuple):
    """The machine and class, alike in all files that are loaded together."""

    bits: int
    order: str  #: "<" little, ">" big endian
    number: int

    def __str__(self) -> str:
        return f"{self.bits}-bit {_MACHINES.get(self.number, f'machine {self.number}')}"


class _Segment(NamedTuple):
    kind: int
    offset: int
    address: int
    nbytes: int


class _Symbol(NamedTuple):
    name: int  #: where that is in the file
    kind: int
    address: int
    nbytes: int


class Elf:
    """An open ELF file. Everything asked of it may raise NotElf."""

    def __init__(self, path: str):
        with open(path, "rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise NotElf(f"{path} is empty") from None
        if self._data[:4] != b"\x7fELF" or len(self._data) < 52:
            self._data.close()
            raise NotElf(f"{path} is not an ELF file")
        order = ">" if self._data[5] == 2 else "<"
        number = int.from_bytes(self._data[18:20], "big" if order == ">" else "little")
        self.machine: Machine = Machine(64 if self._data[4] == 2 else 32, order, number)

    def __enter__(self) -> Elf:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._data.close()

    @property
    def interpreter(self) -> str | None:
        """The path of the loader, None for a static program and for a library."""
        for segment in self._segments():
            if segment.kind == _PT_INTERP:
                return self._string(segment.offset)
        return None

    @property
    def needed(self) -> list[str]:
        """The names of the libraries it is linked with."""
        return [self._name(value) for tag, value in self._dynamic() if tag == _DT_NEEDED]

    @property
    def build_id(self) -> str | None:
        """In hexadecimal; None: the file has none."""
        for segment in self._segments():
            at, end = segment.offset, segment.offset + segment.nbytes
            while segment.kind == _PT_NOTE and end - at >= 12:
                name_nbytes, nbytes, kind = self._read("III", at)
                start = at + 12 + (name_nbytes + 3 & ~3)
                if kind == _NT_GNU_BUILD_ID and self._data[at + 12 : start] == b"GNU\0":
                    return self._data[start : start + nbytes].hex()
                at = start + (nbytes + 3 & ~3)
        return None

    def imports(self) -> set[str]:
        """The symbols that relocations name, which another library may define."""
        dynamic = dict(self._dynamic())
        tables = (
            (_DT_RELA, dynamic.get(_DT_RELA), dynamic.get(_DT_RELASZ)),
            (_DT_REL, dynamic.get(_DT_REL), dynamic.get(_DT_RELSZ)),
            (dynamic.get(_DT_PLTREL), dynamic.get(_DT_JMPREL), dynamic.get(_DT_PLTRELSZ)),
        )
        found = set()
        for kind, address, nbytes in tables:
            if address and nbytes:
                found |= set(self._symbols(kind == _DT_RELA, address, nbytes))
        return {self._name(name) for name in found}

    def function_at(self, address: int) -> str | None:
        """The function whose code lies at an address of the file, loaded where it says."""
        for symbol in self._defined(_SHT_SYMTAB, _SHT_DYNSYM):
            if symbol.kind == _STT_FUNC and 0 <= address - symbol.address < symbol.nbytes:
                return self._string(symbol.name)
        return None

    def address_of(self, name: str) -> int | None:
        """Where a symbol is that the file defines and that other files may refer to."""
        for symbol in self._defined(_SHT_DYNSYM):
            if self._string(symbol.name) == name:
                return symbol.address
        return None

    def _defined(self, *tables: int) -> Iterator[_Symbol]:
        """The symbols that .symtab or .dynsym say this file itself defines."""
        wide = self.machine.bits == 64
        (start,) = self._read("Q", 40) if wide else self._read("I", 32)
        size, count = self._read("HH", 58 if wide else 46)
        for at in range(start, start + size * count, size or 1) if start else ():
            kind, offset, nbytes, link = self._section(at)
            if kind not in tables:
                continue
            strings = self._section(start + size * link)[1]
            for entry in range(offset, offset + nbytes, 24 if wide else 16):
                if wide:
                    name, info, _, section, address, length = self._read("IBBHQQ", entry)
                else:
                    name, address, length, info, _, section = self._read("IIIBBH", entry)
                if section:
                    yield _Symbol(strings + name, info & 15, address, length)

    def _section(self, at: int) -> tuple[int, int, int, int]:
        """Kind, place in the file, bytes, the section that it refers to."""
        if self.machine.bits == 64:
            _, kind, _, _, offset, nbytes, link = self._read("IIQQQQI", at)
        else:
            _, kind, _, _, offset, nbytes, link = self._read("IIIIIII", at)
        return kind, offset, nbytes, link

    def _symbols(self, addends: bool, address: int, nbytes: int) -> Iterator[int]:
        """Where the names of a relocation table's symbols are among the strings."""
        wide = self.machine.bits == 64
        symtab = self._table(_DT_SYMTAB)
        entry = ("QQ" if wide else "II") + ("q" if wide else "i") * addends
        start = self._offset(address)
        for at in range(start, start + nbytes, struct.calcsize("<" + entry)):
            symbol = self._read(entry, at)[1] >> (32 if wide else 8)
            if symbol:
                yield self._read("I", symtab + symbol * (24 if wide else 16))[0]

    def _segments(self) -> Iterator[_Segment]:
        wide = self.machine.bits == 64
        (start,) = self._read("Q", 32) if wide else self._read("I", 28)
        size, count = self._read("HH", 54 if wide else 42)
        for at in range(start, start + size * count, size or 1):
            if wide:
                kind, _, offset, address, _, nbytes = self._read("IIQQQQ", at)
            else:
                kind, offset, address, _, nbytes = self._read("IIIII", at)
            yield _Segment(kind, offset, address, nbytes)

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        entry, size = ("qQ", 16) if self.machine.bits == 64 else ("iI", 8)
        for segment in self._segments():
            if segment.kind == _PT_DYNAMIC:
                for at in range(segment.offset, segment.offset + segment.nbytes, size):
                    tag, value = self._read(entry, at)
                    if tag == 0:
                        return
                    yield tag, value

    def _table(self, tag: int) -> int:
        return self._offset(dict(self._dynamic()).get(tag, -1))

    def _offset(self, address: int) -> int:
        for segment in self._segments():
            if segment.kind == _PT_LOAD and 0 <= address - segment.address < segment.nbytes:
                return address - segment.address + segment.offset
        raise NotElf(f"{address:#x} is in no segment")

    def _name(self, index: int) -> str:
        return self._string(self._table(_DT_STRTAB) + index)

    def _string(self, at: int) -> str:
        end = self._data.find(b"\0", at) if at < len(self._data) else -1
        if end < 0:
            raise NotElf("a name does not end")
        return self._data[at:end].decode("utf-8", "backslashreplace")

    def _read(self, form: str, at: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(self.machine.order + form, self._data, at)
        except (struct.error, OverflowError):
            raise NotElf("it is cut short") from None
