"""A record of what the learner received, and training on it again without a sampler. No pickle, no torch.

    RUN/journal/settings.json                 settings and groups_per_step of the run; ds_config.json beside it
    RUN/journal/step_000012.safetensors       what arrived before step 13 was taken, in order: "0000/token_ids", … of each
                                              group as the wire had them (wire.pack_group), headers in the metadata
    RUN/journal/index.jsonl                   one line a file: name, bytes, sha256, group ids

A file is written before its step is taken. Dropping stale groups is a function of their order alone, so the same files give
the same steps. The first file after a resume is marked fresh: what waited in line before the crash came again.
"""

import collections
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from splitgrpo.admission import ServerPlan
from splitgrpo.arrivals import Dropped, GroupQueue, Trained
from splitgrpo.blob import read_arrays
from splitgrpo.config import JOURNAL, DataError, LearnerSettings, SettingsError
from splitgrpo.files import append_line, fsync, read_lines, sha256_file, write_json, write_lines
from splitgrpo.rollout import RolloutError
from splitgrpo.wire import Blob, GroupHeader, MessageError, build_group, seal

INDEX = "index.jsonl"


def file_name(step: int) -> str:
    """Of the groups that arrived before the step after `step` was taken."""
    return f"step_{step:06d}.safetensors"


class Journal:
    """Writes one file a step. A disk that is full ends it, said once: training is worth more than its record."""

    def __init__(
        self,
        run_dir: Path,
        settings: LearnerSettings,
        ds_config: dict[str, Any],
        groups_per_step: int,
        log: logging.Logger,
        resumed_at: int | None = None,
    ) -> None:
        """Write what a replay needs beside the groups, and go on with what is there. Raises OSError."""
        self.folder, self.log = run_dir / JOURNAL, log
        self.fresh = resumed_at is not None
        self.max_bytes = int(settings.journal_gb * 1e9)
        self.failed = self.rotated = False
        self._sizes: collections.deque[tuple[Path, int]] = collections.deque()
        self.folder.mkdir(exist_ok=True)
        model = Path(settings.model_path)
        recorded = dataclasses.asdict(settings) | {"groups_per_step": groups_per_step}
        recorded["model_path"] = str(model.absolute()) if model.is_dir() else settings.model_path
        write_json(self.folder / "settings.json", recorded)
        write_json(self.folder / "ds_config.json", ds_config)
        for line in read_lines(self.folder / INDEX):
            if (self.folder / line["file"]).exists():
                self._sizes.append((self.folder / line["file"], line["bytes"]))

    def write(self, step: int, arrivals: list[tuple[GroupHeader, Blob]]) -> None:
        """Write what arrived before the step after `step`, then remove the oldest files above the size."""
        if self.failed:
            return
        try:
            self._write(step, arrivals)
        except (OSError, SafetensorError) as error:  # its own errors hide those of the disk
            self.failed = True
            self.log.warning("the journal ends before step %d: %s", step + 1, error)

    def _write(self, step: int, arrivals: list[tuple[GroupHeader, Blob]]) -> None:
        tensors: dict[str, Any] = {}
        headers = []
        for i, (header, blob) in enumerate(arrivals):
            headers.append(msgspec.json.encode(header).decode())
            tensors |= {f"{i:04d}/{k}": v for k, v in read_arrays(blob).items()}
        path = self.folder / file_name(step)
        aside = path.with_name(f".{path.name}")
        metadata = {"headers": json.dumps(headers), "fresh": json.dumps(self.fresh)}
        safetensors.numpy.save_file(tensors, aside, metadata)
        fsync(aside)
        aside.replace(path)
        line: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path),
                "groups": [f"{h.sampler_id}:{h.seq}" for h, _ in arrivals]}  # fmt: skip
        append_line(self.folder / INDEX, line)
        self.fresh = False
        self._sizes.append((path, line["bytes"]))
        while sum(n for _, n in self._sizes) > self.max_bytes and len(self._sizes) > 1:
            self._sizes.popleft()[0].unlink()
            if not self.rotated:
                self.rotated = True
                self.log.warning(
                    "the journal is above --journal_gb: its first steps are removed, --replay needs them"
                )


def forget_after(run_dir: Path, step: int) -> None:
    """Remove what was recorded after a step that a learner goes back to. Raises OSError, ValueError."""
    folder, names = run_dir / JOURNAL, {file_name(i) for i in range(step)}
    if not folder.is_dir():
        return
    write_lines(folder / INDEX, [row for row in read_lines(folder / INDEX) if row["file"] in names])
    for path in folder.glob("step_*.safetensors"):
        if path.name not in names:
            path.unlink()


def read_index(folder: Path) -> dict[int, str]:
    """{step: sha256} of the files in a journal, from step 0 without a gap. Raises SettingsError."""
    try:
        digests = {row["file"]: row["sha256"] for row in read_lines(folder / INDEX)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"--replay: {folder / INDEX} cannot be read ({error})") from error
    found: dict[int, str] = {}
    while (name := file_name(len(found))) in digests and (folder / name).exists():
        found[len(found)] = digests[name]
    if not found:
        raise SettingsError(
            f"--replay: {folder} does not begin with {file_name(0)}: nothing was received, or its first steps were removed "
            "(a run with a larger --journal_gb keeps them)"
        )
    return found


