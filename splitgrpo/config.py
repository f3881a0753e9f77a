"""Every knob of both workers, declared once: one line holds its name, default and help text."""

import argparse
import dataclasses
import os
from dataclasses import dataclass
from typing import Any, TypeVar

LOSSES = ("grpo", "gspo")
# The sampler must know whether a reference pass is wanted; all other defaults of a loss stand in its own signature.
KL_COEF_DEFAULT = {"grpo": 0.04, "gspo": 0.0}

EXIT_OK, EXIT_USAGE, EXIT_DATA, EXIT_INTERNAL, EXIT_RETRY = 0, 2, 65, 70, 75


class SettingsError(ValueError):
    """A flag, a file named by a flag, or two settings that contradict each other (exit code 2)."""


class DataError(ValueError):
    """A data set that cannot be used as it is (exit code 65)."""


class PeerTimeout(RuntimeError):
    """The other worker did not come, or went away, for longer than --wait_timeout_s (exit code 75)."""


def knob(default: Any, help: str, *, choices: tuple | None = None, agree: bool = False) -> Any:
    """Declare one setting; `agree` marks those that sampler and learner must hold in common."""
    metadata = {"help": help, "choices": choices, "agree": agree}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SharedSettings:
    """What both workers take; fields marked `agree` are compared when a sampler says hello."""

    # fmt: off
    model_path: str = knob("Qwen/Qwen2.5-1.5B-Instruct", "base model: a folder or a hub name")
    data: str = knob("openai/gsm8k", "'arithmetic' (embedded), a hub name, a folder with train.* and test.*, or a .jsonl/.json/.csv/.parquet file", agree=True)
    question_column: str = knob("question", "column that holds the question", agree=True)
    answer_column: str = knob("answer", "column that holds the worked answer, the gold number after ####", agree=True)
    group_size: int = knob(4, "completions of one prompt (G)", agree=True)
    max_prompt_tokens: int = knob(512, "a longer prompt is dropped and counted, never cut", agree=True)
    max_new_tokens: int = knob(256, "longest completion, in tokens", agree=True)
    temperature: float = knob(1.0, "sampling temperature; log-probs on both sides are taken at it", agree=True)
    top_k: int = knob(0, "keep the k most likely tokens (0: all)", agree=True)
    top_p: float = knob(1.0, "keep the smallest set of tokens with this probability (1: all)", agree=True)
    loss: str = knob("grpo", "loss in utils.py", choices=LOSSES, agree=True)
    kl_coef: float | None = knob(None, "β of the KL to the base model (default: grpo 0.04, gspo 0: no reference pass)", agree=True)
    clip_eps: float | None = knob(None, "lower clip ε (default: grpo 0.2, gspo 3e-4)")
    clip_eps_high: float | None = knob(None, "upper clip ε (default: grpo = clip_eps, gspo 4e-4)")
    learning_rate: float | None = knob(None, "overrides the lr of ds_config.json")
    max_steps: int = knob(200, "optimizer steps of the run")
    max_staleness: int = knob(1, "versions by which a trained group may be older than the policy (0: exact on-policy)", agree=True)
    lora_rank: int = knob(32, "LoRA r of a new adapter; a sampler takes it from the published adapter instead")
    lora_alpha: int = knob(64, "LoRA alpha of a new adapter; a sampler takes it from the published adapter instead")
    seed: int = knob(0, "seed of prompts, sampling and LoRA initialisation", agree=True)
    port: int = knob(5555, "ZeroMQ port of the learner")
    host: str = knob("127.0.0.1", "address of the learner; loopback only until keys are supported")
    wait_timeout_s: float = knob(600.0, "give up with exit code 75 after so long without the other worker")
    num_threads: int = knob(0, "CPU threads of this process (0: half the cores)")
    verbose: bool = knob(False, "show what DeepSpeed, transformers and PEFT print")
    # fmt: on


@dataclass(frozen=True)
class SamplerSettings(SharedSettings):
    """Flags of sampling_worker.py."""

    # fmt: off
    lora_path: str = knob("./checkpoints", "the learner's --save_path, where published adapters are read")
    batch_size: int = knob(8, "completions a round; a multiple of group_size")
    device: str = knob("cuda:0", "where to sample; the CPU, said in the log, where there is no GPU")
    sampler_id: int = knob(0, "number of this sampler, unique in a run")
    reload_failures: int = knob(20, "end after so many failed reloads of a published adapter in a row")
    # fmt: on


@dataclass(frozen=True)
class LearnerSettings(SharedSettings):
    """Flags of training_worker.py."""

    # fmt: off
    save_path: str = knob("./checkpoints", "run folder: published adapters, checkpoints, metrics")
    ds_config: str = knob("ds_config.json", "DeepSpeed settings: ZeRO stage, precision, lr, clipping, micro batch")
    save_steps: int = knob(10, "steps between two resumable checkpoints")
    sync_steps: int = knob(1, "steps between two published adapters")
    keep_adapters: int = knob(4, "published adapters kept on disk")
    keep_checkpoints: int = knob(2, "resumable checkpoints kept on disk")
    max_bad_steps: int = knob(5, "end after so many steps in a row with a non-finite loss or gradient")
    local_rank: int = knob(-1, "set by the deepspeed launcher")
    # fmt: on


Settings = TypeVar("Settings", bound=SharedSettings)


