"""Supervised steps on worked answers in the tags, so that a model samples the format at all (a "cold start" in R1).

    python -m splitgrpo.warmstart --model_path M --out DIR --data D --limit 500

Trains all parameters, in float32 (matrix products in bfloat16 where the model is bfloat16), on train rows only; the loss
is on the response and its end token, never on the prompt. Saves an ordinary model folder.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from splitgrpo.process import StopFlag, begin_process, end_process, run_main

if __name__ == "__main__":
    begin_process()

import numpy as np
import torch

from splitgrpo import models
from splitgrpo.cli import positive_int
from splitgrpo.config import DataError, SettingsError, default_threads
from splitgrpo.policy import PolicyModule

log = logging.getLogger("warmstart")
SAY_EVERY_S = 10.0

Row = tuple[
    np.ndarray, np.ndarray
]  # (P,) int32 prompt ids, (C,) int32 response ids with the end token


def warmstart(
    model: Any,
    rows: Sequence[Row],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    check_stop: Callable[[], None] = lambda: None,
) -> float:
    """Train `model` in place on rows drawn epoch by epoch; returns the mean loss (nats a token) of the last tenth.

    AdamW with a linear warm-up over a tenth of the steps and a linear decay to zero.
    """
    dtype = next(model.parameters()).dtype
    mixed = dtype == torch.bfloat16 and models.bfloat16_is_fast(model.device)
    model.float().requires_grad_(True).train()
    policy = PolicyModule(model, 1.0, 0, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, (steps - s) / max(1, steps - warmup))
    )
    rng, order, losses = np.random.default_rng(seed), np.zeros(0, dtype=np.int64), []
    started = said = time.monotonic()
    for step in range(steps):
        check_stop()
        while len(order) < batch_size:
            order = np.concatenate([order, rng.permutation(len(rows))])
        batch, order = [rows[i] for i in order[:batch_size]], order[batch_size:]
        ids, attention, mask = pad(batch, next(model.parameters()).device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
            logprobs = policy(ids, attention, mask)
        loss = -logprobs.sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step == 0 or time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            log.info(
                "warm start step %d/%d, loss %.3f (%.0f s)",
                step + 1,
                steps,
                losses[-1],
                said - started,
            )
    model.to(dtype).requires_grad_(False).eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def pad(
    batch: Sequence[Row], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, L) int64 ids and attention mask, (B, L) bool mask of the responses; padded on the right."""
    longest = max(len(p) + len(r) for p, r in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, (prompt, response) in enumerate(batch):
        n = len(prompt) + len(response)
        ids[i, :n] = torch.from_numpy(np.concatenate([prompt, response]))
        attention[i, :n], mask[i, len(prompt) : n] = 1, True
    return ids.to(device), attention.to(device), mask.to(device)


def response_ids(text: str, tokenizer: Any) -> np.ndarray:
    """(C,) int32 ids of a response, closed by the token that ends a completion in the sampler."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a model folder that is whole or not there."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(out)


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(prog="python -m splitgrpo.warmstart", allow_abbrev=False)
    parser.add_argument("--model_path", required=True, help="folder or hub name")
    parser.add_argument("--out", required=True, help="folder to write; must not exist")
    parser.add_argument("--data", required=True, help="as for the workers; its train rows are used")
    parser.add_argument("--question_column", default="question")
    parser.add_argument("--answer_column", default="answer")
    parser.add_argument(
        "--limit", type=positive_int, default=500, help="first so many training rows"
    )
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--batch_size", type=positive_int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_prompt_tokens", type=positive_int, default=512)
    parser.add_argument(
        "--max_new_tokens", type=positive_int, default=256, help="longer responses are left out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_threads", type=int, default=0, help="0: half the cores")
    return parser


def run(args: argparse.Namespace, check_stop: Callable[[], None] = lambda: None) -> Path:
    """Do what the flags of `build_parser` say; returns the folder. Raises SettingsError, DataError."""
    from data import build_prompts, load_problems, worked_response

    out = Path(args.out)
    if out.exists():
        raise SettingsError(f"--out {out} exists already: remove it or give another folder")
    columns = {"question_column": args.question_column, "answer_column": args.answer_column}
    problems = load_problems(args.data, "train", **columns)[: args.limit]
    models.use_threads(default_threads(args.num_threads))
    tokenizer = models.load_tokenizer(args.model_path)
    prompts, _ = build_prompts(problems, tokenizer, args.max_prompt_tokens)
    rows = []
    for prompt in prompts:
        text = worked_response(problems[prompt.prompt_index]).removeprefix(prompt.response_prefix)
        response = response_ids(text, tokenizer)
        if len(response) <= args.max_new_tokens:
            rows.append((prompt.token_ids, response))
    if not rows:
        raise DataError(f"{args.data}: no training row fits the token limits")
    kind = getattr(models.load_config(args.model_path), "dtype", None) or torch.float32
    model = models.load_base(args.model_path, kind, models.pick_device("cuda:0", log))
    log.info(
        "warm start: %d of %d rows fit, %d steps of %d",
        len(rows),
        len(problems),
        args.steps,
        args.batch_size,
    )
    loss = warmstart(
        model, rows, steps=args.steps, batch_size=args.batch_size,
        learning_rate=args.learning_rate, seed=args.seed, check_stop=check_stop,
    )  # fmt: skip
    save_model(model, tokenizer, out)
    log.info("warm start done, loss %.3f nats a token: %s", loss, out)
    return out


def main() -> int:
    """Parse the flags and run; returns the exit code."""
    from splitgrpo.monitor import setup_logging

    setup_logging("warmstart", verbose=False)
    args = build_parser().parse_args()

    def story(stop: StopFlag) -> None:
        run(args, stop.raise_if_set)

    return run_main(story, log)


if __name__ == "__main__":
    end_process(main())
