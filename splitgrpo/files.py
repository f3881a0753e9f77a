"""Files that are whole or not there: written aside, fsynced, renamed, hashed."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    fsync(aside)
    aside.replace(path)
    fsync(path.parent)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that appears with all its files or not at all; `fill` writes them into the folder it is given.

    Raises FileExistsError when `path` is there already: a published folder is never written again.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    fill(aside)
    for file in aside.rglob("*"):
        fsync(file)
    fsync(aside)
    aside.rename(path)
    fsync(path.parent)
