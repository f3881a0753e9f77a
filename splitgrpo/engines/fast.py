"""The same engine on decoder.py: fused weights, a cache of fixed size, a group's prompt held once.

Draws the same tokens as HFEngine from the same seed, up to rounding; that one is kept behind --plain.
Shapes: B rows in the batch, n prompts in it, G completions of each, P longest prompt, T max_new_tokens; A, K, D as in
decoder.py; V vocabulary, U part of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitgrpo.decoder import Decoder, why_unsupported
from splitgrpo.engines.base import Completion, Sampling
from splitgrpo.engines.draw import draw_in_parts, uniforms
from splitgrpo.engines.hf import LEAVE_FRAC, HFEngine
from splitgrpo.logprobs import base_model
from splitgrpo.packed import PackedAttention, pack_rows
from splitgrpo.vocab import VocabLogprobs, exact_bfloat16_products, wide_product


class Fused:
    """Several linear layers on one input as one product, and their LoRA A matrices as another.

    The modules' own parameters become views of the fused ones: what is copied into them is at once in use here.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        bases = [getattr(m, "base_layer", m) for m in modules]
        lora = [m for m in modules if m.__class__ is not nn.Linear]
        self.switch = lora[0] if lora else None
        self.sizes = [b.weight.shape[0] for b in bases]
        downs = [m.lora_A["default"] for m in lora]
        self.weight = weight = torch.cat([b.weight.data for b in bases])
        self.down = torch.cat([d.weight.data for d in downs]) if lora else weight[:0]
        self.bias = None
        if any(b.bias is not None for b in bases):
            parts = [b.weight.new_zeros(n) if b.bias is None else b.bias.data
                     for b, n in zip(bases, self.sizes, strict=True)]  # fmt: skip
            self.bias = torch.cat(parts)
        self.up = weight.new_zeros(len(weight), len(self.down))  # (O, R)
        self.scale, self.scales = 1.0, None
        if len(found := {float(m.scaling["default"]) for m in lora}) == 1:
            (self.scale,) = found
        elif lora:  # an alpha_pattern: (R,), a number for each row of A
            each = [torch.full((len(d.weight),), m.scaling["default"])
                    for m, d in zip(lora, downs, strict=True)]  # fmt: skip
            self.scales = torch.cat(each).to(weight)
        row, column = 0, 0  # B's other columns stay 0: they are of other layers
        for module, base in zip(modules, bases, strict=True):
            n = base.weight.shape[0]
            base.weight.data = weight[row : row + n]
            if module is not base:
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                r = a.shape[0]
                view = self.up[row : row + n, column : column + r]
                view.copy_(b.data)
                a.data, b.data = self.down[column : column + r], view
                column += r
            row += n

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, H) -> (B, O) of each layer."""
        out = functional.linear(x, self.weight, self.bias)
        if self.switch is not None and not self.switch.disable_adapters:
            low = functional.linear(x, self.down)
            low = low if self.scales is None else low * self.scales
            out.addmm_(low, self.up.t(), alpha=self.scale)
        return out.split(self.sizes, dim=-1)

    def single(self, x: Tensor) -> Tensor:
        """The output where there is but one layer."""
        return self(x)[0]


@dataclass
class Cache:
    """Keys and values of the prompts (n * K, P, D), and of what the rows have drawn so far (B * K, T, D), a layer each.

    numbers (n,) are the prompts held; padding (n, P) bool marks what a shorter one lacks, or is None; slot (B,) is a row's
    place among the n * G, None while all are there.
    """

    prompt: list[tuple[Tensor, Tensor]]
    drawn: list[tuple[Tensor, Tensor]]
    padding: Tensor | None
    slot: Tensor | None
    numbers: np.ndarray
    group_size: int
    num_kv_heads: int

    def keep(self, places: Tensor, rows: np.ndarray) -> None:
        """Hold only those at `places` (B',) in the batch from now on, whose numbers of all n * G are `rows` (B',)."""

        def pick(pair: tuple[Tensor, Tensor], which: Tensor) -> tuple[Tensor, Tensor]:
            k, v = (t.unflatten(0, (-1, self.num_kv_heads))[which].flatten(0, 1) for t in pair)
            return k, v

        self.drawn = [pick(pair, places) for pair in self.drawn]
        left, which = np.unique(rows // self.group_size, return_inverse=True)
        if len(left) < len(self.numbers):
            prompts = torch.from_numpy(np.searchsorted(self.numbers, left)).to(places.device)
            self.prompt = [pick(pair, prompts) for pair in self.prompt]
            self.padding = None if self.padding is None else self.padding[prompts]
            self.numbers = left
        slot = which * self.group_size + rows % self.group_size
        self.slot = torch.from_numpy(slot).to(places.device)


class FastEngine(HFEngine):
    """Implements engines.base.Engine for the models that decoder.py knows."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Raises ValueError for other models. The model's weights become views of fused ones."""
        super().__init__(model, tokenizer)
        self.decoder = Decoder(model)
        for layer in self.decoder.layers:
            attention, mlp = layer.module.self_attn, layer.module.mlp
            layer.qkv = Fused([attention.q_proj, attention.k_proj, attention.v_proj])
            layer.gate_up = Fused([mlp.gate_proj, mlp.up_proj])
            layer.out = Fused([attention.o_proj]).single
            layer.down = Fused([mlp.down_proj]).single
        self.head = base_model(model).get_output_embeddings()
        # Float32, so that neither scores nor probabilities are rounded.
        self._held = torch.float32 if self.device.type == "cpu" else self.head.weight.dtype
        # Float32 copies of bfloat16 numbers: the product is exact, and made anew for every token it would cost more.
        self._wide = self.head.weight.data
        if self.device.type == "cpu":
            self._wide = self._wide.float()

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
        num_rows, limit = len(prompts) * num_completions, sampling.max_new_tokens
        points = uniforms(num_rows, limit, seed).to(self.device)
        last, cache = self._start(prompts, num_completions, limit)
        ids = torch.zeros(num_rows, limit, dtype=torch.int64, device=self.device)
        logprobs = torch.zeros(num_rows, limit, device=self.device)
        lengths, finished = np.full(num_rows, limit), np.zeros(num_rows, dtype=bool)
        rows = np.arange(num_rows)  # those still in the batch, by their number in the result
        at = torch.from_numpy(rows).to(self.device)
        positions = torch.tensor([len(p) for p in prompts], device=self.device)
        positions = positions.repeat_interleave(num_completions)
        for t in range(limit):
            on_token()
            drawn, drawn_logprobs = draw_in_parts(self._logits(last), sampling, points[at, t])
            ids[at, t], logprobs[at, t] = drawn, drawn_logprobs
            ended = np.isin(drawn.cpu().numpy(), self.end_ids) & ~finished[rows]
            lengths[rows[ended]], finished[rows[ended]] = t + 1, True
            active = ~finished[rows]
            if not active.any() or t + 1 == limit:
                break
            if 1.0 - active.mean() >= LEAVE_FRAC:
                keep = torch.from_numpy(np.flatnonzero(active)).to(self.device)
                rows, drawn, positions = rows[active], drawn[keep], positions[keep]
                cache.keep(keep, rows)
                at = torch.from_numpy(rows).to(self.device)
            last = self.decoder.hidden(drawn, positions, lambda *a, t=t: self._attend(cache, t, *a))
            positions = positions + 1
        flat_ids, flat_logprobs = ids.int().cpu().numpy(), logprobs.cpu().numpy()
        flat = [
            Completion(flat_ids[i, :n], flat_logprobs[i, :n], bool(finished[i]))
            for i, n in enumerate(lengths)
        ]
        return [flat[i : i + num_completions] for i in range(0, num_rows, num_completions)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """(B, H) -> (B, V) float32."""
        if self.device.type == "cpu" and hidden.dtype != torch.float32:
            with exact_bfloat16_products(self.head.weight):
                return functional.linear(hidden.float(), self._wide, _wide(self.head.bias))
        if self.device.type == "cuda":  # the head would widen its whole weight at every token
            logits = wide_product(hidden, self._wide)
            return logits if self.head.bias is None else logits.add_(self.head.bias)
        logits = self.head(hidden)
        return logits

    def _start(
        self, prompts: Sequence[np.ndarray], num_completions: int, limit: int
    ) -> tuple[Tensor, Cache]:
        """Compute each prompt once: the (n * G, H) hidden state that the first token is drawn from, and the cache."""
        n, longest = len(prompts), max(len(p) for p in prompts)
        packing = pack_rows(prompts, [1] * n, longest).to(self.device)
        attend = PackedAttention(packing, self.decoder.num_kv_heads, self.decoder.scale)
        cells = np.concatenate([i * longest + np.arange(len(p)) for i, p in enumerate(prompts)])
        place = torch.from_numpy(cells).to(self.device)
        held: list[tuple[Tensor, Tensor]] = []

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            padded = [t.new_zeros(n * longest, *t.shape[1:]) for t in (k, v)]
            for to, of in zip(padded, (k, v), strict=True):
                to[place] = of
            k_all, v_all = (
                t.unflatten(0, (n, longest)).transpose(1, 2).flatten(0, 1).to(self._held)
                for t in padded
            )
            held.append((k_all, v_all))
            return attend(layer, q, k, v)

        ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(self.device)
        last = self.decoder.hidden(ids, packing.positions, keep)[packing.before]
        like, heads = held[0][0], self.decoder.num_kv_heads
        size = (n * num_completions * heads, limit, like.shape[-1])
        drawn = [(like.new_empty(size), like.new_empty(size)) for _ in held]
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        padding = torch.arange(longest, device=self.device) >= lengths[:, None]
        padding = padding if bool(padding.any()) else None  # type: ignore[assignment]
        cache = Cache(held, drawn, padding, None, np.arange(n), num_completions, heads)
        return last.repeat_interleave(num_completions, dim=0), cache

    def _attend(self, cache: Cache, t: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token a row: q (B, A, D), k and v (B, K, D) -> (B, A * D). Writes k and v at place t."""
        rows, heads = len(q), cache.num_kv_heads
        (prompt_k, prompt_v), (drawn_k, drawn_v) = cache.prompt[layer], cache.drawn[layer]
        drawn_k[:, t], drawn_v[:, t] = k.flatten(0, 1), v.flatten(0, 1)
        wide = q.to(drawn_k.dtype).unflatten(1, (heads, -1))  # (B, K, A / K, D)
        own = _wide_bmm(wide.flatten(0, 1), drawn_k[:, : t + 1].transpose(1, 2))
        # All completions of a prompt are rows of one product with its keys.
        shared = _wide_bmm(self._to_prompts(wide, cache), prompt_k.transpose(1, 2))
        if cache.padding is not None:
            mask = cache.padding.repeat_interleave(heads, dim=0)[:, None]
            shared.masked_fill_(mask, float("-inf"))
        longest = shared.shape[-1]
        scores = torch.cat([self._to_rows(shared, cache, rows), own], dim=-1)
        probs = scores.mul_(self.decoder.scale).softmax(dim=-1).to(drawn_v.dtype)
        out = _wide_bmm(probs[..., longest:], drawn_v[:, : t + 1])
        of_prompt = self._to_prompts(probs[..., :longest].unflatten(0, (rows, heads)), cache)
        out += self._to_rows(_wide_bmm(of_prompt, prompt_v), cache, rows)
        return out.reshape(rows, -1).to(q.dtype)

    def _to_prompts(self, x: Tensor, cache: Cache) -> Tensor:
        """(B, K, M, X) -> (n * K, G * M, X); places of rows that have left hold zeros."""
        n = len(cache.numbers)
        if cache.slot is not None:
            grid = x.new_zeros(n * cache.group_size, *x.shape[1:])
            grid[cache.slot] = x
            x = grid
        return x.unflatten(0, (n, cache.group_size)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _to_rows(self, x: Tensor, cache: Cache, rows: int) -> Tensor:
        """(n * K, G * M, X) -> (B * K, M, X)."""
        heads, group = cache.num_kv_heads, cache.group_size
        x = x.unflatten(0, (-1, heads)).unflatten(2, (group, -1)).transpose(1, 2).flatten(0, 1)
        if cache.slot is not None:
            x = x[cache.slot]
        return x.reshape(rows * heads, *x.shape[2:])

    @torch.inference_mode()
    def ref_logprobs(
        self, prompt: np.ndarray, completions: Sequence[Completion], sampling: Sampling
    ) -> list[np.ndarray]:
        """See Engine.ref_logprobs; the prompt is computed once."""
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            return super().ref_logprobs(prompt, completions, sampling)
        lens = [len(c.token_ids) for c in completions]
        rows = [np.concatenate([prompt, c.token_ids]) for c in completions]
        longest = max(map(len, rows))
        flat = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            flat[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        packing = pack_rows([prompt] * len(rows), lens, longest).to(self.device)
        drawn = torch.from_numpy(
            np.concatenate([c.token_ids for c in completions]).astype(np.int64)
        )
        attend = PackedAttention(packing, self.decoder.num_kv_heads, self.decoder.scale)
        with self.model.disable_adapter():
            ids = flat.flatten().to(self.device)[packing.source]
            hidden = self.decoder.hidden(ids, packing.positions, attend)[packing.before]
        out = VocabLogprobs.apply(
            hidden, self.head.weight, self.head.bias, drawn.to(self.device), sampling.temperature
        )
        return np.split(out[0].cpu().numpy(), np.cumsum(lens)[:-1])


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """(X, M, D) x (X, D, L) of one dtype -> (X, M, L) float32: a score near 20 in bfloat16 is rounded to 1/16, and then to a
    probability that the learner's attention does not have. On CPUs the cache is float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def open_engine(model: Any, tokenizer: Any, log: logging.Logger, *, plain: bool) -> HFEngine:
    """The fast engine, or the plain one where it is asked for or the model is of another kind, which the log says."""
    reason = None if plain else why_unsupported(model)
    if reason:
        log.warning("sampling with the plain, slower engine, since %s", reason)
    return HFEngine(model, tokenizer) if plain or reason else FastEngine(model, tokenizer)
