"""Memory that processes of one host share: memfds, i.e. files without a name in the file system.

The kernel frees a memfd with its last descriptor and mapping. So nothing is left behind, no matter how a process ends,
and Python's resource tracker cannot unlink it while another process uses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Sequence

from farstep.core import BytesLike
from farstep.errors import WireError, typed_shortage

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE, _F_SEAL_FUTURE_WRITE = 0x0002, 0x0004, 0x0008, 0x0010
_IMMUTABLE = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_WRITE
_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


class SharedMemory:
    """A mapped memfd; arrays over `map` keep the mapping alive."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = -1
        self.nbytes = nbytes
        self.map = mapped(fd, nbytes)
        self.fd = fd

    @classmethod
    def create(cls, nbytes: int, name: str = "farstep") -> SharedMemory:
        """Create zeroed memory. The kernel allocates a page when it is first touched."""
        with typed_shortage(f"{nbytes} bytes of shared memory ({name}) could not be allocated"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, max(nbytes, 1))
                # Seal it against shrinking, because reading beyond a new end would kill a process with SIGBUS.
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
                return cls(fd, max(nbytes, 1))
            except BaseException:
                os.close(fd)
                raise

    def refuse_other_writers(self) -> None:
        """Make the memory read-only for all processes that map it from now on. This mapping can still write."""
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.1 has no such seal
                raise

    def remap(self, fd: int) -> None:
        """Map another file of the same size at the same address, so that views of `map` show its contents.

        Raises:
            ValueError: The file is smaller.
        """
        if os.fstat(fd).st_size < self.nbytes:  # reading past the end of the file raises SIGBUS
            raise ValueError(f"cannot map {self.nbytes} bytes of a file of {os.fstat(fd).st_size}")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, self.nbytes, prot, flags, fd, 0) == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Close the descriptor. The mapping ends when no array uses it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def write_immutable(frames: Sequence[BytesLike]) -> int:
    """Write the frames to a new memfd and seal it, so that no process can change it. The caller must close it."""
    fd = os.memfd_create("farstep-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for frame in frames:
            view = memoryview(frame).cast("B")
            while view:
                view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, _F_ADD_SEALS, _IMMUTABLE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_immutable(fd: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """Map a peer's memfd without copying, so that unread bytes take no memory of this process.

    Args:
        fd: The descriptor.
        nbytes: Size of the memory in bytes.
        writable: Whether this process may write to its view. It then gets a copy of each page that it writes to.

    Raises:
        WireError: The descriptor is not a memfd, is not sealed, does not have the size `nbytes`, or has holes. Without
            a seal, the sender could change the memory, and reading could raise SIGBUS. Reading holes would allocate
            memory.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise WireError("a large message that is not in a memfd.") from error
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or seals & _IMMUTABLE != _IMMUTABLE:
        raise WireError("a large message in memory that its sender can still change.")
    if about.st_size != nbytes or not nbytes:
        raise WireError(f"a large message of {about.st_size} bytes; its frame table says {nbytes}.")
    if about.st_blocks * _BLOCK_BYTES < nbytes:
        raise WireError(f"a large message of {nbytes} bytes, of which {about.st_blocks * _BLOCK_BYTES} were written.")
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mapped(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=prot)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10


def mapped(
    fd: int, nbytes: int, *, flags: int = mmap.MAP_SHARED, prot: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> memoryview:
    """Map the first `nbytes` of a file until the last view of them is released.

    `mmap.mmap` would hold a duplicate of the descriptor for the lifetime of the mapping. Every batch that a learner
    keeps, and every closed cluster that is still referenced, would then cost a descriptor.
    """
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:  # reading past the end of the file raises SIGBUS
        raise ValueError(f"cannot map {nbytes} bytes of a file of {size}")
    address = _libc.mmap(None, nbytes, prot, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    contents = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(contents, _libc.munmap, address, nbytes).atexit = False  # views may outlive the interpreter
    view = memoryview(contents).cast("B")
    return view if prot & mmap.PROT_WRITE else view.toreadonly()
