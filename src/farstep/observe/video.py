"""Frames to a video that browsers play: H.264 in an mp4, through the ffmpeg that imageio-ffmpeg brings."""

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
    """Write frames, uint8 [H, W, 3], as they come; the file appears when it is whole.

    `timeout_s` is for ffmpeg, each time it takes a frame and at the end; the frames may take as long as they need.
    """
    path = Path(path)
    if path.suffix != ".mp4":
        raise ConfigError(f"a video cannot be written to {path.name}; expected a name that ends in .mp4.")
    check_fps(fps)
    ffmpeg = require_encoder().get_ffmpeg_exe()
    arriving = _checked(frames)
    first = next(arriving, None)
    if first is None:
        raise ConfigError(f"there is no frame to make {path.name} of; expected at least one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, _running(_command(ffmpeg, first, fps, partial), timeout_s) as encoder:
        encoder.write(first)
        for frame in arriving:
            encoder.write(frame)
        encoder.finish()
    return path


def check_fps(fps: float) -> None:
    """Refuse what is no rate of frames."""
    if not 0 < fps < 1000:
        raise ConfigError(f"got fps={fps}; expected frames per second between 0 and 1000, e.g. 30.")


def require_encoder() -> Any:
    """The package that brings ffmpeg; if it is missing, an error that says how to install it."""
    return require("imageio_ffmpeg", "imageio-ffmpeg", "writing a video", "get_ffmpeg_exe")


def _checked(frames: Iterable[Array]) -> Iterator[Array]:
    """The frames, if each is a picture and all have the size of the first."""
    shape: tuple[int, ...] | None = None
    for number, frame in enumerate(frames):
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise ConfigError(
                f"frame {number} is {frame.dtype}{list(frame.shape)}; expected uint8 [height, width, 3], which "
                "environments made with render_mode='rgb_array' render."
            )
        if shape is not None and frame.shape != shape:
            raise ConfigError(f"frame {number} is {list(frame.shape)}, but the first one was {list(shape)}.")
        shape = frame.shape
        yield frame


def _command(ffmpeg: str, first: Array, fps: float, path: Path) -> list[str]:
    height, width, _ = first.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    # yuv420p, which every player knows, has half the resolution in colour: sizes must be even.
    picture = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]
    # At most two threads: the other cores are training.
    coding = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-threads", "2", "-movflags", "+faststart"]
    return [ffmpeg, "-nostdin", "-y", "-v", "error", *source, *picture, *coding, f"file:{path}"]


@contextlib.contextmanager
def _running(command: list[str], timeout_s: float) -> Iterator[_Encoder]:
    """An ffmpeg that is gone afterwards, whatever happened."""
    with tempfile.TemporaryFile() as said:  # a session of its own: Ctrl-C is for us, and we end it
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        try:
            yield _Encoder(process, said, timeout_s)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


class _Encoder:
    """The pipe to ffmpeg, with a deadline for what it does."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[bytes], timeout_s: float) -> None:
        assert process.stdin is not None
        self._process, self._said, self._timeout_s = process, said, timeout_s
        self._pipe = process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def write(self, frame: Array) -> None:
        left = np.ascontiguousarray(frame).data.cast("B")
        deadline = time.monotonic() + self._timeout_s
        while left:
            _, ready, _ = select.select([], [self._pipe], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise self._failed(f"took no more frames for {self._timeout_s:g} s")
            try:
                left = left[os.write(self._pipe, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its end; what it says comes with it
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

    def _failed(self, what: str) -> RunError:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return RunError(f"the video was not written: ffmpeg {what}." + (f" It said:\n{said}" if said else ""))
