"""Videos: the file has the rendered frames, and a failure leaves no file."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from farstep.errors import ConfigError, RunError
from farstep.observe.video import write_video

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def moving_square(count: int, height: int, width: int) -> Iterator[np.ndarray]:
    for number in range(count):
        frame = np.full((height, width, 3), (20, 40, 60), np.uint8)
        frame[8:24, 4 + number : 20 + number] = (250, 200, 0)
        yield frame


def read_video(path: Path) -> tuple[dict, list[np.ndarray]]:
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return about, [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


@pytest.mark.parametrize(("height", "width", "padded"), [(48, 64, (64, 48)), (33, 47, (48, 34))], ids=["even", "odd"])
def test_a_video_shows_the_frames(height: int, width: int, padded: tuple[int, int], tmp_path: Path) -> None:
    path = write_video(tmp_path / "new" / "a b%d.mp4", moving_square(12, height, width), fps=25)
    about, frames = read_video(path)
    assert about["codec"] == "h264" and about["fps"] == 25 and about["size"] == padded and len(frames) == 12
    assert "yuv420p" in about["pix_fmt"]
    for frame, meant in zip(frames, moving_square(12, height, width), strict=True):
        assert np.abs(frame[:height, :width].astype(float) - meant).mean() < 6
    assert [entry.name for entry in path.parent.iterdir()] == ["a b%d.mp4"]


def test_views_with_gaps_are_frames_too(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", (frame[::-1, ::2] for frame in moving_square(3, 32, 64)))
    assert read_video(tmp_path / "a.mp4")[0]["size"] == (32, 32)


def test_video_is_written_through_a_descriptor_above_1023(tmp_path: Path, descriptors_above_1023: None) -> None:
    write_video(tmp_path / "a.mp4", moving_square(3, 32, 32))
    assert len(read_video(tmp_path / "a.mp4")[1]) == 3


class RenderFailed(Exception):
    pass


def test_failed_video_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")

    def frames() -> Iterator[np.ndarray]:
        yield from moving_square(5, 32, 32)
        raise RenderFailed

    with pytest.raises(RenderFailed):
        write_video(path, frames())
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "no frame"),
        ([np.zeros((8, 8, 3))], r"frame 0 is float64\[8, 8, 3\]; expected uint8 \[height, width, 3\]"),
        ([np.zeros((8, 8), np.uint8)], "frame 0"),
        ([np.zeros((8, 8, 4), np.uint8)], "frame 0"),
        ([np.zeros((0, 8, 3), np.uint8)], "frame 0"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], r"frame 1 is \[8, 9, 3\], but the first"),
        ([None], "frame 0 is object"),
    ],
)
def test_invalid_frames_are_named(frames: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_video(tmp_path / "a.mp4", frames)
    assert not list(tmp_path.iterdir())


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.mp4"):
        write_video(tmp_path / "a.gif", moving_square(1, 32, 32))
    for fps in (0, -1, float("nan"), 1e6):
        with pytest.raises(ConfigError, match="fps"):
            write_video(tmp_path / "a.mp4", moving_square(1, 32, 32), fps=fps)


def use_ffmpeg(folder: Path, script: str, monkeypatch) -> None:
    stand_in = folder / "ffmpeg"
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(stand_in))


def test_error_quotes_ffmpeg(tmp_path: Path, monkeypatch) -> None:
    use_ffmpeg(tmp_path, "echo no luck >&2; exit 3", monkeypatch)
    with pytest.raises(RunError, match=r"the video was not written: ffmpeg ended early\. Its output:\nno luck"):
        write_video(tmp_path / "a.mp4", moving_square(200, 64, 64))
    use_ffmpeg(tmp_path, "cat >/dev/null; echo no luck >&2; exit 3", monkeypatch)
    with pytest.raises(RunError, match=r"ffmpeg ended with status 3\. Its output:\nno luck"):
        write_video(tmp_path / "a.mp4", moving_square(5, 64, 64))


def test_an_ffmpeg_that_hangs_is_ended(tmp_path: Path, monkeypatch) -> None:
    use_ffmpeg(tmp_path, "exec sleep 600", monkeypatch)
    with pytest.raises(RunError, match=r"accepted no frames for 0\.2 s"):
        write_video(tmp_path / "a.mp4", moving_square(50, 64, 64), timeout_s=0.2)
    with pytest.raises(RunError, match=r"did not finish within 0\.2 s"):
        write_video(tmp_path / "a.mp4", moving_square(1, 32, 32), timeout_s=0.2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ffmpeg"]


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    def frames() -> Iterator[np.ndarray]:
        yield from moving_square(5, 32, 32)
        os.kill(os.getpid(), 2)
        yield from moving_square(5, 32, 32)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "a.mp4", frames())
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match="pip install imageio-ffmpeg"):
        write_video(tmp_path / "a.mp4", moving_square(1, 32, 32))
