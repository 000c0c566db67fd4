"""File operations of a run: folders are swapped in atomically, disk errors are explained with advice, and what a file
system does not know (network and shared folders, FUSE, Windows) is done without, and said once in a run (LOST)."""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
CARD = "README.md"
LISTED = 8  # folders in a message
ABSENT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.ENOTTY, errno.EPERM}
OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
LOST = {  # what a file system may not know, and what is lost by it
    "flushing a folder": "the files written last may be missing after a power cut",
    "flushing a file": "the files written last may be damaged after a power cut",
    "locks": "a second process in this folder is noticed only by the process that .owner.json names",
    "its free space": "a full disk is noticed only when it refuses a write",
    "renaming over a file": "a process that dies just then may leave no file",
}
SAID: set[str] = set()  # those of LOST that this run has said
ADVICE = {
    errno.EDQUOT: "your quota on this disk is used up: make room",
    errno.EROFS: "the disk is read-only now (a disk that fails turns so by itself; `dmesg` says why): mend it, or "
                 "choose another output_dir",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change the permissions, or choose another output_dir"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTEMPTY), "a folder is where the run writes a file: move it away"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file is where the run needs a folder: move it away"),
    errno.EFBIG: "no file may become that large here (`ulimit -f`): raise the limit, or choose another output_dir",
    errno.EIO: "the disk fails (`dmesg` says why): choose an output_dir on another one",
}


def existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def beside(path: Path) -> str:
    """Return which folders lie where this path would be, in words."""
    here = path.parent
    if not here.is_dir():
        return f"there is no folder {here}"
    held = sorted(each.name for each in here.iterdir() if each.is_dir() and not each.name.startswith("."))[:LISTED]
    return f"{'this folder' if str(here) == '.' else here} has {', '.join(held) or 'no folders'}"


def folder_fault(folder: Path, option: str = "output_dir") -> tuple[str, str] | None:
    """Return (fault, advice) if a folder cannot be written to, else None. `option` is the setting that names it."""
    place = existing(folder)
    if not place.is_dir():
        return f"{option} is {str(folder)!r}, and {place} is a file", f"choose another {option}"
    if not os.access(place, os.W_OK | os.X_OK):
        return (f"{option} is {str(folder)!r}, and {place} cannot be written to",
                f"choose another {option}, or change the folder's permissions")
    return None


def check_folder(folder: Path, option: str) -> None:
    """Raise OSError if the folder given by `option` cannot be written to."""
    if fault := folder_fault(folder, option):
        raise OSError("; ".join(fault))


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of a path, which need not exist yet; None if unknown."""
    why: object = "it says 0 bytes in all"
    try:
        usage = shutil.disk_usage(existing(path))
        if usage != (0, 0, 0):
            return usage.free
    except OSError as error:
        why = error.strerror
    say_lost("its free space", path, why)
    return None


def say_lost(what: str, path: Path, why: object) -> None:
    """Log what is lost where a file system lacks `what`, once in a run."""
    if what not in SAID:
        SAID.add(what)
        logger.warning("the file system of %s does not know %s (%s), so %s", path, what, why, LOST[what])


@contextmanager
def explained(path: Path, kind: type[Exception] = OSError, option: str = "folder") -> Iterator[None]:
    """Turn an error of the disk in the block, which writes `path`, into one of type `kind` that names the file, the
    cause and the fix. `option` is the setting that names the path. Errors without an errno stay as they are."""
    free = free_bytes(path)
    try:
        yield
    except Exception as error:
        if number_of(error) is None or isinstance(error, ConnectionError | TimeoutError):
            raise
        raise kind(refused(path, error, 0, free).replace("output_dir", option)) from error


def number_of(error: Exception) -> int | None:
    """Return the errno of an error or of its cause; None without one. An error of safetensors has it in its text."""
    match = re.search(r"os error (\d+)", str(error))
    if number := getattr(error, "errno", None) or (int(match[1]) if match else None):
        return int(number)
    return number_of(error.__cause__) if isinstance(error.__cause__, OSError) else None


def refused(path: Path, error: Exception, needed: int, free: int | None) -> str:
    """Return the message for a disk that refused `needed` bytes at `path`; `free` bytes were free before."""
    number = number_of(error)
    words = str(error) if number is None else os.strerror(number)
    file = os.fsdecode(getattr(error, "filename", None) or path)
    place = "" if number in OF_WRITING or Path(file) == path else f" ({file})"  # a copy names its source for its target
    return f"{path} was not written: {words}{place}; {advice(number, needed, free)}"


def advice(number: int | None, needed: int, free: int | None) -> str:
    """Return advice for an errno. ENOSPC with enough free bytes means a quota, or no free inodes."""
    if number != errno.ENOSPC:
        return ADVICE.get(number or 0, "mend that, or choose another output_dir")
    if not needed:
        return f"make room{'' if free is None else f' ({free:,} bytes were free before)'}, or choose another output_dir"
    if free is None or free < needed:
        return f"it needs about {needed:,} bytes{'' if free is None else f' and {free:,} were free'}: make room"
    return (f"it needs about {needed:,} bytes, and {free:,} were free before. So either something else filled the disk "
            "at the same time, or a quota or the number of files (`df -i`) is at its limit: make room there")


def swap_in(temp: Path, folder: Path) -> None:
    """Rename `temp` to `folder`. An existing folder is moved aside first, and moved back on failure."""
    aside = aside_of(folder)
    remove(aside)
    if folder.exists():
        move(folder, aside)
    try:
        move(temp, folder)
        flush(folder.parent)
    except BaseException:
        if not temp.exists():
            move(folder, temp)
        if aside.exists():
            move(aside, folder)
        raise


def move(source: Path, target: Path) -> None:
    """Rename a folder, or a file, over an existing one too."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in ABSENT | {errno.EEXIST}:
            raise
        if target.is_file():
            say_lost("renaming over a file", target, error.strerror)
            remove(target)
        os.rename(source, target)


