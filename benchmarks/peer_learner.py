"""The learner's peer: what an ordinary careful script does with PEFT, in a process of its own.

Rows padded to one length, one forward pass of all, logits of completion tokens alone, a float32 log-softmax over them, the
clipped loss, backward, clipping, torch's AdamW. PEFT's own float32 adapters on a bfloat16 base.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402


class PeftScript:
    """Model, optimizer and rows of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        self.job, dtype = job, getattr(torch, job["dtype"])
        base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        lora = LoraConfig(
            r=job["lora_rank"], lora_alpha=job["lora_alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        )  # fmt: skip
        self.model = get_peft_model(base, lora).eval()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, weight_decay=0.0)
        rows = [p for p in job["prompts"] for _ in range(job["group_size"])]
        new = torch.randint(3, job["vocab_size"], (len(rows), job["new_tokens"]))
        longest = max(map(len, rows))
        prompts = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
        here = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        self.ids = torch.cat([prompts, new], dim=1)  # (B, L), prompts padded on the left
        self.mask = torch.cat([here, torch.ones_like(new)], dim=1)
        self.old = torch.empty(new.shape).uniform_(-11.0, -9.0)
        rewards = torch.randint(0, 3, (len(rows),)).float().view(-1, job["group_size"])
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        self.advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()

    def step(self) -> None:
        """One optimizer step over micro-batches."""
        import torch

        size, num_rows = self.job["micro_batch"], len(self.ids)
        for start in range(0, num_rows, size):
            part = slice(start, start + size)
            logprobs = self.logprobs(self.ids[part], self.mask[part])  # (B, C)
            ratio = (logprobs - self.old[part]).clamp(-20, 20).exp()
            advantages = self.advantages[part][:, None]
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-gain.mean(dim=1).sum() / num_rows).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def logprobs(self, ids: Any, mask: Any) -> Any:
        """(B, L) ids -> (B, C) log-probs of the completion tokens, by the whole float32 log-softmax."""
        import torch

        new = self.job["new_tokens"]
        # Without autocast the adapters' products are in float32, at half the speed.
        with torch.autocast("cpu", torch.bfloat16, enabled=self.job["dtype"] == "bfloat16"):
            out = self.model(
                input_ids=ids, attention_mask=mask, logits_to_keep=new + 1, use_cache=False
            )
        logits = out.logits[:, :-1].float()  # (B, C, V)
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -new:, None])[..., 0]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time `repeat` steps after one of warm-up; where job["memory"], what the first step takes above the weights."""
    script = PeftScript(job)
    level = common.reset_peak()
    script.step()
    above = common.status_mib("VmHWM") - level
    if job.get("memory"):
        return {"above_mib": above, "level_mib": level}
    seconds = sum(common.timed(script.step, job["repeat"]))
    tokens = script.old.numel() * job["repeat"]
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "above_mib": above}


if __name__ == "__main__":
    common.give(run(common.read_job()))
