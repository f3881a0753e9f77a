"""From a command line to checked settings: flags made of config.py's knobs, ranges, and combinations to warn of."""

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any, TypeVar

from splitgrpo.config import (
    EXIT_USAGE,
    JOURNAL,
    UNUSED_FLAGS,
    LearnerSettings,
    SamplerSettings,
    SettingsError,
    SharedSettings,
    effective_advantage,
)
from splitgrpo.keys import COMMAND, is_loopback, read_curve

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
    kind: Any = field.type
    if kind in (float | None, str | None):
        kind = float if kind == float | None else str
    parser.add_argument(
        f"--{field.name}",
        type=kind,
        default=field.default,
        choices=field.metadata["choices"],
        help=text,
    )


def parse_settings(cls: type[Settings], argv: list[str] | None = None, prog: str = "") -> Settings:
    """Parse flags into frozen settings with their ranges checked. None means: the loss's own default.

    With --replay the settings of the recorded run are the defaults. Raises SystemExit(2) for an unknown flag,
    SettingsError for a value that cannot work.
    """
    parser = build_parser(cls, prog)
    if replay := getattr(parser.parse_args(argv), "replay", None):
        parser.set_defaults(**recorded_settings(replay))
    settings = cls(**vars(parser.parse_args(argv)))
    check_settings(settings)
    return settings


def refuse_early(cls: type[SharedSettings], prog: str) -> None:
    """End with code 2, saying why, where the command line is wrong: to be called before the slow imports."""
    try:
        parse_settings(cls, prog=prog)
        if cls is LearnerSettings and importlib.util.find_spec("deepspeed") is None:
            raise SettingsError(
                "deepspeed is not installed in this environment: the learner needs that of requirements.txt, which run.sh "
                "makes in .venv (.venv-vllm is for a sampler with --engine vllm)"
            )
    except SettingsError as error:
        build_parser(cls, prog).exit(EXIT_USAGE, f"{prog}: error: {error}\n")


def recorded_settings(run_dir: str) -> dict[str, Any]:
    """What a run with --journal was started with, but for where it wrote and listened. Raises SettingsError."""
    folder = Path(run_dir) / JOURNAL
    try:
        recorded = json.loads((folder / "settings.json").read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--replay {run_dir}: {folder}/settings.json cannot be read ({error}); only a run started with --journal can be "
            "trained on again"
        ) from error
    own = {"save_path", "resume", "overwrite", "journal", "replay", "host", "port", "curve_key", "local_rank", "verbose",
           "wait_timeout_s"}  # fmt: skip
    known = {f.name for f in dataclasses.fields(LearnerSettings)} - own
    return {k: v for k, v in recorded.items() if k in known} | {
        "ds_config": str(folder / "ds_config.json")
    }


def check_settings(settings: SharedSettings) -> None:
    """Refuse values that would fail, or silently teach nothing, hours later."""
    s = settings
    require(s.group_size >= 2, f"--group_size {s.group_size}: a group needs at least 2 completions "
            "to have a baseline; with fewer every advantage is 0. Use 4 to 16.")  # fmt: skip
    require(0.001 <= s.temperature <= 10, f"--temperature {s.temperature}: must be 0.001 to 10")
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
    read_curve(s.curve_key, "learner" if isinstance(s, LearnerSettings) else "sampler")
    require(s.curve_key is not None or is_loopback(s.host), f"--host {s.host}: without --curve_key only loopback is "
            f"allowed, because nothing would be encrypted. {COMMAND} makes the keys of both workers; or tunnel the "
            "port (ssh -L).")  # fmt: skip
    if isinstance(s, SamplerSettings):
        require(s.batch_size >= 1 and s.batch_size % s.group_size == 0,
                f"--batch_size {s.batch_size} is not a multiple of --group_size {s.group_size}: a round samples whole "
                f"groups. Try --batch_size {max(1, s.batch_size // s.group_size) * s.group_size}.")  # fmt: skip
        require(
            0 <= s.sampler_id < 1 << 31,
            f"--sampler_id {s.sampler_id}: must be 0 or more, and below 2^31",
        )
        require(
            s.reload_failures >= 1, f"--reload_failures {s.reload_failures}: must be at least 1"
        )
        require(
            s.dynamic_sampling >= 0,
            f"--dynamic_sampling {s.dynamic_sampling}: must be 0 (off) or more",
        )
        require(
            0 < s.reward_timeout_s <= 86400,
            f"--reward_timeout_s {s.reward_timeout_s}: must be above 0 and at most 86400 (a day)",
        )
    for name in UNUSED_FLAGS.get(s.loss, ()):
        require(
            getattr(s, name, None) is None,
            f"--{name} has no effect with --loss {s.loss}: leave it out",
        )
    if isinstance(s, LearnerSettings):
        check_learner_settings(s)


