"""Files that are whole or not there: written aside, fsynced, renamed, hashed. What fails half-way is removed."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ASIDE = re.compile(r"\..+\.\d+\.aside")


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(content: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def aside_of(path: Path) -> Path:
    """Where `path` is written before it is renamed; the process's own, so that no other writes there."""
    return path.with_name(f".{path.name}.{os.getpid()}.aside")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file atomically. Raises OSError, and then `path` is as it was, or replaced and not yet durable."""
    aside = aside_of(path)
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        fsync(aside)
        aside.replace(path)
    except BaseException:
        remove_aside(aside)
        raise
    fsync(path.parent)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Make a folder that appears with all its files or not at all; `fill` writes them into the folder it is given.

    Raises OSError; FileExistsError when `path` is there already: a published folder is never written again.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    aside = aside_of(path)
    remove_aside(aside)  # of an earlier try on a disk that let nothing be removed
    try:
        aside.mkdir(parents=True)
        fill(aside)
        for file in aside.rglob("*"):
            fsync(file)
        fsync(aside)
        aside.rename(path)
    except BaseException:
        remove_aside(aside)
        raise
    fsync(path.parent)


def remove_aside(path: Path) -> None:
    """Remove what a failed write left, as far as the disk lets it: the write's own error is the one to be told."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # a read-only disk


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder that nobody writes to now."""
    for path in folder.iterdir():
        if ASIDE.fullmatch(path.name):
            remove_aside(path)


def save_tensors(
    tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises OSError: the library's own error hides a full disk in its text."""
    from safetensors import SafetensorError  # here, so that launchers need not wait for torch
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, f"{os.strerror(code)} ({error})", str(path)) from error


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one line to a .jsonl file and flush it to the disk, or leave the file as it was. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        line = (json.dumps(row) + "\n").encode()
        try:
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, less a last one that a kill cut short. Raises ValueError for any other bad line."""
    if not path.exists():
        return []
    rows = []
    for i, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {i}: {error}") from error
        if not isinstance(rows[-1], dict):
            raise ValueError(f"{path}, line {i}: {line[:40]!r} is no object")
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a .jsonl file atomically. Raises OSError."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
