"""The learner's resumable state: float32 LoRA masters, Adam's moments, counters and random states. No pickle.

    RUN/checkpoints/step_000010/state.safetensors   "lora|KEY", "KEY|exp_avg", "KEY|exp_avg_sq", "rng|rank0"
    RUN/checkpoints/step_000010/state.json          Index: step, lineage, cursor, settings, ...
    RUN/checkpoints/step_000010/sha256sums          of both, as `sha256sum -c` reads them

It holds no shard of any rank, so another number of ranks can read it. The base model is not in it, nor is a file of
DeepSpeed's own: those are pickle, and lose what docs/reliability.md lists.
"""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from splitgrpo import SCHEMA_VERSION
from splitgrpo.adapters import adapter_parameters, check_keys
from splitgrpo.config import LearnerSettings, SettingsError
from splitgrpo.enginestate import adam_step, load_state, lora_state, optimizer_state
from splitgrpo.files import (
    save_tensors,
    sha256_bytes,
    sha256_file,
    write_folder,
    write_json,
    write_text,
)
from splitgrpo.zero import Ranks

FOLDER = re.compile(r"step_(\d{6,})")
STATE, INDEX, SUMS = "state.safetensors", "state.json", "sha256sums"
# Another value would train on other prompts, or on weights of another shape, than the run that is gone on with.
FIXED = ("data", "question_column", "answer_column", "max_prompt_tokens", "seed", "lora_rank", "lora_alpha")  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or incomplete; the text says what and where."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What state.json holds.

    base_digest   of the model that the LoRA weights belong to (adapters.base_digest)
    adam_step     updates that Adam has made; less than `step` where steps were skipped
    schedule      steps that the learning-rate schedule of ds_config.json has made; None where there is none
    cursor        {sampler: sequence number of its first group without a fate}
    skipped       steps with a non-finite gradient; bad_in_row: the last so many were
    elapsed_s     seconds of training until here, over all starts
    """

    schema_version: int
    step: int
    lineage: int
    run_id: str
    base_digest: str
    adam_step: int
    schedule: int | None
    cursor: dict[int, int]
    skipped: int
    bad_in_row: int
    elapsed_s: float
    num_ranks: int
    settings: dict[str, Any]


def rng_states(ranks: Ranks) -> dict[str, Tensor]:
    """Every rank's torch generator state. A collective."""
    own = torch.get_rng_state()
    states = [torch.empty_like(own) for _ in range(ranks.num_ranks)]
    dist.all_gather(states, own, group=ranks.control)
    return {f"rng|rank{i}": state for i, state in enumerate(states)}


def gather_state(engine: Any, ranks: Ranks) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU. A collective."""
    tensors = {f"lora|{k}": v for k, v in lora_state(engine.module.model).items()}
    if adam_step(engine) > 0:  # Adam has no moments before its first update
        tensors |= optimizer_state(engine)
    return tensors | rng_states(ranks)


def write_checkpoint(run_dir: Path, tensors: dict[str, Tensor], keep: int, **fields: Any) -> Path:
    """Write one checkpoint and remove all but the newest `keep`; `fields` are those of Index. Raises OSError.

    One that is there already is left as it is: an earlier try of this call has written it, and then failed.
    """
    path = folder_of(run_dir, fields["step"])

    def fill(folder: Path) -> None:
        save_tensors(tensors, folder / STATE)
        index = Index(schema_version=SCHEMA_VERSION, **fields)
        write_json(folder / INDEX, msgspec.to_builtins(index, str_keys=True))
        sums = [f"{sha256_file(folder / name)}  {name}\n" for name in (STATE, INDEX)]
        write_text(folder / SUMS, "".join(sums))

    if not path.exists():
        write_folder(path, fill)
    for old in found_in(run_dir)[keep:]:
        shutil.rmtree(old, ignore_errors=True)  # what is new is safe; next time then
    return path


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def found_in(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, by number."""
    folder = run_dir / "checkpoints"
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [(int(m[1]), p) for p in paths if (m := FOLDER.fullmatch(p.name))]
    return [p for _, p in sorted(found, reverse=True)]


