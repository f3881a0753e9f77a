"""Following a run's pointer from one adapter to the next: what is newer, what is refused, how often that is said.

What is newer is told by (lineage, version) alone, never by a clock or a file's times.
"""

import logging
import time
from pathlib import Path

from splitgrpo.adapters import Adapter, read_adapter
from splitgrpo.pointer import POINTER, AdapterError, Pointer, read_pointer

READ_TRIES = 10  # each in vain because the pointer moved meanwhile
SAY_EVERY_S = 10.0


def is_newer(pointer: Pointer, held: Pointer) -> bool:
    """True for a later version of the same run, False for the one held; a lineage begins anew after a crash.

    Raises AdapterError for another run's, and for one that is older.
    """
    if pointer.run_id != held.run_id:
        raise AdapterError(
            f"{POINTER} is of run {pointer.run_id}, this sampler works for run {held.run_id}: another learner has taken the "
            "folder over; start the sampler again"
        )
    found, have = (pointer.lineage, pointer.version), (held.lineage, held.version)
    if found < have:
        raise AdapterError(
            f"{POINTER} went back from {held.folder} to {pointer.folder}, which is older: is an earlier learner of this "
            "run still alive, or was the file restored?"
        )
    return found > have


def read_newest(run_dir: Path, held: Adapter | None = None) -> Adapter | None:
    """What latest.json names, read and checked; None where nothing is published, or nothing newer than `held`.

    Files may be removed between reading the pointer and reading them; then the pointer has moved, and is followed.
    Raises AdapterError for one that is damaged, of another base or run than `held`, or older.
    """
    pointer = read_pointer(run_dir)
    if pointer is None and held is not None:
        raise AdapterError(f"{run_dir / POINTER} is gone: was the run folder removed?")
    for _ in range(READ_TRIES):
        if pointer is None or (held is not None and not is_newer(pointer, held.pointer)):
            return None
        try:
            adapter = read_adapter(run_dir, pointer)
            if held is not None:
                check_same_base(adapter, held)
            return adapter
        except AdapterError:
            before, pointer = pointer, read_pointer(run_dir)
            if pointer == before:
                raise
    raise AdapterError(
        f"{run_dir / POINTER} moved {READ_TRIES} times while it was followed: --keep_adapters is too small"
    )


def check_same_base(adapter: Adapter, held: Adapter) -> None:
    """Refuse an adapter of another base than that of `held`, which fits the model. Raises AdapterError."""
    for name in ("base_digest", "base_dtype"):
        new, old = getattr(adapter.manifest, name), getattr(held.manifest, name)
        if new != old:
            raise AdapterError(
                f"adapter {adapter.pointer.folder}: {name} is {new[:12]}, the base model in use has {old[:12]}: it was made "
                f"for another base model ({adapter.manifest.base_model})"
            )


class Failures:
    """Counts failed reloads in a row; says the first, each new reason, and the same one at intervals."""

    def __init__(self, limit: int, log: logging.Logger) -> None:
        self.limit, self.log, self.num = limit, log, 0
        self._reason, self._said = "", 0.0

    def count(self, error: AdapterError) -> int:
        """Note one more; returns how many there are in a row."""
        self.num += 1
        now, reason = time.monotonic(), str(error)
        if reason != self._reason or now - self._said >= SAY_EVERY_S:
            self._reason, self._said = reason, now
            self.log.warning(
                "adapter not loaded (%d of at most %d): %s", self.num, self.limit, reason
            )
        return self.num

    def clear(self, folder: str) -> None:
        """Note that the newest adapter, `folder`, is loaded."""
        if self.num:
            self.log.info("adapter %s is in use after %d failed reloads", folder, self.num)
        self.num, self._reason = 0, ""
