"""Memory that processes of one host share, without a name on disk.

A memfd belongs to whoever holds its descriptor and is gone with the last holder, so nothing is left behind
however a process ends, and no helper process of Python's can unlink it under somebody who still uses it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_FUTURE_WRITE = 1033, 0x0002, 0x0010


class SharedMemory:
    """A mapped memfd; arrays made from `view` keep the mapping alive."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = -1
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)
        self.fd = fd

    @classmethod
    def create(cls, nbytes: int, name: str = "farstep") -> SharedMemory:
        """Zeroed memory; pages cost nothing until they are touched."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(nbytes, 1))
            # Nobody can shrink it, so nobody can make another process die of SIGBUS.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            return cls(fd, max(nbytes, 1))
        except BaseException:
            os.close(fd)
            raise

    def refuse_other_writers(self) -> None:
        """From now on only this mapping writes: whoever else gets the descriptor can read, and no more."""
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.1 has no such seal
                raise

    def close(self) -> None:
        """Give the descriptor back; the mapping goes when the last array over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
