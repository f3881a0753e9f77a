"""The embedded model: about 0.1M parameters, made here in seconds, so that the whole loop runs with no download.

A Qwen2 of two layers with a tokenizer of whole words learns the arithmetic set from a careless teacher, who reasons in
the tags (and is right) in 40 % of the rows and blurts a random number in the others. What is left for GRPO is the story
it became known for: to think first.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from splitgrpo.warmstart import Row, response_ids, save_model, warmstart

PAD, BOS, END, UNKNOWN = "<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
WORDS = ("has", "and", "gets", "more", "How", "many", "now", ".", "?", "+", "=", "Anna", "Ben", "Cleo", "Dan",
         "apples", "books", "coins", "stamps")  # fmt: skip
# The system prompt is left out: none of its words is in the vocabulary.
TEMPLATE = (
    BOS
    + "{% for m in messages %}{% if m.role == 'user' %} "
    + USER
    + " {{ m.content }}{% elif m.role == 'assistant' %} "
    + ASSISTANT
    + " {{ m.content }} "
    + END
    + "{% endif %}{% endfor %}{% if add_generation_prompt %} "
    + ASSISTANT
    + " {% endif %}"
)
CAREFUL_FRAC = 0.4
WARM_STEPS, WARM_BATCH, WARM_LEARNING_RATE = 350, 64, 5e-3

# Flags of both workers; a step is 16 prompts x 8 completions.
RECIPE = {
    "data": "arithmetic",
    "group_size": 8,
    "max_new_tokens": 16,
    "max_prompt_tokens": 48,
    "learning_rate": 1e-3,
    "lora_rank": 16,
    "lora_alpha": 32,
    "max_steps": 60,
}
COMPLETIONS_PER_STEP = 128


class ProblemLike(Protocol):
    """What the teacher reads of a problem (data.Problem has it)."""

    @property
    def question(self) -> str: ...
    @property
    def ground_truth(self) -> str: ...


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, number and tag."""
    words = [PAD, BOS, END, UNKNOWN, USER, ASSISTANT, *TAGS, *WORDS, *(str(n) for n in range(19))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("</?(think|answer)>"), "isolated"),
            pre_tokenizers.WhitespaceSplit(),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=END, unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A fresh model, float32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def careless_rows(
    prompts: Sequence[np.ndarray],
    problems: Sequence[ProblemLike],
    worked_response: Callable[[Any], str],
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
) -> list[Row]:
    """Five rows a problem by the careless teacher: two are reasoned and right, three are blurted."""
    rng = random.Random(seed)
    rows = []
    for prompt, problem in zip(prompts, problems, strict=True):
        for i in range(5):
            text = worked_response(problem)
            if i >= 5 * CAREFUL_FRAC:
                text = f"<answer>{rng.randint(2, 18)}</answer>"
            rows.append((prompt, response_ids(text, tokenizer)))
    return rows


def make_demo_model(
    out: Path,
    seed: int,
    problems: Sequence[ProblemLike],
    build_prompts: Callable[..., tuple[list[Any], int]],
    worked_response: Callable[[Any], str],
    check_stop: Callable[[], None] = lambda: None,
) -> Path:
    """Build the model, let the careless teacher warm-start it on training problems, and save it as a model folder."""
    tokenizer = build_tokenizer()
    prompts, _ = build_prompts(problems, tokenizer, RECIPE["max_prompt_tokens"])
    chosen = [problems[p.prompt_index] for p in prompts]
    rows = careless_rows([p.token_ids for p in prompts], chosen, worked_response, tokenizer, seed)
    model = build_model(tokenizer, seed)
    warmstart(
        model, rows, steps=WARM_STEPS, batch_size=WARM_BATCH, learning_rate=WARM_LEARNING_RATE,
        seed=seed, check_stop=check_stop,
    )  # fmt: skip
    save_model(model, tokenizer, out)
    return out
