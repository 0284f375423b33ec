"""Writes videos that browsers can play (H.264 in mp4), with the ffmpeg of the package imageio-ffmpeg."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from farstep.core import Array
from farstep.errors import ConfigError, RunError
from farstep.observe.extras import require
from farstep.observe.files import replacing


def write_video(
    path: str | os.PathLike[str], frames: Iterable[Array], fps: float = 30.0, *, timeout_s: float = 60.0
) -> Path:
    """Write frames to a video. The file appears only when it is complete.

    Args:
        path: File to write, ending in .mp4.
        frames: uint8 arrays [height, width, 3] of equal size. Each is encoded as soon as the iterable yields it.
        fps: Frames per second.
        timeout_s: Maximum seconds for ffmpeg to accept each frame, and to finish after the last frame.

    Returns:
        The path of the file.

    Raises:
        ConfigError: An argument or a frame is invalid, or imageio-ffmpeg is not installed.
        RunError: ffmpeg failed or took too long; the message quotes its output.
    """
    path = Path(path)
    if path.suffix != ".mp4":
        raise ConfigError(f"a video cannot be written to {path.name}; expected a name that ends in .mp4.")
    check_fps(fps)
    ffmpeg = require_encoder().get_ffmpeg_exe()
    arriving = _checked(frames)
    first = next(arriving, None)
    if first is None:
        raise ConfigError(f"there are no frames for {path.name}; expected at least one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, _running(_command(ffmpeg, first, fps, partial), timeout_s) as encoder:
        encoder.write(first)
        for frame in arriving:
            encoder.write(frame)
        encoder.finish()
    return path


def check_fps(fps: float) -> None:
    """Raise `ConfigError` unless `fps` is between 0 and 1000."""
    if not 0 < fps < 1000:
        raise ConfigError(f"got fps={fps}; expected frames per second between 0 and 1000, e.g. 30.")


def require_encoder() -> Any:
    """Import and return the package with ffmpeg. Raise `ConfigError` if it is not installed."""
    return require("imageio_ffmpeg", "imageio-ffmpeg", "writing a video", "get_ffmpeg_exe")


def _checked(frames: Iterable[Array]) -> Iterator[Array]:
    """Yield the frames. Raise `ConfigError` if a frame is not an image, or differs in size from the first."""
    shape: tuple[int, ...] | None = None
    for number, frame in enumerate(frames):
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise ConfigError(
                f"frame {number} is {frame.dtype}{list(frame.shape)}; expected uint8 [height, width, 3]. Create "
                "the environment with render_mode='rgb_array'."
            )
        if shape is not None and frame.shape != shape:
            raise ConfigError(f"frame {number} is {list(frame.shape)}, but the first frame was {list(shape)}.")
        shape = frame.shape
        yield frame


def _command(ffmpeg: str, first: Array, fps: float, path: Path) -> list[str]:
    height, width, _ = first.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    # Every player supports yuv420p. It stores color at half the resolution, so sizes must be even.
    pixels = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]
    # At most two threads, because training needs the other cores.
    coding = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-threads", "2", "-movflags", "+faststart"]
    return [ffmpeg, "-nostdin", "-y", "-v", "error", *source, *pixels, *coding, f"file:{path}"]


@contextlib.contextmanager
def _running(command: list[str], timeout_s: float) -> Iterator[_Encoder]:
    """Context manager: run ffmpeg, and kill it at the end."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # a new session: Ctrl-C reaches only Python, which then kills ffmpeg
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            yield _Encoder(process, errors, timeout_s)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


class _Encoder:
    """Writes frames to ffmpeg, with a deadline for each."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], timeout_s: float) -> None:
        assert process.stdin is not None
        self._process, self._errors, self._timeout_s = process, errors, timeout_s
        self._pipe = process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._poll = select.poll()  # `select.select` refuses descriptors from 1024
        self._poll.register(self._pipe, select.POLLOUT)

    def write(self, frame: Array) -> None:
        left = np.ascontiguousarray(frame).data.cast("B")
        deadline = time.monotonic() + self._timeout_s
        while left:
            if not self._poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise self._failed(f"accepted no frames for {self._timeout_s:g} s")
            try:
                left = left[os.write(self._pipe, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                with contextlib.suppress(
                    subprocess.TimeoutExpired
                ):  # wait for the end, so that its error message is complete
                    self._process.wait(self._timeout_s)
                raise self._failed("ended early") from None

    def finish(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not finish within {self._timeout_s:g} s") from None
        if status:
            raise self._failed(f"ended with status {status}")

    def _failed(self, reason: str) -> RunError:
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").strip()
        return RunError(f"the video was not written: ffmpeg {reason}." + (f" Its output:\n{output}" if output else ""))
