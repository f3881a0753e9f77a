"""A decode loop on a Hugging Face model with a KV cache; the log-prob of each token is kept as it is drawn.

A prompt is computed once and its cache repeated for the G completions. Rows that have ended leave the batch.
Shapes: B rows, P prompt, L length so far, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from splitgrpo.adapters import Adapter, install_adapter
from splitgrpo.config import SettingsError
from splitgrpo.engines.base import Completion, Sampling
from splitgrpo.engines.draw import draw, uniforms
from splitgrpo.logprobs import base_model
from splitgrpo.packed import pack_rows
from splitgrpo.policy import PolicyModule

# Rows leave the batch once this share of it has ended: copying the cache for every single row costs more.
LEAVE_FRAC = 0.125


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and all of the model's generation_config."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids |= set(configured) if isinstance(configured, list | tuple) else {configured}
    return sorted(i for i in ids if i is not None)


class HFEngine:
    """Implements engines.base.Engine; `model` is a transformers model, or a PeftModel around one."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Keeps the model in eval mode; its own generation defaults (top_k, repetition penalty …) are never read.

        Raises SettingsError for a model that would take a KV cache under another name, and so leave ours unread.
        """
        if "cache" not in inspect.signature(base_model(model).forward).parameters:
            raise SettingsError(
                f"--engine hf: {type(base_model(model)).__name__} of this transformers release takes no `cache`, so that "
                "ours would go unread: install what requirements.txt pins (requirements-vllm.txt is for --engine vllm alone)"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.end_ids = end_token_ids(base_model(model), tokenizer)
        self._ends = torch.tensor(self.end_ids, device=self.device)
        self._policy = PolicyModule(model, 1.0, 0, 1.0)

    def install(self, adapter: Adapter) -> None:
        """Copy an adapter's tensors in place; no cache outlives a call of `generate`."""
        install_adapter(self.model, adapter)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        num_completions: int,
        sampling: Sampling,
        *,
        seed: int,
        on_token: Callable[[], None],
    ) -> list[list[Completion]]:
        """See Engine.generate."""
        num_rows = len(prompts) * num_completions
        points = uniforms(num_rows, sampling.max_new_tokens, seed).to(self.device)
        logits, cache, mask, positions = self._prefill(prompts, num_completions)
        ids = torch.zeros(num_rows, sampling.max_new_tokens, dtype=torch.int32)
        logprobs = torch.zeros(num_rows, sampling.max_new_tokens)
        lengths = np.full(num_rows, sampling.max_new_tokens)
        finished = np.zeros(num_rows, dtype=bool)
        rows = torch.arange(num_rows)  # rows still in the batch, by their number in the result
        for t in range(sampling.max_new_tokens):
            on_token()
            drawn, drawn_logprobs = draw(logits, sampling, points[rows, t])  # (B,)
            ids[rows, t], logprobs[rows, t] = drawn.int().cpu(), drawn_logprobs.cpu()
            ended = torch.isin(drawn, self._ends).cpu().numpy()
            new = rows.numpy()[ended & ~finished[rows.numpy()]]
            lengths[new], finished[new] = t + 1, True
            active = ~finished[rows.numpy()]
            if not active.any() or t + 1 == sampling.max_new_tokens:
                break
            if 1.0 - active.mean() >= LEAVE_FRAC:
                keep = torch.from_numpy(np.flatnonzero(active)).to(self.device)
                cache.batch_select_indices(keep)
                mask, positions, drawn = mask[keep], positions[keep], drawn[keep]
                rows = rows[keep.cpu()]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions + 1
            logits = self._forward(drawn[:, None], cache, mask, positions)
        flat = [
            Completion(ids[i, :n].numpy(), logprobs[i, :n].numpy(), bool(finished[i]))
            for i, n in enumerate(lengths)
        ]
        return [flat[i : i + num_completions] for i in range(0, num_rows, num_completions)]

    def _prefill(
        self, prompts: Sequence[np.ndarray], num_completions: int
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Compute each prompt once, padded on the left, then repeat for its completions: logits, cache, mask, positions."""
        longest = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[i, longest - len(prompt) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # (B, P)
        cache = DynamicCache()
        logits = self._forward(ids, cache, mask, positions)
        cache.batch_repeat_interleave(num_completions)
        repeat = lambda x: x.repeat_interleave(num_completions, dim=0)  # noqa: E731
        return repeat(logits), cache, repeat(mask), repeat(positions[:, -1:])

    def _forward(self, ids: Tensor, cache: Any, mask: Tensor, positions: Tensor) -> Tensor:
        """(B, 1 or P) ids -> (B, V) logits of the last position."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    @torch.inference_mode()
    def ref_logprobs(
        self, prompt: np.ndarray, completions: Sequence[Completion], sampling: Sampling
    ) -> list[np.ndarray]:
        """See Engine.ref_logprobs; one forward of all completions of a prompt."""
        p, longest = len(prompt), max(len(c.token_ids) for c in completions)
        ids = torch.zeros(len(completions), p + longest, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for i, c in enumerate(completions):
            n = p + len(c.token_ids)
            ids[i, :p] = torch.from_numpy(prompt.astype(np.int64))
            ids[i, p:n] = torch.from_numpy(c.token_ids.astype(np.int64))
            attention[i, :n] = 1
            mask[i, p:n] = True
        policy = self._policy
        policy.temperature, policy.top_k, policy.top_p = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        packing = None
        if (
            policy.decoder is not None
        ):  # filters or not: the rounding of another road would be this policy's KL
            lens = [len(c.token_ids) for c in completions]
            packing = pack_rows([prompt] * len(lens), lens, p + longest).to(self.device)
        with self.model.disable_adapter():
            out = policy(
                *(t.to(self.device) for t in (ids, attention, mask)), packing=packing
            ).cpu()
        return [out[i, p : p + len(c.token_ids)].numpy() for i, c in enumerate(completions)]