def aside_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old-{os.getpid()}")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_new(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text to a new file, in place of what has its name: a link there may lead anywhere, and goes."""
    remove(path)
    with path.open("x", encoding="utf-8", errors=errors) as file:
        file.write(text)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: to a temporary file, fsynced and then renamed. After an error the file is as before."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write_new(aside, text)
        flush(aside)
        move(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def removed_after(temp: Path) -> Iterator[None]:
    """Remove `temp` before the block (an earlier process may have left it) and after it, also on errors."""
    remove(temp)
    try:
        yield
    finally:
        remove(temp)


def flush(path: Path) -> None:
    """Fsync a file, or a folder's directory entries."""
    what, is_folder = ("flushing a folder", True) if path.is_dir() else ("flushing a file", False)
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows flushes only what may be written
    except PermissionError as error:
        if not is_folder:
            raise
        return say_lost(what, path, error.strerror)  # Windows opens no folders
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        say_lost(what, path, error.strerror)
    finally:
        os.close(descriptor)


def lock(file: int, path: Path) -> bool:
    """Lock an open file until it is closed. BlockingIOError if another process holds the lock; return False on a file
    system without locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no flock")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in ABSENT | {errno.ENOLCK}:
            raise
        say_lost("locks", path.parent, error.strerror)
        return False
    return True


def lock_file(path: Path) -> int:
    """Open and lock the file, and return its descriptor. BlockingIOError if another process holds the lock, OSError on
    a file system without locks."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if lock(file, path):
            return file
    except BlockingIOError:
        os.close(file)
        raise
    os.close(file)
    raise OSError(f"{path.parent} is on a file system without locks, by which a server knows what runs: give --folder "
                  "one on a local disk")


# Cards


def write_card(folder: Path, text: str) -> None:
    """Write README.md, with a hash of its text below, unless the folder has one of another hand: then log a warning."""
    path = folder / CARD
    folder.mkdir(parents=True, exist_ok=True)
    if has_own_card(folder):
        write_whole(path, f"{text}\n<!-- lowmem-grpo {digest(text)} -->\n")
    else:
        logger.warning("%s was written or changed by somebody and stays; delete it to have a new one", path)


def has_own_card(folder: Path) -> bool:
    """Return whether a folder has no README.md, or one that `write_card` wrote and nobody changed."""
    if not (folder / CARD).exists():
        return True
    text, _, mark = (folder / CARD).read_text("utf-8", "replace").rpartition("\n<!-- lowmem-grpo ")
    return mark == f"{digest(text)} -->\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
