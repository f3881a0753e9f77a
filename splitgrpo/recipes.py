"""Whole runs: a model, its accuracy, training by two processes, its accuracy again, and a summary.

python -m splitgrpo.recipes demo            embedded model, under three minutes on two cores
python -m splitgrpo.recipes smollm2         a real 135M chat model on GSM8K, on the CPU
python -m splitgrpo.recipes qwen            Qwen2.5-1.5B-Instruct on GSM8K, on three GPUs
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitgrpo.process import begin_process

if __name__ == "__main__":
    begin_process()

from splitgrpo import evaluate, warmstart
from splitgrpo.cli import positive_int
from splitgrpo.config import EXIT_OK, SettingsError
from splitgrpo.files import write_json
from splitgrpo.launch import ROOT, train
from splitgrpo.process import StopFlag, end_process, run_main
from splitgrpo.zero import free_port

log = logging.getLogger("run")


@dataclass(frozen=True)
class Recipe:
    """What distinguishes one run from another. `flags` are flags of the workers, by name."""

    flags: dict[str, Any]
    make_model: Callable[[argparse.Namespace, Path, Callable[[], None]], str]
    ds_changes: dict[str, Any]
    sampler_batch: int
    ranks: int = 1
    eval_limit: int = 200
    check: Callable[[argparse.Namespace], list[str]] = field(default=lambda args: [])


def demo_model(args: argparse.Namespace, run_dir: Path, check_stop: Callable[[], None]) -> str:
    """Build and warm-start the embedded model."""
    from data import build_prompts, load_problems, worked_response
    from splitgrpo.demo import make_demo_model

    problems = load_problems("arithmetic", "train")
    return str(
        make_demo_model(
            run_dir / "model", args.seed, problems, build_prompts, worked_response, check_stop
        )
    )


def smollm2_model(args: argparse.Namespace, run_dir: Path, check_stop: Callable[[], None]) -> str:
    """Bring SmolLM2 and warm-start it on at most 500 training rows; --model_path skips both."""
    if args.model_path:
        return str(args.model_path)
    from splitgrpo.smollm2 import bring_smollm2

    base = bring_smollm2(ROOT / "models" / "smollm2")
    flags = ["--model_path", str(base), "--out", str(run_dir / "model"), "--data", args.data]
    flags += ["--limit", "500", "--steps", str(args.warm_steps), "--seed", str(args.seed)]
    flags += ["--learning_rate", "1e-4"]
    flags += ["--max_new_tokens", "200", "--num_threads", str(os.cpu_count() or 1)]
    return str(warmstart.run(warmstart.build_parser().parse_args(flags), check_stop))


def qwen_model(args: argparse.Namespace, run_dir: Path, check_stop: Callable[[], None]) -> str:
    """The instruct model knows the task's form well enough to start from."""
    return args.model_path or "Qwen/Qwen2.5-1.5B-Instruct"


def qwen_missing(args: argparse.Namespace) -> list[str]:
    """What this machine lacks for the GPU recipe; nothing is downloaded to find out."""
    import torch
    from huggingface_hub import try_to_load_from_cache

    missing = []
    if torch.cuda.device_count() < 3:
        missing.append(
            f"3 CUDA GPUs (one samples, two learn); torch {torch.__version__} sees {torch.cuda.device_count()}"
        )
    model = qwen_model(args, Path(), lambda: None)
    cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if os.environ.get("HF_HUB_OFFLINE") and not cached and not Path(model).is_dir():
        missing.append(
            f"the model {model}: not a folder, not in the hub's cache, and HF_HUB_OFFLINE is set"
        )
    if torch.version.cuda is None:
        missing.append('a CUDA build of torch (README, "On a GPU", says which line to change)')
    return missing


def recipes() -> dict[str, Recipe]:
    """The three runs."""
    import torch

    from splitgrpo import demo, models

    gsm8k = {"data": "openai/gsm8k", "group_size": 4}
    return {
        "demo": Recipe(
            demo.RECIPE, demo_model,
            {"bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": demo.COMPLETIONS_PER_STEP,
             "gradient_accumulation_steps": 1},
            sampler_batch=demo.COMPLETIONS_PER_STEP,
        ),
        "smollm2": Recipe(
            gsm8k | {"max_new_tokens": 128, "max_prompt_tokens": 256, "learning_rate": 2e-4, "lora_rank": 16,
                     "lora_alpha": 32, "max_steps": 30},
            smollm2_model,
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16,
             "bf16": {"enabled": models.bfloat16_is_fast("cuda" if torch.cuda.is_available() else "cpu")}},
            sampler_batch=32,
        ),
        "qwen": Recipe(
            gsm8k | {"max_new_tokens": 256, "learning_rate": 1e-5, "max_steps": 500, "device": "cuda:2"},
            qwen_model, {}, sampler_batch=32, ranks=2, check=qwen_missing,
        ),
    }  # fmt: skip


