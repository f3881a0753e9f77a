"""latest.json, which says what a run has published: its form, how it is read and what may be wrong with it.

Imports no torch, so that those who only look (launcher, run folder) need not wait for it.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

POINTER = "latest.json"
FOLDER = re.compile(r"v(\d{6,})\.L(\d+)")


class AdapterError(RuntimeError):
    """A published adapter that is damaged, incomplete or made for another base; the text says what and where."""


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What latest.json holds. `sha256` is the digest of the adapter's weights; `done` is True when the run is complete."""

    version: int
    lineage: int
    folder: str
    sha256: str
    run_id: str
    done: bool


def order(name: str) -> tuple[int, int]:
    """(lineage, version) of a folder name; later is greater."""
    match = FOLDER.fullmatch(name)
    assert match is not None, name
    return int(match[2]), int(match[1])


def read_struct(path: Path, kind: type[Any]) -> Any:
    """Decode a small JSON file into a typed struct. Raises AdapterError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise AdapterError(f"cannot read {path}: {error}") from error


def read_pointer(run_dir: Path) -> Pointer | None:
    """The pointer of a run folder, or None where nothing is published yet. Raises AdapterError when it is damaged."""
    path = run_dir / POINTER
    if not path.exists():
        return None
    pointer: Pointer = read_struct(path, Pointer)
    if not FOLDER.fullmatch(pointer.folder):
        raise AdapterError(
            f"{path} names the folder {pointer.folder!r}, which is no adapter's name"
        )
    return pointer


def last_pointer(run_dir: Path) -> Pointer | None:
    """The pointer of a run folder where one can be read, for those who need no more than to look."""
    try:
        return read_pointer(run_dir)
    except AdapterError:
        return None
