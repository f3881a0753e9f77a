"""The record: one prompt and its sampled completions, unpadded and frozen. Imports no torch.

Every per-token stream of a Rollout has length L = prompt + completion, and position t speaks of token t. So nothing
downstream slices by prompt length or shifts: `old_logprobs[t]` is the log-prob of drawing `token_ids[t]` given the
tokens before it.

    prompt "2+3=" (ids 7 8 9 6), completion "5" EOS (ids 5 1), sampled with probabilities 0.5 and 0.9:
    token_ids        7     8     9     6     5      1
    completion_mask  F     F     F     F     T      T
    old_logprobs     0.0   0.0   0.0   0.0   -0.69  -0.11
"""

from dataclasses import dataclass, field

import numpy as np


class RolloutError(ValueError):
    """A record that breaks its own contract."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One prompt and one sampled completion.

    token_ids        (L,) int32, prompt then completion, EOS included; never re-tokenised
    completion_mask  (L,) bool, True where the policy sampled the token; made from lengths, never from `!= pad_id`
    old_logprobs     (L,) float32, nats, of the distribution really sampled from; 0.0 on the prompt
    ref_logprobs     (L,) float32, nats, of the base model with the adapter off at the same temperature; None if kl_coef = 0
    reward           as `reward_function` returned it
    reward_parts     the other keys that `reward_function` returned
    correct          `check_answer` on the completion, independent of the reward
    finished         False when cut by max_new_tokens
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray | None
    reward: float
    correct: bool
    finished: bool
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def completion_len(self) -> int:
        """Sampled tokens, EOS included."""
        return int(self.completion_mask.sum())


@dataclass(frozen=True, eq=False)
class Group:
    """G rollouts of one draw of one prompt, all sampled by one adapter; the unit that is sent, trained or dropped whole.

    sampler_id, seq  who sent it and its place in that sampler's stream, counted from 0 without gaps
    prompt_index     row of the training set; `epoch` counts passes over it
    policy_version   optimizer steps of the adapter that sampled it; `lineage` counts learner starts
    adapter_digest   sha256 of the adapter file really loaded
    temperature      at which both sides take log-probs
    run_id           of the run whose adapter was loaded
    """

    rollouts: tuple[Rollout, ...]
    sampler_id: int
    seq: int
    prompt_index: int
    epoch: int
    policy_version: int
    lineage: int
    adapter_digest: str
    temperature: float
    run_id: str

    @property
    def group_id(self) -> str:
        """Unique per draw, not per prompt text."""
        return f"{self.sampler_id}:{self.seq}"

    @property
    def rewards(self) -> np.ndarray:
        """(G,) float64, raw."""
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)


def check_rollout(r: Rollout, *, vocab_size: int, max_len: int, want_ref: bool) -> None:
    """Check every length, dtype and range of one rollout before it is used.

    Raises RolloutError naming the field and the value.
    """
    length = len(r.token_ids)
    _check(2 <= length <= max_len, f"token_ids: {length} tokens, allowed are 2 to {max_len}")
    streams = {"token_ids": (r.token_ids, np.int32), "completion_mask": (r.completion_mask, np.bool_),
               "old_logprobs": (r.old_logprobs, np.float32)}  # fmt: skip
    if want_ref:
        _check(r.ref_logprobs is not None, "ref_logprobs: missing, although kl_coef > 0 needs them")
    if r.ref_logprobs is not None:
        streams["ref_logprobs"] = (r.ref_logprobs, np.float32)
    for name, (array, dtype) in streams.items():
        _check(array.dtype == dtype, f"{name}: dtype {array.dtype}, expected {np.dtype(dtype)}")
        _check(array.shape == (length,), f"{name}: shape {array.shape}, expected ({length},)")
    low, high = int(r.token_ids.min()), int(r.token_ids.max())
    _check(
        low >= 0 and high < vocab_size,
        f"token_ids: {low}..{high} outside the vocabulary 0..{vocab_size - 1}",
    )
    prompt_len = length - r.completion_len
    _check(0 < prompt_len < length, f"completion_mask: {prompt_len} prompt tokens of {length}")
    _check(
        bool(r.completion_mask[prompt_len:].all()),
        "completion_mask: the completion is not one stretch at the end",
    )
    for name in ("old_logprobs", "ref_logprobs"):
        if name in streams:
            values = streams[name][0]
            _check(bool(np.isfinite(values).all()), f"{name}: not finite")
            # A log-prob is at most 0; float32 log-softmax may exceed it by rounding.
            _check(float(values.max()) <= 1e-4, f"{name}: {float(values.max())} is above 0")
            _check(not values[:prompt_len].any(), f"{name}: not 0.0 on the prompt")
    for name, value in {"reward": r.reward, **r.reward_parts}.items():
        _check(abs(value) < 1e38, f"reward part {name}: {value} is not finite in float32")


def check_group(
    g: Group, *, group_size: int, vocab_size: int, max_len: int, want_ref: bool
) -> None:
    """Check a whole group; raises RolloutError."""
    _check(
        len(g.rollouts) == group_size,
        f"{len(g.rollouts)} rollouts, expected group_size {group_size}",
    )
    _check(0 < g.temperature <= 10, f"temperature: {g.temperature}, allowed is above 0 to 10")
    for r in g.rollouts:
        check_rollout(r, vocab_size=vocab_size, max_len=max_len, want_ref=want_ref)
    first = g.rollouts[0]
    prompt = first.token_ids[~first.completion_mask]
    for r in g.rollouts[1:]:
        _check(
            np.array_equal(r.token_ids[~r.completion_mask], prompt),
            "the rollouts have different prompts",
        )
    keys = {frozenset(r.reward_parts) for r in g.rollouts}
    _check(len(keys) == 1, "the rollouts have different reward parts")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RolloutError(message)
