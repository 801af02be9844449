"""Publishing by rename: whole or nothing, and nobody's folder is lost."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from packer.errors import TargetBusyError, TargetExistsError, TargetWriteError
from packer.publish import published_directory

MARKER = "plan.json"


def publish(target: Path, text: str, *, overwrite: bool = False) -> None:
    with published_directory(target, marker=MARKER, overwrite=overwrite) as partial:
        (partial / MARKER).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_directory_appears_whole_and_alone(tmp_path: Path) -> None:
    with published_directory(tmp_path / "out", marker=MARKER) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "sub" / "file").read_text() == "x"
    assert names(tmp_path) == ["out"]


def test_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), published_directory(tmp_path / "out", marker=MARKER) as partial:
        (partial / "file").write_text("x")
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    publish(tmp_path / "out", "old")
    with pytest.raises(TargetExistsError, match="--overwrite"):
        publish(tmp_path / "out", "new")
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_overwrite_replaces_only_directories_of_the_same_kind(tmp_path: Path) -> None:
    publish(tmp_path / "out", "old")
    publish(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / MARKER).read_text() == "new"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(TargetExistsError, match=r"plan\.json"):
        publish(tmp_path / "home", "new", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(TargetExistsError, match="not a directory of ours"):
        publish(tmp_path / "link", "new", overwrite=True)
    assert names(tmp_path) == ["home", "link", "out"]


def test_failed_overwrite_keeps_the_old_directory(tmp_path: Path) -> None:
    publish(tmp_path / "out", "old")
    with (
        pytest.raises(ZeroDivisionError),
        published_directory(tmp_path / "out", marker=MARKER, overwrite=True),
    ):
        raise ZeroDivisionError
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_second_writer_is_told(tmp_path: Path) -> None:
    with published_directory(tmp_path / "out", marker=MARKER) as partial:
        (partial / MARKER).write_text("first")
        with pytest.raises(TargetBusyError, match="another process"):
            publish(tmp_path / "out", "second")
    assert (tmp_path / "out" / MARKER).read_text() == "first"


def die_while_writing(target: Path, keep_partial: bool) -> None:
    with published_directory(target, marker=MARKER, keep_partial=keep_partial) as partial:
        (partial / "half").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("keep_partial", [False, True])
def test_killed_run_publishes_nothing_and_the_next_succeeds(tmp_path: Path, keep_partial: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=die_while_writing, args=(tmp_path / "out", keep_partial)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with published_directory(tmp_path / "out", marker=MARKER, keep_partial=keep_partial) as partial:
        assert (partial / "half").exists() is keep_partial
    assert names(tmp_path) == ["out"]


def test_replacement_killed_between_its_renames_is_undone(tmp_path: Path) -> None:
    publish(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    with pytest.raises(TargetExistsError):
        publish(tmp_path / "out", "new")
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_full_disk_names_the_target(tmp_path: Path) -> None:
    with (
        pytest.raises(TargetWriteError, match=r"out: No space left on device; nothing was published"),
        published_directory(tmp_path / "out", marker=MARKER),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_a_place_that_takes_no_files_is_one_error() -> None:
    with pytest.raises(TargetWriteError, match="cannot write /proc/out"):
        publish(Path("/proc/out"), "text")
    with pytest.raises(TargetWriteError, match="cannot write /proc/no/such/out"):
        publish(Path("/proc/no/such/out"), "text")


def test_errors_name_the_target_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(Path("out"), "text")
    with pytest.raises(TargetExistsError, match=r"^out exists already"):
        publish(Path("out"), "text")