def derive_ds_config(changes: dict[str, Any], path: Path) -> Path:
    """The root ds_config.json with a recipe's changes, written into the run folder."""
    config = json.loads((ROOT / "ds_config.json").read_text())
    write_json(path, config | changes)
    return path


def measure(model: str, adapter: Path | None, recipe: Recipe, flags: dict[str, Any],
            check_stop: Callable[[], None]) -> float:  # fmt: skip
    """Greedy accuracy on the first held-out problems."""
    argv = ["--model_path", model, "--data", str(flags["data"]), "--limit", str(recipe.eval_limit)]
    argv += [
        "--max_new_tokens",
        str(flags["max_new_tokens"]),
        "--num_threads",
        str(os.cpu_count() or 1),
    ]
    argv += ["--adapter", str(adapter)] if adapter else []
    report = evaluate.evaluate(evaluate.build_parser().parse_args(argv), check_stop)
    when = "after" if adapter else "before"
    log.info(
        "accuracy %s training: %.1f %% of %d held-out problems (format %.1f %%)",
        when, 100 * report.accuracy, report.num_problems, 100 * report.format,
    )  # fmt: skip
    return report.accuracy


def run_recipe(
    recipe: Recipe, args: argparse.Namespace, run_dir: Path, check_stop: Callable[[], None]
) -> int:
    """The whole run; returns an exit code, 0 only if it did finish."""
    started = time.monotonic()
    if missing := recipe.check(args):
        raise SettingsError("this machine lacks what the run needs:\n  - " + "\n  - ".join(missing))
    flags = recipe.flags | {"seed": args.seed, "port": args.port or free_port()}
    flags |= {"data": args.data} if args.data else {}
    flags |= {"max_steps": args.max_steps} if args.max_steps else {}
    args.data = flags["data"]
    run_dir.mkdir(parents=True, exist_ok=False)
    point_latest(run_dir)
    model = recipe.make_model(args, run_dir, check_stop)
    before = measure(model, None, recipe, flags, check_stop)
    ds_config = derive_ds_config(recipe.ds_changes, run_dir / "ds_config.json")
    flags |= {"model_path": model, "ds_config": str(ds_config), "batch_size": recipe.sampler_batch}
    train_started = time.monotonic()
    code = train(
        [f"--{name}={value}" for name, value in flags.items()],
        run_dir=run_dir, ranks=recipe.ranks, check_stop=check_stop,
    )  # fmt: skip
    if code != EXIT_OK:
        return code
    train_wall_s = time.monotonic() - train_started
    after = measure(model, run_dir / "adapter", recipe, flags, check_stop)
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "steps": flags["max_steps"],
        "train_wall_s": round(train_wall_s, 1),
        "total_wall_s": round(time.monotonic() - started, 1),
        "seed": args.seed,
    }
    write_json(run_dir / "summary.json", summary)
    log.info(
        "accuracy %.1f %% -> %.1f %% in %d steps (%.0f s of training, %.0f s in all)",
        100 * before, 100 * after, flags["max_steps"], train_wall_s, summary["total_wall_s"],
    )  # fmt: skip
    log.info("curves, metrics, adapter and summary: %s", run_dir)
    return EXIT_OK


def point_latest(run_dir: Path) -> None:
    """Make runs/latest a link to this run."""
    aside = run_dir.parent / f".latest.{os.getpid()}"
    aside.symlink_to(run_dir.name)
    aside.replace(run_dir.parent / "latest")


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(
        prog="run.sh", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recipe", choices=["demo", "smollm2", "qwen"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="folder under runs/ (default: RECIPE-DATE-TIME)")
    parser.add_argument("--runs_dir", default=str(ROOT / "runs"), help="where run folders go")
    parser.add_argument("--data", help="instead of the recipe's: a path or a hub name")
    parser.add_argument("--model_path", help="smollm2, qwen: start from this model as it is")
    parser.add_argument("--max_steps", type=positive_int, help="instead of the recipe's")
    parser.add_argument(
        "--warm_steps", type=positive_int, default=50, help="smollm2: supervised steps of 8 rows"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    return parser


def main() -> int:
    """Parse the flags and run; returns the exit code."""
    from splitgrpo.monitor import setup_logging

    setup_logging("run", verbose=False)
    args = build_parser().parse_args()
    name = args.name or time.strftime(f"{args.recipe}-%Y%m%d-%H%M%S")
    code = EXIT_OK

    def story(stop: StopFlag) -> None:
        nonlocal code
        run_dir = Path(args.runs_dir).absolute() / name
        if args.recipe == "demo" and (args.data or args.model_path):
            raise SettingsError(
                "the demo has its own model and data: --data and --model_path are not for it"
            )
        if run_dir.exists():
            raise SettingsError(f"{run_dir} exists already: give another --name")
        code = run_recipe(recipes()[args.recipe], args, run_dir, stop.raise_if_set)

    return run_main(story, log) or code


if __name__ == "__main__":
    end_process(main())
