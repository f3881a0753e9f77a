"""What rank 0 of the learner opens before anything slow happens: run folder, checkpoint, books, port."""

import logging
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from splitgrpo import checkpoints, models
from splitgrpo.adapters import Adapter, read_version
from splitgrpo.admission import ServerPlan
from splitgrpo.cli import warn_of
from splitgrpo.config import (
    DataError,
    DiskTrouble,
    LearnerSettings,
    SettingsError,
    agreed_settings,
    effective_kl_coef,
)
from splitgrpo.files import read_lines
from splitgrpo.journal import Journal, Replay, forget_after
from splitgrpo.keys import read_curve
from splitgrpo.ledger import LEDGER, METRICS, Ledger, lineages
from splitgrpo.monitor import MetricsWriter
from splitgrpo.process import check_port
from splitgrpo.rollout import Group, check_group
from splitgrpo.runfolder import claim_run_folder, next_lineage, rewind
from splitgrpo.server import GroupServer
from splitgrpo.zero import Ranks


@dataclass(frozen=True)
class Start:
    """Where a learner begins: at step 0, or from a checkpoint."""

    run_id: str
    lineage: int = 1
    path: Path | None = None
    index: checkpoints.Index | None = None

    @property
    def step(self) -> int:
        """Optimizer steps that its weights have behind them."""
        return self.index.step if self.index else 0


@dataclass
class Opened:
    """What only rank 0 has."""

    server: GroupServer | Replay
    ledger: Ledger
    metrics: MetricsWriter
    journal: Journal | None


def begin(settings: LearnerSettings, log: logging.Logger) -> tuple[bytes, Start]:
    """Claim the run folder and find where to begin; returns the run's key as well. Raises SettingsError, OSError."""
    s = settings
    for warning in warn_of(s):
        log.warning("%s", warning)
    if not s.replay:
        check_port(s.host, s.port)  # before a run is removed
    run_dir, key = claim_run_folder(s.save_path, resume=s.resume, overwrite=s.overwrite)
    if not s.resume:
        return key, Start(secrets.token_hex(8))
    path, index = checkpoints.find_checkpoint(run_dir, log)
    checkpoints.check_same_run(index, s, log)
    rewind(run_dir, index.step)
    forget_after(run_dir, index.step)
    if index.step > 0 and not (run_dir / LEDGER).exists():
        log.warning(
            "%s is gone: what became of earlier groups is not known any more", run_dir / LEDGER
        )
    log.info("going on from step %d of %d: %s", index.step, s.max_steps, path)
    return key, Start(index.run_id, next_lineage(run_dir, index.lineage), path, index)


def open_run(
    settings: LearnerSettings, ds_config: dict[str, Any], groups_per_step: int, log: logging.Logger
) -> tuple[bytes, Start, Opened]:
    """Claim the folder, then open books and port; returns the run's key as well. Raises SettingsError, DiskTrouble."""
    try:
        key, start = begin(settings, log)
        return key, start, open_books(settings, key, start, ds_config, groups_per_step, log)
    except OSError as error:
        raise DiskTrouble(
            f"--save_path {settings.save_path} cannot be used: {error}. Mend or free the disk, then start again."
        ) from error
    except ValueError as error:
        if isinstance(error, SettingsError | DataError):
            raise
        raise SettingsError(
            f"--resume: the books in {settings.save_path} cannot be gone on with: {error}. Mend them, or start another run"
        ) from error


def open_books(
    settings: LearnerSettings,
    key: bytes,
    start: Start,
    ds_config: dict[str, Any],
    groups_per_step: int,
    log: logging.Logger,
) -> Opened:
    """Open ledger, metrics, journal and the port, or a recorded run. Raises SettingsError, ValueError, OSError."""
    s, run_dir = settings, Path(settings.save_path)
    resumed_at = start.index.step if start.index else None
    ledger = Ledger(run_dir, start.lineage, resumed_at, s.replay)
    plan = make_plan(s, start, ledger, groups_per_step)
    metrics = MetricsWriter(run_dir / METRICS)
    if s.replay:
        log.info("replaying %s, run folder %s", s.replay, run_dir)
        return Opened(Replay(s.replay, key, plan, s.temperature), ledger, metrics, None)
    server = GroupServer(s.host, s.port, key, plan, log, read_curve(s.curve_key, "learner"))
    log.info("listening on %s:%d, run folder %s", s.host, s.port, run_dir)
    journal = (
        Journal(run_dir, s, ds_config, groups_per_step, log, resumed_at) if s.journal else None
    )
    return Opened(server, ledger, metrics, journal)


def make_plan(
    settings: LearnerSettings, start: Start, ledger: Ledger, groups_per_step: int
) -> ServerPlan:
    """What the server holds samplers to, as the flags and the checkpoint say it."""
    s = settings
    vocab_size = models.load_config(s.model_path).get_text_config().vocab_size
    want_ref = effective_kl_coef(s) > 0

    def check(group: Group) -> None:
        check_group(
            group,
            group_size=s.group_size,
            vocab_size=vocab_size,
            max_len=s.max_prompt_tokens + s.max_new_tokens,
            want_ref=want_ref,
        )

    old = old_adapters(Path(s.save_path), start, s.max_staleness)
    return ServerPlan(
        run_id=start.run_id,
        lineage=start.lineage,
        settings=agreed_settings(s),
        groups_per_step=groups_per_step,
        max_staleness=s.max_staleness,
        max_steps=s.max_steps,
        start_version=start.step,
        old_digests={version: adapter.pointer.sha256 for version, adapter in old.items()},
        cursor=start.index.cursor if start.index else {},
        dropped=ledger.dropped,
        lost=ledger.lost,
        peer_timeout_s=s.wait_timeout_s,
        check_group=check,
        journal=s.journal,
    )


def old_adapters(run_dir: Path, start: Start, max_staleness: int) -> dict[int, Adapter]:
    """{version: adapter} that groups may be of which were made before this start; what is gone is left out."""
    if start.index is None:
        return {}
    rows, found = read_lines(run_dir / LEDGER), {}
    for version in range(max(0, start.step - max_staleness), start.step + 1):
        for lineage in lineages(rows, version):
            if (adapter := read_version(run_dir, version, lineage)) is not None:
                found[version] = adapter
                break
    return found


def share_start(ranks: Ranks, run_dir: Path, key: bytes, start: Start) -> tuple[bytes, Start]:
    """From rank 0 to all: the key, to check the bytes that it shares, and the checkpoint to go on from. A collective."""
    if ranks.num_ranks == 1:
        return key, start
    step = start.index.step if start.index else -1
    tensor = torch.frombuffer(
        bytearray((key or bytes(32)) + struct.pack("<q", step)), dtype=torch.uint8
    )
    dist.broadcast(tensor, src=0, group=ranks.control)
    shared = tensor.numpy().tobytes()
    (step,) = struct.unpack("<q", shared[32:])
    if step >= 0 and start.index is None:
        path = checkpoints.folder_of(run_dir, step)
        index = checkpoints.read_index(path)
        start = Start(index.run_id, start.lineage, path, index)
    return shared[:32], start


def is_main() -> bool:
    """True on rank 0, before the ranks have come together."""
    return int(os.environ.get("RANK", "0")) == 0
