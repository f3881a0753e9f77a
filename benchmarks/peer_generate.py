"""The sampler's peers: transformers' generate, and vLLM, on prompts given as token ids; each in a process of its own.

Run by benchmarks/sampler.py, transformers with the project's Python, vLLM with its own. Neither has an adapter or keeps
log-probs, in their favour; where the job names an adapter, vLLM does what our engine does: that adapter, and log-probs.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import common  # noqa: E402


def with_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """generate() on the prompts, each repeated for its completions, padded on the left; fresh sampling, no filter."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model = model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None  # else it is taken where the call names none

    def run(prompts: list[list[int]], new_tokens: int) -> int:
        rows = [p for p in prompts for _ in range(job["group_size"])]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        how = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
        return int(out[:, longest:].numel())

    return speed(run, job)


def with_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's offline engine in this one process, prefix caching on, so that a group's prompt is computed once."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # else its peak memory is another process's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    rows = len(job["prompts"]) * job["group_size"]
    longest = max(map(len, [*job["prompts"], *job["warm"]])) + job["new_tokens"]
    adapter, lora = job.get("adapter"), None
    more: dict[str, Any] = {}
    if adapter:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest("benchmark", 1, adapter)
        more = {
            "enable_lora": True,
            "max_lora_rank": job["lora_rank"],
            "max_loras": 1,
            "logprobs_mode": "processed_logprobs",
        }
    llm = LLM(
        model=job["model"], skip_tokenizer_init=True, dtype=job["dtype"], max_num_seqs=rows,
        max_model_len=min(longest + 16, job["max_len"]), enforce_eager=job["enforce_eager"],
        enable_prefix_caching=True, block_size=32,  # its default of 128 on a CPU would share no short prompt
        disable_log_stats=True, seed=0, **more,
    )  # fmt: skip

    def run(prompts: list[list[int]], new_tokens: int) -> int:
        how = SamplingParams(
            n=job["group_size"], temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True,
            min_tokens=0, max_tokens=new_tokens, detokenize=False, logprobs=0 if adapter else None,
        )  # fmt: skip
        asked = [{"prompt_token_ids": p} for p in prompts]
        out = llm.generate(asked, how, use_tqdm=False, lora_request=lora)
        return sum(len(c.token_ids) for o in out for c in o.outputs)

    return speed(run, job)


def speed(run: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Warm up on other prompts, then time `repeat` whole calls; tokens/s over all of them."""
    run(job["warm"], min(16, job["new_tokens"]))
    prompts = job["prompts"]
    seconds, tokens, rng = 0.0, 0, random.Random(0)
    for i in range(job["repeat"]):
        if i:  # or a prefix cache would hold the whole prompts of the round before
            prompts = [[rng.choice(p), *p[1:]] for p in prompts]
        seconds += common.timed(lambda p=prompts: counts.append(run(p, job["new_tokens"])), 1)[0]
        tokens += counts.pop()
    wanted = len(prompts) * job["group_size"] * job["new_tokens"] * job["repeat"]
    if tokens != wanted:
        raise SystemExit(f"{tokens} tokens came, {wanted} were asked for: a completion ended early")
    return {"tokens_per_s": tokens / seconds, "seconds": seconds}


counts: list[int] = []
SIDES = {"transformers": with_transformers, "vllm": with_vllm}

if __name__ == "__main__":
    given = common.read_job()
    common.give(SIDES[given["side"]](given))