def count_steps(run_dir: str, groups_per_step: int, wanted: int, log: logging.Logger) -> int:
    """Steps that a run's journal can be trained on for; says so where they are fewer than wanted.

    Raises SettingsError, also where a step now takes other groups.
    """
    folder = Path(run_dir) / JOURNAL
    recorded = json.loads((folder / "settings.json").read_text())["groups_per_step"]
    if recorded != groups_per_step:
        raise SettingsError(
            f"--replay {run_dir}: it was recorded with {recorded} groups a step, now a step takes {groups_per_step}: start "
            "as many ranks, with the same --group_size, or a --ds_config whose micro-batch and accumulation make up for it"
        )
    if (found := len(read_index(folder))) < wanted:
        log.warning("%s holds the first %d steps, not %d", folder, found, wanted)
    return found


def read_step(
    folder: Path, step: int, digest: str
) -> tuple[bool, list[tuple[GroupHeader, dict[str, Any]]]]:
    """Whether a file is fresh, and its groups as they were received.

    Raises DataError for a file that is not as it was written.
    """
    path = folder / file_name(step)
    try:
        if sha256_file(path) != digest:
            raise DataError(f"{path} is damaged: its sha256 is not the one in {INDEX}")
        with safe_open(path, "numpy") as file:
            headers = json.loads(file.metadata()["headers"])
            fresh = json.loads(file.metadata()["fresh"])
            arrays: list[dict[str, Any]] = [{} for _ in headers]
            for key in file.keys():  # noqa: SIM118 - a file handle, no dict
                number, _, name = key.partition("/")
                arrays[int(number)][name] = file.get_tensor(key)
        return bool(fresh), [
            (msgspec.json.decode(h, type=GroupHeader), a)
            for h, a in zip(headers, arrays, strict=True)
        ]
    except (OSError, SafetensorError, KeyError, ValueError, msgspec.ValidationError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read: {error}") from error


class Replay:
    """Hands out recorded groups as a GroupServer hands out received ones; there is nobody to talk to."""

    def __init__(self, run_dir: str, key: bytes, plan: ServerPlan, temperature: float) -> None:
        """Raises SettingsError for a journal that cannot be read."""
        self.folder, self.key, self.plan = Path(run_dir) / JOURNAL, key, plan
        self.temperature = temperature
        self.invalid: collections.Counter[str] = collections.Counter()
        self.lost = 0
        self._index = read_index(self.folder)
        self._queue = GroupQueue({})
        for step in range(plan.start_version):  # what waits in line when the step after it is taken
            self.take(plan.groups_per_step, step, 0.0)
            self._queue.take_fates()

    @property
    def dropped(self) -> collections.Counter[str]:
        """Groups that were not trained, by reason."""
        return self._queue.dropped

    def take(self, num_groups: int, version: int, timeout_s: float) -> list[Trained]:
        """The groups of the next step, by the same rule as GroupServer.take. Raises DataError."""
        fresh, groups = read_step(self.folder, version, self._index[version])
        if fresh:
            dropped, self._queue = self._queue.dropped, GroupQueue(self._queue.cursor)
            self._queue.dropped.update(dropped)
        for header, arrays in groups:
            try:
                group = build_group(header, arrays)
                self.plan.check_group(group)
            except (MessageError, RolloutError) as error:
                raise DataError(
                    f"group {header.sampler_id}:{header.seq} of {self.folder}: {error}"
                ) from error
            if group.temperature != self.temperature:
                raise DataError(
                    f"recorded at temperature {group.temperature}, now --temperature {self.temperature}: give the same"
                )
            self._queue.put(group, seal(self.key, header, safetensors.numpy.save(arrays)))
        self._queue.expire(version - self.plan.max_staleness)
        taken = self._queue.take(num_groups)
        if taken is None:
            raise DataError(
                f"{self.folder} does not hold the {num_groups} groups of step {version + 1}: it was recorded with another "
                "--max_staleness"
            )
        return taken

    def take_fates(self) -> list[Dropped]:
        """What was dropped since the last call."""
        return self._queue.take_fates()

    def cursor(self) -> dict[int, int]:
        """{sampler: sequence number of its first group without a fate}."""
        return dict(self._queue.cursor)

    def commit(self, cursor: dict[int, int]) -> None:
        """Nobody to tell."""

    def finish(self) -> None:
        """Nothing waits that was not recorded for later steps."""

    def take_arrivals(self) -> list[tuple[GroupHeader, Blob]]:
        """Nothing arrives."""
        return []

    def expect(self, version: int, adapter_digest: str) -> None:
        """Nobody sends."""

    def set_version(self, version: int, adapter_digest: str) -> None:
        """Nobody to tell."""

    def bump(self) -> None:
        """Nobody watches."""

    def idle_s(self) -> float:
        """Never idle."""
        return 0.0

    def describe(self) -> str:
        """For a log line while waiting, which never comes."""
        return f"replaying {self.folder}"

    def close(self, *, finished: bool, reason: str) -> None:
        """Nothing to free."""
