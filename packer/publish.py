"""Publishing by rename: a reader sees a whole directory under its final name, or nothing.

A run writes into ``.NAME.partial`` beside the target, under a lock; files and folders are flushed to disk
before one rename gives the directory its name. A killed run leaves only the partial folder behind, which
the next run continues or sweeps away.
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packer.errors import TargetBusyError, TargetExistsError, TargetWriteError
from packer.wording import TOO_MANY_FILES


@contextmanager
def published_directory(
    target: str | os.PathLike[str], *, marker: str, overwrite: bool = False, keep_partial: bool = False
) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when the block ends without an error.

    Args:
        target: the final name of the directory.
        marker: a file that every directory of this kind holds. With ``overwrite`` only a directory that has
            it is replaced, so that a mistyped path costs nobody a folder.
        overwrite: replace an existing ``target``.
        keep_partial: leave what was written in place after an error or a kill, and start from it the next
            time; otherwise every run starts from an empty folder.

    Raises:
        TargetExistsError: ``target`` exists and may not be replaced.
        TargetBusyError: another process is writing the same target.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    shown = os.fspath(target)
    target = _absolute(target)
    _refuse_existing(target, shown, marker, overwrite)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(target, shown, error) from error
    try:
        with exclusive_lock(target):
            _restore_replaced(target)
            # The run that held the lock may have published it.
            _refuse_existing(target, shown, marker, overwrite)
            if not keep_partial and partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(exist_ok=True)
            try:
                yield partial
                _flush_tree(partial)
                _move_into_place(partial, target)
            except BaseException:
                if not keep_partial:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        if isinstance(error, TargetExistsError | TargetBusyError | TargetWriteError):
            raise
        beside = str(target.with_name(f".{target.name}."))  # the lock, the partial folder, the replaced one
        if error.errno in _UNWRITABLE or str(error.filename).startswith(beside):
            raise _unwritable(target, shown, error) from error
        raise


def check_target(target: str | os.PathLike[str], *, marker: str, overwrite: bool = False) -> None:
    """Refuse a target that ``published_directory`` would refuse: a moment here saves the work before it.

    A folder is made and removed again in the nearest folder above the target that exists: permissions alone
    do not tell whether a place takes files.

    Raises:
        TargetExistsError: ``target`` exists and may not be replaced.
        TargetBusyError: another process is writing the same target.
        TargetWriteError: no permission, a read-only place, or a file in the way.
    """
    _file_locks()
    shown = os.fspath(target)
    target = _absolute(target)
    _refuse_existing(target, shown, marker, overwrite)
    above = _nearest(target.parent)
    trial = above / f".{target.name}.trial"
    try:
        trial.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process tries the same place
            trial.rmdir()
        is_busy = _is_locked(target)
    except OSError as error:
        raise _unwritable(target, shown, error) from error
    if is_busy:
        raise _busy(target)


def _absolute(target: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(target))  # not resolve(): a link as target is refused, not followed


def _unwritable(target: Path, shown: str, error: OSError) -> TargetWriteError:
    above = _nearest(target.parent)
    place = above if os.path.isabs(shown) else os.path.relpath(above)
    reason, cure = error.strerror, "choose another --out"
    if error.errno == errno.ENAMETOOLONG:
        cure = "choose a shorter --out"
    elif error.errno in (errno.EDQUOT, errno.ENOSPC):
        cure = "make room or choose another --out"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        return TargetWriteError(f"cannot write {shown}: nothing was published, {TOO_MANY_FILES}")
    elif not above.is_dir():
        reason = f"{place} is a file, not a folder"
    elif error.errno == errno.ENOENT:
        reason = f"{place} takes no new files"
    return TargetWriteError(f"cannot write {shown}: {reason}; nothing was published, {cure}")


def _nearest(folder: Path) -> Path:
    """Return the nearest path at or above ``folder`` that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


_UNWRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENAMETOOLONG,
    errno.ENFILE,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def _refuse_existing(target: Path, shown: str, marker: str, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise TargetExistsError(f"{shown} exists already; choose another --out or add --overwrite")
    if target.is_symlink() or not target.is_dir():
        raise TargetExistsError(f"{shown} is not a directory of ours, so --overwrite leaves it alone")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise TargetExistsError(
            f"{shown} holds no {marker}, so it is not what --overwrite may replace; choose another --out"
        )


def _is_locked(target: Path) -> bool:
    """Return whether another process holds the lock of a target; a lock file alone says nothing."""
    try:
        descriptor = os.open(_lock_file(target), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, exclusively=False)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, *, exclusively: bool) -> bool:
    """Take a lock that the kernel drops with the process, however it ends; return whether it was free."""
    locks = _file_locks()
    try:
        locks.flock(descriptor, (locks.LOCK_EX if exclusively else locks.LOCK_SH) | locks.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_locks() -> Any:
    """Return the module of POSIX locks, imported here since reading needs none.

    Raises:
        TargetWriteError: the system has none.
    """
    try:
        import fcntl
    except ImportError:
        raise TargetWriteError(
            f"{sys.platform} has no locks that would keep two writers apart, so nothing is written; write on "
            "Linux, macOS or in WSL, and read the result anywhere"
        ) from None
    return fcntl


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _busy(target: Path) -> TargetBusyError:
    return TargetBusyError(f"another process is writing {target}; wait for it or choose another --out")


@contextmanager
def exclusive_lock(target: Path) -> Iterator[None]:
    """Hold ``.NAME.lock`` beside the target; the kernel drops the lock with the process, however it ends.

    Raises:
        TargetBusyError: another process holds it.
        TargetWriteError: the system has no such locks.
    """
    _file_locks()
    path = _lock_file(target)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(descriptor, exclusively=True):
            os.close(descriptor)
            raise _busy(target)
        try:
            current = os.stat(path).st_ino
        except FileNotFoundError:
            current = -1
        if current == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)  # its owner removed the file between our open and our lock
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in [*names, "."]:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _restore_replaced(target: Path) -> None:
    """Undo the first half of a replacement that was killed between its two renames."""
    aside = target.with_name(f".{target.name}.replaced")
    if aside.exists() and not os.path.lexists(target):
        aside.rename(target)


def _move_into_place(partial: Path, target: Path) -> None:
    """Give the finished folder its name; an old one steps aside first and is removed last."""
    aside = target.with_name(f".{target.name}.replaced")
    if aside.exists():
        shutil.rmtree(aside)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if aside.exists():
        shutil.rmtree(aside)
