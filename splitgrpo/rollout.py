"""The record: one prompt and its sampled completions, unpadded and frozen. Imports no torch.

Every per-token stream of a Rollout has length L = prompt + completion, and position t speaks of token t. So nothing
downstream slices by prompt length or shifts: `old_logprobs[t]` is the log-prob of drawing `token_ids[t]` given the
tokens before it.

    prompt "2+3=" (ids 7 8 9 6), completion "5" EOS (ids 5 1), sampled with probabilities 0.5 and 0.9:
    token_ids        7     8     9     6     5      1
    completion_mask  F     F     F     F     T      T
    old_logprobs     0.0   0.0   0.0   0.0   -0.69  -0.11
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Arrays of one value a token.
STREAMS = {"token_ids": np.dtype(np.int32), "completion_mask": np.dtype(np.bool_),
           "old_logprobs": np.dtype(np.float32), "ref_logprobs": np.dtype(np.float32)}  # fmt: skip


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

    @functools.cached_property
    def streams(self) -> dict[str, np.ndarray]:
        """The arrays of all rollouts, one behind the other, {name: (sum of L,)}; no ref_logprobs if kl_coef = 0.

        A group from the wire was cut from them and has them already. Raises RolloutError where some do not fit.
        """
        return join_streams(self.rollouts)


def join_streams(rs: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Join the arrays of rollouts, {name: (sum of L,)}. Raises RolloutError for another dtype or length."""
    without = sum(r.ref_logprobs is None for r in rs)
    if 0 < without < len(rs):
        raise RolloutError(f"ref_logprobs: missing in {without} of {len(rs)} rollouts")
    lengths = [len(r.token_ids) for r in rs]
    return {
        name: _join(name, [getattr(r, name) for r in rs], lengths)
        for name in STREAMS
        if not (without and name == "ref_logprobs")
    }


def _join(name: str, arrays: list[np.ndarray], lengths: list[int]) -> np.ndarray:
    dtype, found = STREAMS[name], [len(a) for a in arrays]
    if found != lengths:
        raise RolloutError(f"{name}: lengths {found}, expected {lengths}")
    try:
        joined = np.concatenate(arrays, dtype=dtype, casting="no")
    except (TypeError, ValueError) as error:  # ValueError: of different dimensions
        dtypes = sorted({str(a.dtype) for a in arrays})
        raise RolloutError(f"{name}: dtype {dtypes}, expected {dtype} ({error})") from error
    if joined.ndim != 1:
        raise RolloutError(f"{name}: {joined.ndim} dimensions, expected 1")
    return joined


def check_group(
    g: Group, *, group_size: int, vocab_size: int, max_len: int, want_ref: bool
) -> None:
    """Check every length, dtype and range of a group before it is used; its rollouts are looked at joined, for speed.

    Raises RolloutError naming the field and the value.
    """
    rs = g.rollouts
    if len(rs) != group_size:
        raise RolloutError(f"{len(rs)} rollouts, expected group_size {group_size}")
    if not 0 < g.temperature <= 10:
        raise RolloutError(f"temperature: {g.temperature}, allowed is above 0 to 10")
    lengths = [len(r.token_ids) for r in rs]
    if not 2 <= min(lengths) <= max(lengths) <= max_len:
        raise RolloutError(f"token_ids: {lengths} tokens, allowed are 2 to {max_len}")
    streams = g.streams
    ids, mask = streams["token_ids"], streams["completion_mask"]
    if ids.view(np.uint32).max() >= vocab_size:  # an id below 0 is above all others as unsigned
        raise RolloutError(
            f"token_ids: {ids.min()}..{ids.max()} outside the vocabulary 0..{vocab_size - 1}"
        )
    prompt_len = _check_masks(mask, lengths)
    if len({r.token_ids[:prompt_len].tobytes() for r in rs}) != 1:
        raise RolloutError("the rollouts have different prompts")
    if want_ref and "ref_logprobs" not in streams:
        raise RolloutError("ref_logprobs: missing, although kl_coef > 0 needs them")
    for name in ("old_logprobs", "ref_logprobs"):
        if name in streams:
            _check_logprobs(name, streams[name], mask)
    for r in rs:
        if r.reward_parts.keys() != rs[0].reward_parts.keys():
            raise RolloutError("the rollouts have different reward parts")
        for value in (r.reward, *r.reward_parts.values()):
            if not -1e38 < value < 1e38:
                raise RolloutError(
                    f"reward {r.reward}, parts {r.reward_parts}: {value} is not finite in float32"
                )


def _check_masks(mask: np.ndarray, lengths: list[int]) -> int:
    """That each rollout is a prompt, then a completion; returns the tokens of the prompt, the same for all.

    `mask` is all of them joined: it begins False, then rises within each rollout and falls where the next one begins.
    """
    ends = list(itertools.accumulate(lengths))
    starts = [0, *ends[:-1]]
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    rises, falls = edges[::2], edges[1::2]
    if mask[0] or falls != starts[1:] or len(rises) != len(lengths):
        for start, end in zip(starts, ends, strict=True):
            num = np.count_nonzero(~mask[start:end])
            if num in (0, end - start):
                raise RolloutError(f"completion_mask: {num} prompt tokens of {end - start}")
        raise RolloutError("completion_mask: the completion is not one stretch at the end")
    prompt_lens = [rise - start for rise, start in zip(rises, starts, strict=True)]
    if len(set(prompt_lens)) != 1:
        raise RolloutError(f"the rollouts have different prompts, of {prompt_lens} tokens")
    return prompt_lens[0]


def _check_logprobs(name: str, values: np.ndarray, mask: np.ndarray) -> None:
    """That (L,) float32 log-probs can be trained on. Written so that a NaN fails each comparison."""
    low, high = float(values.min()), float(values.max())
    if not (low > -np.inf and high < np.inf):
        raise RolloutError(f"{name}: not finite")
    if high > 1e-4:  # at most 0; float32 log-softmax may exceed it by rounding
        raise RolloutError(f"{name}: {high} is above 0")
    if np.greater(values != 0, mask).any():
        raise RolloutError(f"{name}: not 0.0 on the prompt")
