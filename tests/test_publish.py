"""Publishing by rename: whole or nothing, and nobody's folder is lost."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from packer.errors import TargetBusyError, TargetExistsError, TargetWriteError
from packer.publish import check_target, published_directory

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


class TestCheckBeforeTheWork:
    """What would be refused at the end is refused before the beginning, and the check leaves nothing."""

    def test_a_free_place_is_accepted(self, tmp_path: Path) -> None:
        check_target(tmp_path / "out", marker=MARKER)
        check_target(tmp_path / "not" / "yet" / "out", marker=MARKER)
        assert names(tmp_path) == []

    def test_existing_targets(self, tmp_path: Path) -> None:
        publish(tmp_path / "out", "old")
        with pytest.raises(TargetExistsError, match="add --overwrite"):
            check_target(tmp_path / "out", marker=MARKER)
        check_target(tmp_path / "out", marker=MARKER, overwrite=True)
        with pytest.raises(TargetExistsError, match=r"holds no manifest\.json"):
            check_target(tmp_path / "out", marker="manifest.json", overwrite=True)
        assert names(tmp_path) == ["out"]

    def test_a_file_in_the_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("afile").write_text("x")
        for target in (Path("afile/out"), Path("afile/not/yet/out")):
            for refuse in (lambda target: check_target(target, marker=MARKER), lambda t: publish(t, "text")):
                with pytest.raises(TargetWriteError, match="afile is a file, not a folder") as refusal:
                    refuse(target)
                assert str(refusal.value).startswith(f"cannot write {target}: afile is a file")
                assert "make room" not in str(refusal.value)

    def test_places_that_take_no_files(self) -> None:
        for target in (Path("/proc/out"), Path("/proc/no/such/out")):
            with pytest.raises(TargetWriteError, match=f"cannot write {target}: ") as refusal:
                check_target(target, marker=MARKER)
            assert str(refusal.value).endswith("choose another --out")
            assert "make room" not in str(refusal.value)

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(TargetWriteError, match="choose a shorter --out"):
            check_target(tmp_path / ("x" * 250), marker=MARKER)

    @pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
    def test_a_folder_without_permission(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir(mode=0o500)
        with pytest.raises(TargetWriteError, match=r"Permission denied; .*choose another --out"):
            check_target(tmp_path / "mine" / "out", marker=MARKER)

    def test_a_target_that_is_being_written(self, tmp_path: Path) -> None:
        with published_directory(tmp_path / "out", marker=MARKER) as partial:
            (partial / MARKER).write_text("first")
            with pytest.raises(TargetBusyError, match="another process"):
                check_target(tmp_path / "out", marker=MARKER)
        (tmp_path / ".other.lock").write_text("")  # a killed run left it
        check_target(tmp_path / "other", marker=MARKER)
