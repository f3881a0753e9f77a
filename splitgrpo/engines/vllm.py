"""vLLM behind engines.base.Engine, inside the sampler's process and driven one decoding step at a time.

Adapters are LoRA requests, a new id and name a version, so that no cached prompt of one is ever read by another. vLLM needs
an environment of its own: requirements-vllm.txt. Written for vLLM 0.32.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from splitgrpo import models
from splitgrpo.adapters import WEIGHTS, Adapter, install_adapter
from splitgrpo.config import SamplerSettings, SettingsError, effective_kl_coef
from splitgrpo.engines.base import Completion, Sampling
from splitgrpo.engines.hf import end_token_ids
from splitgrpo.pointer import AdapterError

LEAST_TEMPERATURE = 0.01  # vLLM takes a lower one for this one
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # its buffers come in these sizes
CPU_BLOCK_TOKENS = 32  # prompts are shared by whole blocks; its default on a CPU is 128
CPU_CACHE_GIB = "4"  # its default on a CPU is nearly all memory


def check_vllm(settings: SamplerSettings) -> None:
    """Refuse what --engine vllm cannot do, before anything slow. Raises SettingsError."""
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            "--engine vllm: the package vllm is not installed in this environment. requirements-vllm.txt is what one needs "
            "(bash run.sh vllm-env makes it, in .venv-vllm; start the sampler with its python); or leave --engine hf"
        )
    s = settings
    if s.plain:
        raise SettingsError(
            "--plain is for --engine hf: vLLM has one way to sample; leave one of the two out"
        )
    if s.temperature < LEAST_TEMPERATURE:
        raise SettingsError(
            f"--temperature {s.temperature}: --engine vllm takes none below {LEAST_TEMPERATURE}; give a higher one, or "
            "--engine hf"
        )
    if effective_kl_coef(s) > 0 and (s.temperature, s.top_k, s.top_p) != (1.0, 0, 1.0):
        raise SettingsError(
            f"--engine vllm with --kl_coef {effective_kl_coef(s):g} and --temperature {s.temperature:g} --top_k {s.top_k} "
            f"--top_p {s.top_p:g}: vLLM gives log-probs of a given text at temperature 1 without filters only, and the "
            "reference is needed at yours. Give --kl_coef 0 to both workers, or sample at temperature 1, or --engine hf"
        )


def check_length(config: Any, max_tokens: int) -> None:
    """Refuse more tokens than a model has positions: vLLM would advise a switch that gives NaN. Raises SettingsError."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_tokens + 1 > longest:
        raise SettingsError(
            f"--engine vllm: --max_prompt_tokens and --max_new_tokens allow {max_tokens} tokens, but this model has "
            f"{longest} positions, and vLLM needs one to spare; give both workers smaller ones"
        )


