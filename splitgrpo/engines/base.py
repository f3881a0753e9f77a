"""What the sampler asks of an inference engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from splitgrpo.adapters import Adapter


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 means greedy; a model's own generation defaults are never used."""

    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled completion.

    token_ids  (C,) int32, the end token included
    logprobs   (C,) float32, nats, of the distribution each token was drawn from, kept as it was drawn
    finished   False when cut by max_new_tokens
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finished: bool


class Engine(Protocol):
    """A base model with one LoRA adapter that can be exchanged between two calls."""

    def install(self, adapter: Adapter) -> None:
        """Use another adapter from now on. Raises AdapterError and keeps the old one."""

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        num_completions: int,
        sampling: Sampling,
        *,
        seed: int,
        on_token: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample `num_completions` for each prompt of (P,) int32 ids; the same seed draws the same tokens.

        `on_token` is called once a decoding step and may raise to give up.
        """

    def ref_logprobs(
        self, prompt: np.ndarray, completions: Sequence[Completion], sampling: Sampling
    ) -> list[np.ndarray]:
        """(C,) float32 nats of each completion under the base model, the adapter off."""

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of a completion without special tokens."""