def needed_versions(run_dir: Path, max_staleness: int) -> frozenset[int]:
    """Policy versions that groups may be of which a learner gets again when it goes on from a checkpoint of this run."""
    steps = [int(path.name.removeprefix("step_")) for path in found_in(run_dir)]
    return frozenset(v for step in steps for v in range(step - max_staleness, step + 1))


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint out of the way of its number, over an earlier one of that name."""
    aside = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def read_index(path: Path) -> Index:
    """The index of one checkpoint. Raises CheckpointError; SettingsError for a later format than this program knows."""
    refuse_later_format(path)
    try:
        return msgspec.json.decode(read_checked(path, INDEX), type=Index, strict=False)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {error}") from error


def refuse_later_format(path: Path) -> None:
    """Raises SettingsError; all else that a later program may have written otherwise is read after this."""
    try:
        version = json.loads((path / INDEX).read_bytes())["schema_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # damaged, as those say who look closer
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SettingsError(
            f"{path} has format {version}, this program knows formats up to {SCHEMA_VERSION}: go on with the newer version "
            "of the program that wrote it"
        )


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of one checkpoint. Raises CheckpointError."""
    try:
        return load_tensors(read_checked(path, STATE))
    except SafetensorError as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error


def read_checked(path: Path, name: str) -> bytes:
    """One file of a checkpoint, every byte of it as it was written. Raises CheckpointError."""
    try:
        content, sums = (path / name).read_bytes(), (path / SUMS).read_text(errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error}") from error
    if f"{sha256_bytes(content)}  {name}\n" not in sums:
        raise CheckpointError(
            f"{path / name}: {len(content)} bytes that are not those whose sha256 {SUMS} has"
        )
    return content


def restore(engine: Any, ranks: Ranks, path: Path, index: Index) -> None:
    """Put a checkpoint into a fresh engine: weights, moments, schedule, random states. A collective.

    A rank that the checkpoint has no random state of keeps its own. Raises CheckpointError.
    """
    tensors = read_state(path)
    lora = {k.removeprefix("lora|"): v for k, v in tensors.items() if k.startswith("lora|")}
    check_keys(adapter_parameters(engine.module.model), lora, path.name)
    load_state(engine, lora, tensors, index.adam_step)
    engine.global_steps = index.step
    if engine.lr_scheduler is not None and index.schedule is not None and index.schedule >= 0:
        engine.lr_scheduler.step(index.schedule)
    if (own := tensors.get(f"rng|rank{ranks.rank}")) is not None:
        torch.set_rng_state(own)


def find_checkpoint(run_dir: Path, log: logging.Logger) -> tuple[Path, Index]:
    """The newest undamaged checkpoint of a run; a damaged one is named, and set aside. Raises SettingsError."""
    found, damaged = found_in(run_dir), []
    for path in found:
        try:
            index = read_index(path)
            read_state(path)
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
            damaged.append(path)
            continue
        for other in damaged:
            set_aside(other)
        return path, index
    if found:
        raise SettingsError(
            f"--resume: none of the {len(found)} checkpoints in {run_dir} is whole; the newest is {found[0]}"
        )
    raise SettingsError(
        f"--resume: {run_dir} holds no checkpoint ({run_dir / 'checkpoints'} has no step_* folder). Give the --save_path "
        "of an earlier run, or leave --resume out to start one"
    )


def check_same_run(index: Index, settings: LearnerSettings, log: logging.Logger) -> None:
    """Refuse settings under which this would be another run, and name every other that changed. Raises SettingsError."""
    now, then = dataclasses.asdict(settings), index.settings
    differing = [name for name in now if name in then and now[name] != then[name]]
    if fixed := [name for name in differing if name in FIXED]:
        text = ", ".join(f"--{n} {now[n]!r} (the checkpoint has {then[n]!r})" for n in fixed)
        raise SettingsError(f"--resume with another {text}: give the same, or start a new run")
    own = ("resume", "overwrite", "save_path", "local_rank", "port", "verbose", "num_threads")
    for name in differing:
        if name not in own:
            log.info("--%s is %r now, was %r", name, now[name], then[name])


def check_base(index: Index, base_digest: str, model_path: str) -> None:
    """Refuse a checkpoint of another base model. Raises SettingsError."""
    if index.base_digest != base_digest:
        raise SettingsError(
            f"--resume: the checkpoint was trained on another base model, or in another precision, than --model_path "
            f"{model_path} with this ds_config.json: it was {index.settings.get('model_path')}"
        )
