"""Everything that touches DeepSpeed: its settings, the process group, the engine, and float32 state out of it."""

import json
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from splitgrpo.config import SettingsError
from splitgrpo.rankwatch import RankWatch


@dataclass(frozen=True)
class Ranks:
    """This process among the learner's ranks. `control` is a CPU group for small messages, whatever the backend."""

    rank: int
    num_ranks: int
    device: torch.device
    control: Any
    watch: RankWatch | None = None

    def bump(self, doing: str = "") -> None:
        """Tell the watch that this rank has moved on, and what it does now (empty: the same)."""
        if self.watch is not None:
            self.watch.bump(doing)

    @property
    def is_main(self) -> bool:
        """True on the rank that receives, decides and writes."""
        return self.rank == 0


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A checked ds_config.json. `micro_batch_size` is rows of one rank's micro-batch."""

    config: dict[str, Any]
    micro_batch_size: int
    accumulation: int
    dtype_name: str
    learning_rate: float

    def completions_per_step(self, num_ranks: int) -> int:
        """Completions of one optimizer step."""
        return self.micro_batch_size * self.accumulation * num_ranks


def read_ds_config(path: str, learning_rate: float | None) -> DeepSpeedSettings:
    """Read ds_config.json, set the learning rate if one is given, and refuse what would fail or mislead later.

    Raises SettingsError naming the key.
    """
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise SettingsError(f"--ds_config {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--ds_config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(
            f"--ds_config {path}: expected an object, found {type(config).__name__}"
        )
    refuse_auto(config, path)
    micro = need_int(config, "train_micro_batch_size_per_gpu", path)
    accumulation = need_int(config, "gradient_accumulation_steps", path)
    if "gradient_clipping" not in config:
        raise SettingsError(
            f"{path} must set gradient_clipping: DeepSpeed's default has changed between versions"
        )
    need_number(config["gradient_clipping"], "gradient_clipping", path)
    stage = section(config, "zero_optimization", path).get("stage")
    if stage not in (0, 1, 2, 3):
        raise SettingsError(f"{path}: zero_optimization.stage must be 0 to 3, found {stage!r}")
    optimizer = section(config, "optimizer", path)
    params = section(optimizer, "params", path)
    if optimizer.get("type") not in ("Adam", "AdamW") or "lr" not in params:
        raise SettingsError(f"{path} must hold an optimizer of type AdamW or Adam with params.lr")
    if learning_rate is not None:
        params["lr"] = learning_rate
    need_number(params["lr"], "optimizer.params.lr", path)
    if not torch.cuda.is_available():
        params["torch_adam"] = True  # DeepSpeed's own Adam needs a compiler
    bf16, fp16 = (section(config, k, path).get("enabled", False) for k in ("bf16", "fp16"))
    if not isinstance(bf16, bool) or not isinstance(fp16, bool):
        raise SettingsError(f"{path}: enabled must be true or false, found {bf16!r} and {fp16!r}")
    if fp16:
        raise SettingsError(
            f"{path}: fp16 loses LoRA gradients to its small range; enable bf16, or neither for float32"
        )
    if bf16 and stage == 0:
        raise SettingsError(
            f"{path}: bf16 needs zero_optimization.stage 1 to 3, which keeps float32 masters"
        )
    if bf16 and not config["bf16"].get("check_grad_overflow", True):
        raise SettingsError(
            f"{path}: bf16.check_grad_overflow is false: a non-finite gradient would reach the weights; remove it"
        )
    return DeepSpeedSettings(
        config=config,
        micro_batch_size=micro,
        accumulation=accumulation,
        dtype_name="bfloat16" if bf16 else "float32",
        learning_rate=float(params["lr"]),
    )


def refuse_auto(value: Any, path: str, key: str = "") -> None:
    """'auto' is filled in by the Hugging Face Trainer, which isn't used here."""
    if value == "auto":
        raise SettingsError(f"{path}: {key.lstrip('.')} is 'auto'; write the value")
    if isinstance(value, dict):
        for name, inner in value.items():
            refuse_auto(inner, path, f"{key}.{name}")


def need_int(config: dict[str, Any], key: str, path: str) -> int:
    """A whole number of at least 1."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{path}: {key} must be a whole number of at least 1, found {value!r}")
    return value


def need_number(value: Any, key: str, path: str) -> None:
    """A finite number of at least 0."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value < float("inf")
    ):
        raise SettingsError(f"{path}: {key} must be a number of at least 0, found {value!r}")


def section(config: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    """An object inside of the file, empty where it is left out."""
    value = config.get(key, {})
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: {key} must be an object, found {value!r}")
    return value


def check_batch(ds: DeepSpeedSettings, num_ranks: int, group_size: int, path: str) -> None:
    """The completions of one step are whole groups, and agree with train_batch_size if that is given."""
    total = ds.completions_per_step(num_ranks)
    text = f"{ds.micro_batch_size} x {ds.accumulation} x {num_ranks}"
    stated = ds.config.get("train_batch_size", total)
    if stated != total:
        raise SettingsError(
            f"{path}: train_batch_size is {stated}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
            f"ranks is {text} = {total}. Remove train_batch_size or make it {total}."
        )
    if total % group_size:
        raise SettingsError(
            f"one optimizer step takes {text} = {total} completions ({path}: train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x ranks), which is not a multiple of --group_size {group_size}"
        )


def start_ranks(watch: RankWatch | None = None) -> Ranks:
    """Join the process group that the deepspeed launcher prepared, or make one of a single rank.

    NCCL where there are GPUs, gloo elsewhere. `watch` has met the other ranks already (rankwatch.join_ranks).
    """
    import deepspeed

    if not torch.cuda.is_available():
        # deepspeed 0.19.8 compiles a shared-memory op for CPU ranks (a minute, and a compiler) unless it is told that
        # no op is compatible.
        deepspeed.ops.__compatible_ops__ = {}
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free_port()))  # fmt: skip
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False
    )
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    control = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device, control, watch)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_engine(module: nn.Module, ds: DeepSpeedSettings) -> Any:
    """Hand the module to DeepSpeed; from here on its parameters are DeepSpeed's.

    Raises SettingsError for settings that DeepSpeed does not take.
    """
    import deepspeed

    trainable = [p for p in module.parameters() if p.requires_grad]
    # deepspeed 0.19.8 loads its Muon whatever the optimizer is, and with it torch's inductor, up to a second long, for
    # functions that Adam never calls.
    torch.compiler.set_default_backend("eager")
    try:
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=trainable, config=json.loads(json.dumps(ds.config))
        )
    except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
        raise SettingsError(
            f"DeepSpeed does not take the settings of --ds_config: {error}"
        ) from error
    finally:
        torch.compiler.set_default_backend(None)
    engine.train()
    return engine


def take_step(engine: Any) -> tuple[bool, float]:
    """End a step: update the weights, or leave them where the gradient is not finite. A collective.

    Returns whether they were updated, and the gradient's norm before clipping.
    """
    if engine.zero_optimization_stage() == 0:  # DeepSpeed 0.19.8 checks no gradient there
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            engine.zero_grad()
            return False, norm
        engine.step()
        return True, norm
    engine.step()
    found = engine.get_global_grad_norm()
    return bool(engine.was_step_applied()), float("nan") if found is None else float(found)


def schedule_step(engine: Any) -> int | None:
    """Steps that the learning-rate schedule of ds_config.json has made, or None where there is none."""
    return None if engine.lr_scheduler is None else int(engine.lr_scheduler.last_batch_iteration)
