"""Tiny models and records that many tests use."""

import os
import signal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from splitgrpo.logprobs import use_float32_output
from splitgrpo.rollout import Group, Rollout

# A shell starts background jobs with Ctrl-C ignored, and programs inherit that; the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
VOCAB, END = 50, 1
torch.set_num_threads(1)


def tiny_model(seed: int = 0, **overrides) -> Qwen2ForCausalLM:
    """A random Qwen2 of two layers, float32, whose logits are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=END,
        bos_token_id=2,
        pad_token_id=0,
        **overrides,
    )
    model = Qwen2ForCausalLM(config).eval()
    use_float32_output(model)
    return model


class TinyTokenizer:
    """Just enough of a tokenizer for an engine."""

    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(i) for i in ids if i != END)


@pytest.fixture
def make_group():
    """Build a valid group of G rollouts over one random prompt."""

    def make(
        group_size: int = 4,
        seq: int = 0,
        version: int = 0,
        *,
        with_ref: bool = True,
        seed: int = 0,
        rewards: list[float] | None = None,
        **fields,
    ) -> Group:
        rng = np.random.default_rng(seed)
        prompt = rng.integers(3, VOCAB, size=5)
        rollouts = []
        for i in range(group_size):
            completion = rng.integers(3, VOCAB, size=int(rng.integers(1, 7)))
            ids = np.concatenate([prompt, completion]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            noise = rng.uniform(-3, -0.1, size=len(ids)).astype(np.float32) * mask
            reward = rewards[i] if rewards else float(rng.integers(0, 3))
            rollouts.append(
                Rollout(
                    token_ids=ids,
                    completion_mask=mask,
                    old_logprobs=noise,
                    ref_logprobs=noise * np.float32(0.9) if with_ref else None,
                    reward=reward,
                    correct=reward > 1,
                    finished=True,
                    reward_parts={"format": reward / 2},
                )
            )
        values = {
            "sampler_id": 0,
            "seq": seq,
            "prompt_index": 7,
            "epoch": 0,
            "policy_version": version,
            "lineage": 1,
            "adapter_digest": "ab" * 32,
            "temperature": 1.0,
            "run_id": "run",
        }
        return Group(rollouts=tuple(rollouts), **(values | fields))

    return make
