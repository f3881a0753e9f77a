"""The learner's resumable state: float32 LoRA masters, Adam's moments, counters and random states. No pickle.

    RUN/checkpoints/step_000010/state.safetensors   "lora|KEY", "KEY|exp_avg", "KEY|exp_avg_sq", "rng|rank0"
    RUN/checkpoints/step_000010/state.json          step, lineage, cursor {sampler: next sequence number}, settings, sha256

It holds no shard of any rank, so another number of ranks can read it. The base model is not in it.
"""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from splitgrpo import SCHEMA_VERSION
from splitgrpo.config import LearnerSettings
from splitgrpo.files import sha256_file, write_folder, write_json
from splitgrpo.zero import Ranks, lora_state, optimizer_state

FOLDER = re.compile(r"step_(\d{6,})")
STATE, INDEX = "state.safetensors", "state.json"


def rng_states(ranks: Ranks) -> dict[str, Tensor]:
    """Every rank's torch generator state. A collective."""
    own = torch.get_rng_state()
    states = [torch.empty_like(own) for _ in range(ranks.num_ranks)]
    dist.all_gather(states, own, group=ranks.control)
    return {f"rng|rank{i}": state for i, state in enumerate(states)}


def save_checkpoint(
    run_dir: Path,
    engine: Any,
    ranks: Ranks,
    settings: LearnerSettings,
    *,
    step: int,
    lineage: int,
    cursor: dict[int, int],
) -> Path:
    """Write what is needed to go on from `step`. A collective; rank 0 writes. Raises OSError.

    `cursor` holds, for each sampler, the sequence number after its last trained group.
    """
    tensors = {f"lora|{k}": v for k, v in lora_state(engine.module.model).items()}
    if step > 0:  # Adam has no moments before its first step
        tensors |= optimizer_state(engine)
    tensors |= rng_states(ranks)
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    if not ranks.is_main or path.exists():
        return path

    def fill(folder: Path) -> None:
        save_file(tensors, folder / STATE)
        index = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "lineage": lineage,
            "cursor": {str(k): v for k, v in cursor.items()},
            "num_ranks": ranks.num_ranks,
            "settings": dataclasses.asdict(settings),
            "files": {STATE: [(folder / STATE).stat().st_size, sha256_file(folder / STATE)]},
        }
        write_json(folder / INDEX, index)

    write_folder(path, fill)
    remove_old(run_dir / "checkpoints", settings.keep_checkpoints)
    return path


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, by number."""
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := FOLDER.fullmatch(p.name))]
    for _, path in sorted(found)[:-keep]:
        shutil.rmtree(path)
