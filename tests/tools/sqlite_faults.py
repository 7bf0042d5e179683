"""A disk that fails under SQLite when a test says so: SQLite's own files, with some calls replaced.

    with FailingDisk.install() as disk:
        with open_store(url) as store:
            disk.syncs_fail = True
            with pytest.raises(OutcomeUnknown):
                store.write(work)

SQLite reaches its files through a table of functions (a "VFS", https://www.sqlite.org/vfs.html).  Ours is the table
of this machine but for the functions named below, so that what SQLite makes of a failure is the real thing.
"""

from __future__ import annotations

import _sqlite3
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

_OK: Final = 0
#: https://www.sqlite.org/rescode.html
_IOERR_WRITE: Final = 778
_IOERR_FSYNC: Final = 1034

#: Of `sqlite3_io_methods`: the last version that knows no shared memory, and with it no write-ahead log.
_WITHOUT_SHARED_MEMORY: Final = 1

_Sync: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_Write: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_Open: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs`."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_bytes", ctypes.c_int),
        ("path_bytes_max", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 15),
    )


class _Methods(ctypes.Structure):
    """`sqlite3_io_methods`."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("close", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("truncate", ctypes.c_void_p),
        ("sync", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 13),
    )


class NoSQLiteLibraryError(RuntimeError):
    """Python's SQLite is built in so that its functions cannot be reached."""


class FailingDisk:
    """A disk under all SQLite files that are opened while it is installed; nothing fails before a test says so."""

    def __init__(self, library: Any) -> None:
        """Use `install` instead."""
        #: Whether what was written cannot be made durable from now on.
        self.syncs_fail = False
        #: Called whenever what was written has become durable.
        self.when_synced: Callable[[], object] = lambda: None
        #: Whether nothing can be written from now on.
        self.writes_fail = False
        #: Whether files that are opened from now on have no shared memory, as on some network file systems.
        self.lacks_shared_memory = False
        self._library = library
        self._original = _Vfs.from_address(library.sqlite3_vfs_find(None))
        self._original_open = _Open(self._original.open)
        self._vfs = _Vfs.from_buffer_copy(self._original)
        self._vfs.name = b"txnstore-failing-disk"
        # What C code points to must not be collected.
        self._kept: list[Any] = [_Open(self._open)]
        self._vfs.open = ctypes.cast(self._kept[0], ctypes.c_void_p).value

    @classmethod
    @contextmanager
    def install(cls) -> Iterator[Self]:
        """Put the disk under every SQLite file that is opened in the block; close all of them before it ends.

        Raises:
            NoSQLiteLibraryError: this Python does not let us.
        """
        disk = cls(_library())
        disk._library.sqlite3_vfs_register(ctypes.byref(disk._vfs), 1)
        try:
            yield disk
        finally:
            disk.syncs_fail = disk.writes_fail = False
            disk._library.sqlite3_vfs_unregister(ctypes.byref(disk._vfs))

    def _open(self, vfs: int, name: int, file: int, flags: int, flags_out: int) -> int:
        code: int = self._original_open(vfs, name, file, flags, flags_out)
        # A file begins with the address of its methods; SQLite puts no address there if the file could not be opened.
        methods = ctypes.c_void_p.from_address(file)
        if code == _OK and methods.value:
            methods.value = ctypes.addressof(self._failing(_Methods.from_address(methods.value)))
        return code

    def _failing(self, original: _Methods) -> _Methods:
        sync, write = _Sync(original.sync), _Write(original.write)
        failing = _Methods.from_buffer_copy(original)

        def sync_unless_failing(file: int, flags: int) -> int:
            if self.syncs_fail:
                return _IOERR_FSYNC
            code: int = sync(file, flags)
            self.when_synced()
            return code

        failing_sync = _Sync(sync_unless_failing)
        failing_write = _Write(
            lambda file, data, size, offset: _IOERR_WRITE if self.writes_fail else write(file, data, size, offset)
        )
        failing.sync = ctypes.cast(failing_sync, ctypes.c_void_p).value
        failing.write = ctypes.cast(failing_write, ctypes.c_void_p).value
        if self.lacks_shared_memory:
            failing.version = _WITHOUT_SHARED_MEMORY
        self._kept += [failing, failing_sync, failing_write]
        return failing


def _library() -> Any:
    try:
        # The module for Python holds the library, or is linked to it: either way its functions are found there.
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
    except (AttributeError, OSError) as error:
        raise NoSQLiteLibraryError("the functions of Python's SQLite library cannot be reached") from error
    return library