def build_parser(cls: type[Settings], prog: str) -> argparse.ArgumentParser:
    """One flag a field of `cls`; names are spelled out whole, an abbreviation is an error."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=cls.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(cls):
        add_flag(parser, field)
    return parser


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    """Turn one declared knob into one argparse flag."""
    text = field.metadata["help"].replace("%", "%%")
    if field.type is bool:
        parser.add_argument(
            f"--{field.name}", action="store_true", default=field.default, help=text
        )
        return
    kind = float if field.type == float | None else field.type
    parser.add_argument(
        f"--{field.name}",
        type=kind,
        default=field.default,
        choices=field.metadata["choices"],
        help=text,
    )


def parse_settings(cls: type[Settings], argv: list[str] | None = None, prog: str = "") -> Settings:
    """Parse flags into frozen settings with their ranges checked. None means: the loss's own default.

    Raises SystemExit(2) for an unknown flag, SettingsError for a value that cannot work.
    """
    settings = cls(**vars(build_parser(cls, prog).parse_args(argv)))
    check_settings(settings)
    return settings


def check_settings(settings: SharedSettings) -> None:
    """Refuse values that would fail, or silently teach nothing, hours later."""
    s = settings
    require(s.group_size >= 2, f"--group_size {s.group_size}: a group needs at least 2 completions "
            "to have a baseline; with fewer every advantage is 0. Use 4 to 16.")  # fmt: skip
    require(
        0 < s.temperature <= 10, f"--temperature {s.temperature}: must be above 0 and at most 10"
    )
    require(0 < s.top_p <= 1, f"--top_p {s.top_p}: must be above 0 and at most 1")
    require(s.top_k >= 0, f"--top_k {s.top_k}: must be 0 (off) or more")
    for name in ("max_new_tokens", "max_prompt_tokens", "max_steps", "lora_rank", "lora_alpha"):
        require(getattr(s, name) >= 1, f"--{name} {getattr(s, name)}: must be at least 1")
    require(s.max_staleness >= 0, f"--max_staleness {s.max_staleness}: must be 0 or more")
    for name in ("kl_coef", "clip_eps", "clip_eps_high", "learning_rate"):
        value = getattr(s, name)
        require(
            value is None or 0 <= value < float("inf"),
            f"--{name} {value}: must be 0 or more and finite",
        )
    require(0 <= s.seed < 1 << 63, f"--seed {s.seed}: must be 0 or more, and below 2^63")
    require(
        0 <= s.num_threads <= 1024,
        f"--num_threads {s.num_threads}: must be 0 (half the cores) to 1024",
    )
    require(1 <= s.port <= 65535, f"--port {s.port}: must be 1 to 65535")
    require(s.wait_timeout_s > 0, f"--wait_timeout_s {s.wait_timeout_s}: must be above 0")
    require(s.host in ("127.0.0.1", "localhost"), f"--host {s.host}: only loopback is allowed, because messages "
            "are signed but not encrypted. For another machine, tunnel the port (ssh -L).")  # fmt: skip
    if isinstance(s, SamplerSettings):
        require(s.batch_size >= 1 and s.batch_size % s.group_size == 0,
                f"--batch_size {s.batch_size} is not a multiple of --group_size {s.group_size}: a round samples whole "
                f"groups. Try --batch_size {max(1, s.batch_size // s.group_size) * s.group_size}.")  # fmt: skip
        require(s.sampler_id >= 0, f"--sampler_id {s.sampler_id}: must be 0 or more")
        require(
            s.reload_failures >= 1, f"--reload_failures {s.reload_failures}: must be at least 1"
        )
    if isinstance(s, LearnerSettings):
        for name in ("save_steps", "sync_steps", "keep_checkpoints", "max_bad_steps"):
            require(getattr(s, name) >= 1, f"--{name} {getattr(s, name)}: must be at least 1")
        require(s.sync_steps <= s.max_staleness + 1, f"--sync_steps {s.sync_steps} with --max_staleness "
                f"{s.max_staleness}: rollouts would be too old before the next adapter is published, and both workers "
                f"would wait for ever. Use at most --sync_steps {s.max_staleness + 1}.")  # fmt: skip
        require(s.keep_adapters >= 2, f"--keep_adapters {s.keep_adapters}: must be at least 2, or an adapter is "
                "removed while a sampler reads it")  # fmt: skip


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def require(condition: bool, message: str) -> None:
    """Raise SettingsError(message) unless `condition` holds."""
    if not condition:
        raise SettingsError(message)


def effective_kl_coef(settings: SharedSettings) -> float:
    """β as the flags say it; above 0 the sampler makes a reference pass."""
    return KL_COEF_DEFAULT[settings.loss] if settings.kl_coef is None else settings.kl_coef


def loss_options(settings: SharedSettings) -> dict[str, float]:
    """Keyword arguments for the loss: only what was given, so that a loss swapped in the code keeps its own defaults."""
    high = settings.clip_eps if settings.clip_eps_high is None else settings.clip_eps_high
    given = {"clip_eps": settings.clip_eps, "clip_eps_high": high, "kl_coef": settings.kl_coef}
    return {name: value for name, value in given.items() if value is not None}


def agreed_settings(settings: SharedSettings) -> dict[str, str]:
    """The settings that sampler and learner must hold in common, as text, for comparison and hashing."""
    settings = dataclasses.replace(settings, kl_coef=effective_kl_coef(settings))
    return {
        f.name: repr(getattr(settings, f.name))
        for f in dataclasses.fields(SharedSettings)
        if f.metadata["agree"]
    }


def disagreements(learner: dict[str, str], sampler: dict[str, str]) -> list[str]:
    """Name each setting on which the two differ, with both values."""
    return [
        f"--{name}: learner {learner.get(name, 'unset')}, sampler {sampler.get(name, 'unset')}"
        for name in sorted(learner.keys() | sampler.keys())
        if learner.get(name) != sampler.get(name)
    ]


def default_threads(num_threads: int) -> int:
    """CPU threads for one worker: as asked, or half the cores, since two workers share them."""
    return num_threads if num_threads > 0 else max(1, (os.cpu_count() or 2) // 2)
