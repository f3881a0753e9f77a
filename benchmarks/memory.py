"""What one learner step takes in memory above the weights, at a vocabulary of 151,936 and 8 x 512 completion tokens.

The model is a random Qwen2 of two narrow layers, so that the output layer is nearly all there is.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402
import learner  # noqa: E402

VOCAB, NEW_TOKENS, GROUP_SIZE, PROMPT_TOKENS = 151_936, 512, 8, 16
QUICK_VOCAB, QUICK_TOKENS = 16_384, 32


def wide_model(folder: Path, vocab: int) -> str:
    """A model folder: float32 weights of two layers of 64, a vocabulary of `vocab`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    out = folder / f"wide-{vocab}"
    if not out.exists():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(out)
    return str(out)


def rows(args: argparse.Namespace) -> list[common.Row]:
    """One row: MiB above what was resident when model and optimizer were made; less is better."""
    vocab, new_tokens = (QUICK_VOCAB, QUICK_TOKENS) if args.quick else (VOCAB, NEW_TOKENS)
    title = f"memory: learner step, vocabulary {vocab:,}, {GROUP_SIZE} x {new_tokens} tokens"
    job: dict[str, Any] = {
        "model": wide_model(args.work, vocab), "dtype": "bfloat16", "threads": 1, "memory": True,
        "group_size": GROUP_SIZE, "new_tokens": new_tokens, "vocab_size": vocab, "micro_batch": GROUP_SIZE,
        "prompts": [list(range(3, 3 + PROMPT_TOKENS))], "lora_rank": 16, "lora_alpha": 32, "repeat": 1,
    }  # fmt: skip
    common.say(title)
    sides = learner.sides_of(job, trl=False)
    sides = {k: v for k, v in sides.items() if not k.endswith(common.TUNED)}
    if args.quick:
        del sides["plain"]
    results, notes = common.interleave(sides, 1)
    return [
        common.row(
            title, "MiB", common.values_of(results, "above_mib"), peak_rss_mib=common.rss_of(results),
            note="; ".join(["bfloat16, one thread, one micro-batch; less is better, ratio below 1 is ours ahead", *notes]),
        )
    ]  # fmt: skip
