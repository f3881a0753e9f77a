"""Greedy accuracy of a model, with or without an adapter, on held-out problems.

    python -m splitgrpo.evaluate --model_path M [--adapter runs/latest/adapter] --data D --limit 200

Correctness comes from `check_answer`, never from the reward.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from splitgrpo.process import StopFlag, begin_process, end_process, run_main

if __name__ == "__main__":
    begin_process()

import numpy as np
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from splitgrpo import models
from splitgrpo.adapters import CONFIG, MANIFEST, WEIGHTS, Manifest, adapter_parameters, check_keys
from splitgrpo.cli import positive_int
from splitgrpo.config import DataError, SettingsError, default_threads
from splitgrpo.engines.base import Engine, Sampling
from splitgrpo.engines.fast import open_engine
from splitgrpo.engines.hf import HFEngine
from splitgrpo.pointer import AdapterError, read_struct

log = logging.getLogger("evaluate")


class PromptLike(Protocol):
    """What evaluation reads of a prompt (data.Prompt has it)."""

    @property
    def token_ids(self) -> np.ndarray: ...
    @property
    def ground_truth(self) -> str: ...
    @property
    def response_prefix(self) -> str: ...


@dataclass(frozen=True)
class Report:
    """Shares of `num_problems` whose greedy completion is right, is in the asked format, and ended by itself."""

    accuracy: float
    format: float
    finished: float
    num_problems: int
    seconds: float


def greedy_report(
    engine: Engine,
    prompts: Sequence[PromptLike],
    check_answer: Callable[[str, str], bool],
    check_format: Callable[[str], bool],
    *,
    max_new_tokens: int,
    batch_size: int = 50,
    on_token: Callable[[], None] = lambda: None,
) -> Report:
    """Complete every prompt greedily and check each answer."""
    started = time.monotonic()
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens)
    correct, formatted, finished = [], [], []
    for at in range(0, len(prompts), batch_size):
        batch = prompts[at : at + batch_size]
        out = engine.generate([p.token_ids for p in batch], 1, sampling, seed=0, on_token=on_token)
        for prompt, (completion,) in zip(batch, out, strict=True):
            text = prompt.response_prefix + engine.decode(completion.token_ids)
            correct.append(check_answer(text, prompt.ground_truth))
            formatted.append(check_format(text))
            finished.append(completion.finished)
        log.info("evaluated %d of %d: %d right", len(correct), len(prompts), sum(correct))
    return Report(
        accuracy=float(np.mean(correct)),
        format=float(np.mean(formatted)),
        finished=float(np.mean(finished)),
        num_problems=len(prompts),
        seconds=time.monotonic() - started,
    )


def load_engine(
    model_path: str, adapter: str | None, dtype: str, num_threads: int, *, plain: bool = False
) -> HFEngine:
    """A Hugging Face engine on the GPU, or on the CPU where there is none. `adapter` is any PEFT folder."""
    models.use_threads(default_threads(num_threads))
    kind = models.DTYPES.get(dtype) or getattr(models.load_config(model_path), "dtype", None)
    device = models.pick_device("cuda:0", log)
    if dtype == "auto" and not models.bfloat16_is_fast(device):
        kind = torch.float32
    manifest = read_manifest(Path(adapter)) if adapter is not None else None
    # What was trained was an adapter to the base in that dtype; its digest is of those values.
    stored = models.DTYPES[manifest.base_dtype] if manifest else kind
    model: Any = models.load_base(model_path, stored or torch.float32)
    if manifest is not None:
        models.check_base(model, manifest, str(adapter))
    model = model.to(device, kind or torch.float32)
    if adapter is not None:
        model = open_adapter(model, Path(adapter))
    return open_engine(model, models.load_tokenizer(model_path), log, plain=plain)


def read_manifest(adapter: Path) -> Manifest | None:
    """What a folder that this project published says of itself; None for any other PEFT folder. Raises SettingsError."""
    if not (adapter / CONFIG).exists():
        raise SettingsError(f"--adapter {adapter}: looked for {CONFIG} there, found none")
    if not (adapter / MANIFEST).exists():
        return None
    try:
        manifest: Manifest = read_struct(adapter / MANIFEST, Manifest)
    except AdapterError as error:
        raise SettingsError(f"--adapter {adapter}: {error}") from error
    return manifest


def open_adapter(model: Any, adapter: Path) -> PeftModel:
    """Put a PEFT folder's LoRA on a model. Raises SettingsError unless each tensor has its place: PEFT would only warn."""
    try:
        peft = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
        check_keys(adapter_parameters(peft), load_file(adapter / WEIGHTS), str(adapter))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise SettingsError(f"--adapter {adapter}: cannot be loaded: {error}") from error
    return peft


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(prog="python -m splitgrpo.evaluate", allow_abbrev=False)
    parser.add_argument("--model_path", required=True, help="folder or hub name")
    parser.add_argument("--adapter", help="PEFT folder, such as RUN/adapter")
    parser.add_argument("--data", required=True, help="as for the workers; its test rows are used")
    parser.add_argument("--question_column", default="question")
    parser.add_argument("--answer_column", default="answer")
    parser.add_argument(
        "--limit", type=positive_int, default=200, help="first so many test problems"
    )
    parser.add_argument("--max_prompt_tokens", type=positive_int, default=512)
    parser.add_argument("--max_new_tokens", type=positive_int, default=256)
    parser.add_argument("--batch_size", type=positive_int, default=50)
    parser.add_argument("--plain", action="store_true", help="the plain engine, as for the sampler")
    parser.add_argument("--num_threads", type=int, default=0, help="0: half the cores")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        help="auto: the model's own, or float32 on a CPU where bfloat16 is slow",
    )
    parser.add_argument("--json", help="write the report to this file too")
    return parser


def evaluate(args: argparse.Namespace, on_token: Callable[[], None] = lambda: None) -> Report:
    """Evaluate as the flags of `build_parser` say. Raises SettingsError, DataError."""
    from data import build_prompts, load_problems
    from utils import check_answer, check_format

    columns = {"question_column": args.question_column, "answer_column": args.answer_column}
    problems = load_problems(args.data, "test", **columns)[: args.limit]
    engine = load_engine(
        args.model_path, args.adapter, args.dtype, args.num_threads, plain=args.plain
    )
    prompts, num_dropped = build_prompts(problems, engine.tokenizer, args.max_prompt_tokens)
    if num_dropped:
        log.warning(
            "%d prompts dropped as longer than %d tokens", num_dropped, args.max_prompt_tokens
        )
    if not prompts:
        raise DataError(f"{args.data}: no test problem fits in {args.max_prompt_tokens} tokens")
    return greedy_report(
        engine, prompts, check_answer, check_format,
        max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, on_token=on_token,
    )  # fmt: skip


def main() -> int:
    """Print one line with the result; returns the exit code."""
    from splitgrpo.monitor import setup_logging

    setup_logging("evaluate", verbose=False)
    args = build_parser().parse_args()

    def story(stop: StopFlag) -> None:
        report = evaluate(args, stop.raise_if_set)
        sys.stdout.write(
            f"accuracy {report.accuracy:.1%}, format {report.format:.1%} on {report.num_problems} problems "
            f"({report.seconds:.0f} s)\n"
        )
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(json.dumps(asdict(report)) + "\n")

    return run_main(story, log)


if __name__ == "__main__":
    end_process(main())
