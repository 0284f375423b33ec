"""Writers of cyclic blocks that get killed: `cyclic_writer.py PATH FIRST COUNT`, one at a time.

For each line on stdin a process is forked that joins the columns and writes until it is killed; its number is printed
first. When it is dead and gone, so is a second line. Row `p` of column `c` holds `p * 1000 + c` everywhere.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from farstep.buffer.storage.cyclic import CyclicBlocks

CHUNKS = (1, 3, 7, 2)


def values(blocks: CyclicBlocks, start: np.ndarray, columns: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """The values of the next rows of these columns."""
    number = (start[None] + np.arange(rows)[:, None]) * 1000 + columns[None]
    return {
        name: np.broadcast_to(number.reshape(*number.shape, *[1] * len(spec.shape)), (*number.shape, *spec.shape))
        for name, spec in blocks.schema.items()
    }


def write_for_ever(path: str, first: int, count: int) -> None:
    blocks = CyclicBlocks.attach(path)
    writer = blocks.join(first, count)
    columns = np.arange(first, first + count)
    start = blocks.committed(slice(first, first + count))
    for k in range(10**9):
        rows = CHUNKS[k % len(CHUNKS)]
        writer.write(values(blocks, start, columns, rows))
        start = start + rows


def main(path: str, first: str, count: str) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            try:
                write_for_ever(path, int(first), int(count))
            finally:
                os._exit(1)
        print(child, flush=True)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        print("killed" if os.WIFSIGNALED(status) else f"status {status}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
