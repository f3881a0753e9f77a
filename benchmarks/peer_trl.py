"""TRL's GRPOTrainer on the same model, prompts, reward and sizes, in its own environment: generation, scoring and update.

side "trl": a job's loop; every step's seconds, completions and tokens, and how long its generation and scoring took.
side "trl step": the completions are given, not generated: what is left is its optimizer step.
bfloat16 base under autocast and no gradient checkpointing, both faster here than the trainer's defaults; float32 adapters as
PEFT makes them; micro-batches of 8.
"""

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import common  # noqa: E402

FORMAT = re.compile(r"\s*<think>.+?</think>\s*<answer>.+?</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>\s*(-?[0-9][0-9,.]*)\s*</answer>")


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.25 for the form and 1.0 for the number, as the project's own reward_function."""
    out = []
    for text, gold in zip(completions, answer, strict=True):
        found = ANSWER.findall(text)
        right = bool(found) and found[-1].replace(",", "").rstrip(".") == gold
        out.append(1.25 * bool(FORMAT.fullmatch(text)) + 1.0 * right)
    return out


class Clock:
    """Times of one training run: `steps` one entry an optimizer step, `scored_s` the part of it before any gradient."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.started = time.perf_counter()
        self.scored_s = self.tokens = self.completions = 0.0

    def end_step(self) -> None:
        """An optimizer step was taken."""
        now = time.perf_counter()
        self.steps.append(
            {"step_s": now - self.started, "scored_s": self.scored_s, "tokens": self.tokens,
             "completions": self.completions}
        )  # fmt: skip
        self.started, self.scored_s, self.tokens, self.completions = now, 0.0, 0.0, 0.0


def make_trainer(job: dict[str, Any], clock: Clock) -> Any:
    """A trainer that keeps time."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    size, rows = job["micro_batch"], job["completions"]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """The two private methods are those of trl 1.16.0, which peers.sh pins."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            before = time.perf_counter()
            out = super()._generate_and_score_completions(inputs)
            clock.scored_s += time.perf_counter() - before
            clock.tokens += float(out["completion_mask"].sum())
            clock.completions += len(out["completion_mask"])
            return out

        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
            if job["side"] == "trl":
                return super()._generate_single_turn(prompt_ids, *rest, **more)
            shape = (len(prompt_ids), job["new_tokens"])
            return torch.randint(3, job["vocab_size"], shape).tolist(), None

    class EndOfStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **more: Any) -> None:
            clock.end_step()

        def on_train_begin(self, *args: Any, **more: Any) -> None:
            clock.started = time.perf_counter()

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=size, gradient_accumulation_steps=rows // size,
        num_generations=job["group_size"], max_completion_length=job["new_tokens"], max_steps=job["max_steps"],
        learning_rate=1e-5, beta=job["kl_coef"], temperature=1.0, bf16=job["dtype"] == "bfloat16",
        use_cpu=True, gradient_checkpointing=False, model_init_kwargs={"dtype": job["dtype"]}, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    lora = LoraConfig(r=job["lora_rank"], lora_alpha=job["lora_alpha"], target_modules="all-linear",
                      task_type="CAUSAL_LM")  # fmt: skip
    return Timed(
        model=job["model"], reward_funcs=reward, args=config, peft_config=lora, callbacks=[EndOfStep()],
        train_dataset=Dataset.from_list(job["rows"]), processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )  # fmt: skip


def step_job(job: dict[str, Any]) -> dict[str, Any]:
    """A learner topic's job as one of this file's: the prompts as text, as many steps as are timed and one before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [{"prompt": tokenizer.decode(p), "answer": "0"} for p in job["prompts"]]
    return job | {"rows": rows, "completions": len(rows) * job["group_size"], "kl_coef": 0.0,
                  "max_steps": 1 + job["repeat"]}  # fmt: skip


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train; the first step is warm-up and left out."""
    clock = Clock()
    make_trainer(job if job["side"] == "trl" else step_job(job), clock).train()
    if job["side"] == "trl":
        return {"steps": clock.steps[1:]}
    timed = clock.steps[1:]
    seconds = sum(s["step_s"] - s["scored_s"] for s in timed)
    return {"tokens_per_s": sum(s["tokens"] for s in timed) / seconds, "seconds": seconds}


if __name__ == "__main__":
    common.give(run(common.read_job()))
