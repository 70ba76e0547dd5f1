"""Replaces calls between loaded libraries in this process, by the name of the function."""

import ctypes
import os
from pathlib import Path

# of <elf.h>: tags of a dynamic section, and bytes per row of its tables
END, SIZE_OF_CALLS, STRINGS, SYMBOLS, CALLS = 0, 2, 5, 6, 23
FIELD, SYMBOL, CALL = 16, 24, 24
LINK_MAP = 2  # of dlinfo
READ_WRITE = 3  # of mprotect


class _LinkMap(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("fields", ctypes.c_uint64)]


def loaded(library: Path) -> ctypes.CDLL | None:
    """The library if this process has loaded it."""
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def address(function: ctypes._CFuncPtr) -> int:  # type: ignore[name-defined]
    return ctypes.cast(function, ctypes.c_void_p).value


def _number(place: int) -> int:
    return ctypes.c_uint64.from_address(place).value


def entry(library: ctypes.CDLL, name: str) -> int | None:
    """The address of the library's pointer to the function ``name`` of another library, if it
    calls that function.
    """
    found, table = ctypes.POINTER(_LinkMap)(), {}
    ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), LINK_MAP, ctypes.byref(found))
    field = found.contents.fields
    while (tag := _number(field)) != END:
        table[tag] = _number(field + 8)
        field += FIELD
    if CALLS not in table:
        return None
    for call in range(table[CALLS], table[CALLS] + table[SIZE_OF_CALLS], CALL):
        symbol = table[SYMBOLS] + SYMBOL * (_number(call + 8) >> 32)
        offset = ctypes.c_uint32.from_address(symbol).value
        if ctypes.string_at(table[STRINGS] + offset) == name.encode():
            return found.contents.base + _number(call)
    return None


def replace(entry: int, function: int) -> int:
    """Points the entry to another function; returns the address of the previous one."""
    before, page = _number(entry), os.sysconf("SC_PAGESIZE")
    begin = ctypes.c_void_p(entry // page * page)
    # read-only in some builds; left writable, since in others data are on the same page
    ctypes.CDLL(None).mprotect(begin, ctypes.c_size_t(page), READ_WRITE)
    ctypes.c_uint64.from_address(entry).value = function
    return before


def replace_in(folder: Path | str, name: str, function: int) -> None:
    """Makes the loaded libraries of a folder call ``function`` instead of ``name``."""
    for path in Path(folder).rglob("*.so"):
        if (library := loaded(path)) and (place := entry(library, name)):
            replace(place, function)
