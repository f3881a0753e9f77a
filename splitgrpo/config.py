"""Every knob of both workers, declared once: one line holds its name, default and help text."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

# The sampler must know whether a reference pass is wanted; all other defaults of a loss stand in its own signature.
KL_COEF_DEFAULT = {
    "grpo": 0.04,
    "gspo": 0.0,
    "dr_grpo": 0.0,
    "dapo": 0.0,
    "cispo": 0.0,
    "sapo": 0.0,
    "reinforce": 0.0,
}
LOSSES = tuple(KL_COEF_DEFAULT)
# Flags that a loss's formula has no place for; giving one is an error, not a silent nothing.
UNUSED_FLAGS = {"cispo": ("dual_clip",), "sapo": ("clip_eps", "clip_eps_high", "dual_clip"),
                "reinforce": ("clip_eps", "clip_eps_high", "dual_clip")}  # fmt: skip

JOURNAL = "journal"  # folder of a run that --journal writes and --replay reads

EXIT_OK, EXIT_USAGE, EXIT_DATA, EXIT_INTERNAL, EXIT_RETRY = 0, 2, 65, 70, 75


class SettingsError(ValueError):
    """A flag, a file named by a flag, or two settings that contradict each other (exit code 2)."""


class DataError(ValueError):
    """A data set that cannot be used as it is (exit code 65)."""


class PeerTimeout(RuntimeError):
    """The other worker did not come, or went away, for longer than --wait_timeout_s (exit code 75)."""


class DiskTrouble(RuntimeError):
    """The disk let nothing be written for half of --wait_timeout_s (exit code 75)."""


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
    kl_coef: float | None = knob(None, "β of the KL to the base model (default: grpo 0.04, all others 0: no reference pass)", agree=True)
    clip_eps: float | None = knob(None, "lower clip ε (default: 0.2, gspo 3e-4)")
    clip_eps_high: float | None = knob(None, "upper clip ε (default: as clip_eps; gspo 4e-4, dapo 0.28, cispo 4: a cap of 5)")
    learning_rate: float | None = knob(None, "overrides the lr of ds_config.json")
    max_steps: int = knob(200, "optimizer steps of the run")
    max_staleness: int = knob(1, "versions by which a trained group may be older than the policy (0: exact on-policy)", agree=True)
    lora_rank: int = knob(32, "LoRA r of a new adapter; a sampler takes it from the published adapter instead")
    lora_alpha: int = knob(64, "LoRA alpha of a new adapter; a sampler takes it from the published adapter instead")
    seed: int = knob(0, "seed of prompts, sampling and LoRA initialisation", agree=True)
    port: int = knob(5555, "ZeroMQ port of the learner")
    host: str = knob("127.0.0.1", "address of the learner; any other than loopback needs --curve_key")
    curve_key: str | None = knob(None, "this worker's file of keys, as made by python -m splitgrpo.keys: encrypts, and lets in no one else")
    wait_timeout_s: float = knob(600.0, "give up with exit code 75 after so long without the other worker")
    num_threads: int = knob(0, "CPU threads of this process (0: half the cores)")
    plain: bool = knob(False, "take transformers' own forward pass and padded rows instead of the fast ones, which give the same numbers")
    verbose: bool = knob(False, "show what DeepSpeed, transformers and PEFT print")
    # fmt: on


@dataclass(frozen=True)
class SamplerSettings(SharedSettings):
    """Flags of sampling_worker.py."""

    # fmt: off
    lora_path: str = knob("./checkpoints", "the learner's --save_path, where published adapters are read")
    batch_size: int = knob(8, "completions a round; a multiple of group_size")
    device: str = knob("cuda:0", "where to sample; the CPU, said in the log, where there is no GPU")
    engine: str = knob("hf", "what samples: transformers, or vLLM in an environment of its own (requirements-vllm.txt)", choices=("hf", "vllm"))
    sampler_id: int = knob(0, "number of this sampler, unique in a run")
    reload_failures: int = knob(20, "end after so many failed reloads of a published adapter in a row")
    dynamic_sampling: int = knob(0, "replace a group whose rewards are all equal by that of the next prompt, at most so many in a row (0: off)")
    reward_timeout_s: float = knob(30.0, "time for one call of reward_function; its group is dropped if it takes longer")
    # fmt: on


@dataclass(frozen=True)
class LearnerSettings(SharedSettings):
    """Flags of training_worker.py."""

    # fmt: off
    save_path: str = knob("./checkpoints", "run folder: published adapters, checkpoints, metrics")
    ds_config: str = knob("ds_config.json", "DeepSpeed settings: ZeRO stage, precision, lr, clipping, micro batch")
    resume: bool = knob(False, "go on with the run in --save_path from its newest whole checkpoint")
    overwrite: bool = knob(False, "start anew in a --save_path that holds a run, and remove that run")
    save_steps: int = knob(10, "steps between two resumable checkpoints")
    sync_steps: int = knob(1, "steps between two published adapters")
    keep_adapters: int = knob(4, "published adapters kept on disk")
    keep_checkpoints: int = knob(2, "resumable checkpoints kept on disk")
    max_bad_steps: int = knob(5, "end after so many steps in a row with a non-finite loss or gradient")
    advantage: str | None = knob(None, "advantages: (r - mean) / std of the group, / std of the whole batch, none: r - mean, rloo: r - mean of the others (default: group; dr_grpo none)", choices=("group", "batch", "none", "rloo"))
    aggregation: str | None = knob(None, "mean over each sequence and then over sequences, over all tokens, or a fixed divisor of sequences x max_new_tokens (default: the loss's own)", choices=("sequence", "token", "fixed"))
    dual_clip: float | None = knob(None, "bound the loss of a bad completion's token at so many times its advantage (the paper's: 3; default: no bound)")
    mask_truncated: bool = knob(False, "completions cut by max_new_tokens carry no gradient and count in no denominator")
    soft_overlong_tokens: int = knob(0, "DAPO's penalty, down to -1 over so many last tokens before max_new_tokens (the paper's: a fifth of it; 0: off)")
    entropy_coef: float = knob(0.0, "weight of an entropy bonus, averaged as the loss is")
    mismatch_correction: str = knob("none", "weigh tokens by how much learner and sampler differ at the same version: truncate the weight, or mask where it is above the cap; takes a forward pass more for stale rollouts", choices=("none", "truncate", "mask"))
    mismatch_level: str = knob("token", "a weight for each token, or for the whole sequence by the sum of its differences", choices=("token", "sequence"))
    mismatch_cap: float = knob(2.0, "cap of these weights")
    mismatch_warn: float | None = knob(None, "say aloud a mean difference of log-probs above this (default: 1e-3 in float32, 0.1 in bfloat16)")
    journal: bool = knob(False, "write every received group to SAVE_PATH/journal, for --replay")
    journal_gb: float = knob(4.0, "size of the journal; the oldest steps are removed above it")
    replay: str | None = knob(None, "train on the journal of this run folder, with its settings where no flag says otherwise; no sampler")
    local_rank: int = knob(-1, "set by the deepspeed launcher")
    # fmt: on


def effective_kl_coef(settings: SharedSettings) -> float:
    """β as the flags say it; above 0 the sampler makes a reference pass."""
    return KL_COEF_DEFAULT[settings.loss] if settings.kl_coef is None else settings.kl_coef


def loss_options(settings: LearnerSettings) -> dict[str, Any]:
    """Keyword arguments for the loss: only what was given, so that a loss swapped in the code keeps its own defaults."""
    high = settings.clip_eps if settings.clip_eps_high is None else settings.clip_eps_high
    given = {"clip_eps": settings.clip_eps, "clip_eps_high": high}
    given |= {n: getattr(settings, n) for n in ("kl_coef", "aggregation", "dual_clip")}
    return {name: value for name, value in given.items() if value is not None}


def effective_advantage(settings: LearnerSettings) -> str:
    """The advantage estimator as the flags say it, or the loss's own."""
    return settings.advantage or ("none" if settings.loss == "dr_grpo" else "group")


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