class VLLMEngine:
    """Implements engines.base.Engine."""

    def __init__(
        self,
        base: Any,
        adapter: Adapter,
        tokenizer: Any,
        device: torch.device,
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        """Start vLLM on what `base` was loaded from, with its first adapter.

        `base` is a transformers model on the CPU, in the adapter's base_dtype; only its shapes are kept. `max_tokens` is
        the longest prompt with its completion, `max_rows` how many completions are under way at once. Raises SettingsError
        for a base or an adapter that vLLM cannot take, or when the adapter is of another base.
        """
        check_length(base.config, max_tokens)
        self.tokenizer = tokenizer
        self.end_ids = end_token_ids(base, tokenizer)
        # vLLM says nothing of what an adapter lacks; install_adapter does, on this model of shapes without values.
        self._skeleton = models.attach_adapter(base, adapter).to("meta")
        self._llm = start_vllm(base.name_or_path, adapter, device, max_tokens, max_rows)
        self._lora: Any = None
        self._num_loaded = self._num_requests = 0
        try:
            self.install(adapter)
            # What it has no kernel for, such as heads of 16 on a CPU, shows with the first token only.
            self._run([(np.zeros(1, dtype=np.int32), {"max_tokens": 1})], self._lora, lambda: None)
        except Exception as error:
            raise SettingsError(
                f"--engine vllm: vLLM cannot serve --model_path {base.name_or_path} with {adapter.pointer.folder}: {error}. "
                "--engine hf may"
            ) from error

    def install(self, adapter: Adapter) -> None:
        """Load an adapter's tensors beside the one in use, then let go of that one. See Engine.install."""
        from vllm.lora.request import LoRARequest

        install_adapter(self._skeleton, adapter)
        self._num_loaded += 1
        name = f"{adapter.pointer.folder}-{self._num_loaded}"
        try:
            # vLLM reads a folder; not the published one, which may have changed since its digests were checked.
            with tempfile.TemporaryDirectory(prefix="splitgrpo-lora-") as folder:
                save_file(adapter.tensors, Path(folder) / WEIGHTS, {"format": "pt"})
                adapter.config.save_pretrained(folder)
                lora = LoRARequest(name, self._num_loaded, folder)
                self._llm.add_lora(lora)
        except Exception as error:  # of any kind: vLLM has no kind of its own for this
            self._llm.remove_lora(self._num_loaded)
            raise AdapterError(f"adapter {adapter.pointer.folder}: vLLM: {error}") from error
        old, self._lora = self._lora, lora
        if old is not None:
            self._llm.remove_lora(old.lora_int_id)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

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
        seeds = np.random.SeedSequence(seed).generate_state(num_rows, np.uint64) >> np.uint64(1)
        options = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": self.end_ids,
            "logprobs": 0,  # of the sampled token alone
        }
        rows = [
            (prompts[i // num_completions], options | {"seed": int(seeds[i])})
            for i in range(num_rows)
        ]
        flat = [completion_of(out.outputs[0]) for out in self._run(rows, self._lora, on_token)]
        return [flat[i : i + num_completions] for i in range(0, num_rows, num_completions)]

    def ref_logprobs(
        self, prompt: np.ndarray, completions: Sequence[Completion], sampling: Sampling
    ) -> list[np.ndarray]:
        """See Engine.ref_logprobs; `check_vllm` refused every `sampling` but the plain one, which is what vLLM gives."""
        # A prompt of its own text; vLLM insists on sampling a token after it.
        options = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        rows = [(np.concatenate([prompt, c.token_ids]), options) for c in completions]
        outs = self._run(rows, None, lambda: None)
        return [
            np.array(out.prompt_logprobs.logprobs[-len(c.token_ids) :], dtype=np.float32)
            for c, out in zip(completions, outs, strict=True)
        ]

    def _run(
        self,
        rows: Sequence[tuple[np.ndarray, dict[str, Any]]],
        lora: Any,
        on_token: Callable[[], None],
    ) -> list[Any]:
        """Outputs of (prompt ids, options) in their order. What `on_token` raises ends them all and goes on up."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        first = self._num_requests
        self._num_requests += len(rows)
        names = [str(first + i) for i in range(len(rows))]
        done: dict[str, Any] = {}
        try:
            for name, (ids, options) in zip(names, rows, strict=True):
                params = SamplingParams(
                    **options,
                    detokenize=False,
                    flat_logprobs=True,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._llm.add_request(name, tokens_input(ids.tolist()), params, lora_request=lora)
            while self._llm.has_unfinished_requests():
                on_token()
                done |= {out.request_id: out for out in self._llm.step()}
        except BaseException:
            self._llm.abort_request(names)
            raise
        return [done[name] for name in names]


def completion_of(out: Any) -> Completion:
    """vLLM's CompletionOutput as ours; it keeps the token that ended it."""
    return Completion(
        np.array(out.token_ids, dtype=np.int32),
        np.array(out.logprobs.logprobs, dtype=np.float32),
        out.finish_reason == "stop",
    )


def lora_modules(adapter: Adapter) -> list[str]:
    """Names of the layers that an adapter is for. vLLM would wrap the output layer too: ref_logprobs then fails on a CPU."""
    return sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in adapter.tensors})


def start_vllm(
    model_path: str, adapter: Adapter, device: torch.device, max_tokens: int, max_rows: int
) -> Any:
    """vLLM's LLMEngine in this process, so that it ends with it. Raises SettingsError with vLLM's own reason."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {
        "VLLM_CONFIGURE_LOGGING": "0",  # its lines go through our handler, or nowhere
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB,
    }.items():
        os.environ.setdefault(name, value)
    on_cpu, preload = device.type == "cpu", os.environ.get("LD_PRELOAD", "")
    if on_cpu:  # it compiles some functions all the same: 15 s, and none where there is no compiler
        torch._dynamo.config.disable = True
    config = adapter.config
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            dtype=adapter.manifest.base_dtype,
            generation_config="vllm",  # not the model's own sampling defaults
            hf_overrides={"head_dtype": "float32"},  # as logprobs.Float32Output
            logprobs_mode="processed_logprobs",  # of the distribution drawn from
            max_model_len=max_tokens + 1,  # ref_logprobs samples one
            max_num_seqs=max_rows,
            enable_prefix_caching=True,
            block_size=CPU_BLOCK_TOKENS if on_cpu else None,
            enforce_eager=on_cpu,  # no compiler is needed then
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=2,  # the next one is loaded before the last is let go of
            lora_target_modules=lora_modules(adapter),
            max_lora_rank=min((n for n in LORA_RANKS if n >= rank), default=rank),
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        vllm_config = args.create_engine_config()
        if device.index:
            vllm_config.device_config.device = device
        return LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
    except Exception as error:  # it has dozens of kinds
        raise SettingsError(
            f"--engine vllm: vLLM cannot serve --model_path {model_path} with LoRA rank {rank} on {device}: "
            f"{str(error).strip() or type(error).__name__}. --engine hf may"
        ) from error
    finally:
        # On a CPU it puts its allocator into every process started later, the reward's too.
        os.environ["LD_PRELOAD"] = preload
