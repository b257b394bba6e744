"""Read a shared library's dependencies and imported symbols from its ELF file.

    .dynamic        NEEDED libcudart.so.13, SONAME ...
    .gnu.version_r  libcudart.so.13: version "libcudart.so.13" is number 7
    .dynsym         cudaMalloc, undefined, version number 7  ->  imported from libcudart.so.13

Does not use binutils, which users may not have installed. Reads only 64-bit little-endian files, the format
of x86-64. Source: System V ABI, chapters 4 and 5; the LSB on symbol versioning.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNAMIC = struct.Struct("<qQ")  # tag, value
_NEED = struct.Struct("<HHIII")  # version, count, file, first auxiliary, next
_NEED_AUXILIARY = struct.Struct("<IHHII")  # hash, flags, number, name, next

_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_UNDEFINED = 0
_HIDDEN = 0x8000


@dataclass(frozen=True, slots=True)
class ImportedSymbol:
    """A symbol that a library imports."""

    name: str
    soname: str
    """The library that must define it, or "" if the linker recorded none."""
    version: str


class ElfFile:
    """A shared library, memory-mapped: PyTorch's are half a gigabyte each.

    Raises:
        ValueError: the file is not a 64-bit little-endian ELF file.

    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:6] != b"\x7fELF\x02\x01":
            self._bytes.close()
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", self._bytes, 40)
        entry, count = struct.unpack_from("<HH", self._bytes, 58)
        self._sections = [_SECTION.unpack_from(self._bytes, table + i * entry) for i in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    def needed(self) -> list[str]:
        """Return the SONAMEs of its NEEDED entries, in the file's order."""
        return self._dynamic(_DT_NEEDED)

    def search_paths(self) -> list[str]:
        """Return its RUNPATH, or else its RPATH; ``$ORIGIN`` stands for the library's own folder."""
        found = self._dynamic(_DT_RUNPATH) or self._dynamic(_DT_RPATH)
        return [folder for text in found for folder in text.split(":") if folder]

    def imports(self) -> list[ImportedSymbol]:
        """Return the symbols that it does not define itself."""
        versions, numbers = self._versions_needed(), self._version_numbers()
        found = []
        for data, names in self._of_type(_SHT_DYNSYM):
            for i, (name, _, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(data)):
                if section == _UNDEFINED and name:
                    soname, version = versions.get(numbers[i] if numbers else 0, ("", ""))
                    found.append(ImportedSymbol(self._text(names + name), soname, version))
        return found

    def defines(self, wanted: set[str]) -> set[str]:
        """Return which of these names it defines."""
        sought = {name.encode() for name in wanted}
        found = set()
        for data, names in self._of_type(_SHT_DYNSYM):
            for name, _, _, section, _, _ in _SYMBOL.iter_unpack(data):
                if section != _UNDEFINED and name:
                    start = names + name
                    text = self._bytes[start : self._bytes.find(b"\0", start)]
                    if text in sought:
                        found.add(text.decode())
        return found

    def _dynamic(self, wanted: int) -> list[str]:
        for data, names in self._of_type(_SHT_DYNAMIC):
            return [self._text(names + value) for tag, value in _DYNAMIC.iter_unpack(data) if tag == wanted]
        return []

    def _of_type(self, kind: int) -> Iterator[tuple[bytes, int]]:
        """Yield the bytes of each section of a type, and the file offset of its strings."""
        for _, type_, _, _, offset, size, link, _, _, _ in self._sections:
            if type_ == kind:
                strings = self._sections[link][4] if link < len(self._sections) else 0
                yield self._bytes[offset : offset + size], strings

    def _text(self, start: int) -> str:
        return self._bytes[start : self._bytes.find(b"\0", start)].decode()

    def _version_numbers(self) -> tuple[int, ...]:
        for data, _ in self._of_type(_SHT_GNU_VERSYM):
            return tuple(number & ~_HIDDEN for (number,) in struct.iter_unpack("<H", data))
        return ()

    def _versions_needed(self) -> dict[int, tuple[str, str]]:
        """Return the required versions: number in this file -> library and version name."""
        versions = {}
        for data, names in self._of_type(_SHT_GNU_VERNEED):
            at = 0
            while True:
                _, count, file, auxiliary, next_ = _NEED.unpack_from(data, at)
                soname, at_auxiliary = self._text(names + file), at + auxiliary
                for _ in range(count):
                    _, _, number, name, step = _NEED_AUXILIARY.unpack_from(data, at_auxiliary)
                    versions[number] = (soname, self._text(names + name))
                    at_auxiliary += step
                if not next_:
                    break
                at += next_
        return versions