def check_learner_settings(s: LearnerSettings) -> None:
    """The part of `check_settings` that only a learner has."""
    require(
        not (s.resume and s.overwrite),
        "--resume goes on with a run, --overwrite removes it: give one of them",
    )
    require(s.replay is None or Path(s.replay).resolve() != Path(s.save_path).resolve(),
            f"--replay {s.replay} is --save_path too: a replay is a run of its own, give it another folder")  # fmt: skip
    for name in ("save_steps", "sync_steps", "keep_checkpoints", "max_bad_steps"):
        require(getattr(s, name) >= 1, f"--{name} {getattr(s, name)}: must be at least 1")
    require(s.sync_steps <= s.max_staleness + 1, f"--sync_steps {s.sync_steps} with --max_staleness "
            f"{s.max_staleness}: rollouts would be too old before the next adapter is published, and both workers "
            f"would wait for ever. Use at most --sync_steps {s.max_staleness + 1}.")  # fmt: skip
    require(s.keep_adapters >= 2, f"--keep_adapters {s.keep_adapters}: must be at least 2, or an adapter is "
            "removed while a sampler reads it")  # fmt: skip
    for name, low in (
        ("dual_clip", 1.0),
        ("mismatch_cap", 1.0),
        ("journal_gb", 0.0),
        ("mismatch_warn", 0.0),
    ):
        value = getattr(s, name)
        require(
            value is None or low < value < float("inf"),
            f"--{name} {value}: must be above {low:g} and finite",
        )
    require(
        0 <= s.entropy_coef < float("inf"),
        f"--entropy_coef {s.entropy_coef}: must be 0 or more and finite",
    )
    require(0 <= s.soft_overlong_tokens <= s.max_new_tokens, f"--soft_overlong_tokens {s.soft_overlong_tokens}: must be 0 "
            f"(off) to --max_new_tokens {s.max_new_tokens}")  # fmt: skip


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def require(condition: bool, message: str) -> None:
    """Raise SettingsError(message) unless `condition` holds."""
    if not condition:
        raise SettingsError(message)


def warn_of(settings: LearnerSettings) -> list[str]:
    """Combinations that work but that the papers warn against, each with the reason."""
    s, out = settings, []
    widest = max(s.clip_eps or 0.0, s.clip_eps_high or 0.0)
    if s.loss == "gspo" and widest >= 0.02:
        out.append(
            f"--loss gspo with a clip of {widest}: the ratio of a whole sequence stays within a few thousandths of 1, so "
            "such a bound is never reached and nothing is clipped (GSPO: 3e-4 and 4e-4)"
        )
    if s.loss == "gspo" and s.aggregation in ("token", "fixed"):
        out.append(
            f"--loss gspo with --aggregation {s.aggregation}: a sequence ratio is divided by its length already, so "
            "long completions would weigh more, by their length (GSPO: sequence)"
        )
    if s.loss == "dr_grpo" and effective_advantage(s) in ("group", "batch"):
        out.append(
            f"--loss dr_grpo with --advantage {effective_advantage(s)}: the std brings back the bias to very easy "
            "and very hard prompts that Dr. GRPO takes away (Dr. GRPO: none)"
        )
    if s.loss == "dr_grpo" and s.aggregation == "sequence":
        out.append(
            "--loss dr_grpo with --aggregation sequence: dividing by each length brings back the bias to long wrong "
            "completions that Dr. GRPO takes away (Dr. GRPO: fixed)"
        )
    if s.max_staleness > 4 and s.mismatch_correction == "none":
        out.append(
            f"--max_staleness {s.max_staleness}: above 4 versions accuracy was seen to fall by half where nothing corrects "
            "for it; try --mismatch_correction truncate, or fewer"
        )
    if s.loss == "reinforce" and s.max_staleness > 0:
        out.append(
            f"--loss reinforce with --max_staleness {s.max_staleness}: no ratio corrects for rollouts of an older policy; "
            "--max_staleness 0 is on-policy"
        )
    return out
