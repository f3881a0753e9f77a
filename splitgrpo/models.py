"""Loading the base model and its tokenizer, and putting LoRA on it."""

import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError

from splitgrpo.adapters import Adapter, Manifest, base_digest, install_adapter
from splitgrpo.config import SettingsError
from splitgrpo.logprobs import check_model, use_float32_output

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_model_path(model_path: str) -> None:
    """Refuse a path that is no model before anything slow starts; a hub name is left to the hub's own cache."""
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise SettingsError(
                f"--model_path {model_path}: the folder holds no config.json; it has "
                f"{sorted(p.name for p in folder.iterdir())[:8]}"
            )
    elif folder.is_absolute() or model_path.startswith((".", "~")) or model_path.count("/") != 1:
        raise SettingsError(
            f"--model_path {model_path}: no such folder (looked for {folder.absolute()}/config.json), and not a hub "
            "name of the form owner/model"
        )


def load_pretrained(loader: Any, model_path: str, **options: Any) -> Any:
    """Call loader.from_pretrained; what cannot be had becomes a SettingsError that says where it was looked for."""
    check_model_path(model_path)
    try:
        return loader.from_pretrained(model_path, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        from huggingface_hub.constants import HF_HUB_CACHE

        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        raise SettingsError(
            f"--model_path {model_path}: cannot be loaded; looked for a folder of this name, then in {HF_HUB_CACHE}, "
            f"then at the model hub.{offline} First reason: {str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(model_path: str) -> Any:
    """The model's own tokenizer.

    transformers 5.24 takes the class that it knows for the model's type even where tokenizer_config.json states the
    generic one, and so would split a text in another way than tokenizer.json says: what is stated is what is loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    check_model_path(model_path)
    stated = get_tokenizer_config(model_path).get("tokenizer_class")
    generic = stated in ("TokenizersBackend", "PreTrainedTokenizerFast")
    tokenizer = load_pretrained(PreTrainedTokenizerFast if generic else AutoTokenizer, model_path)
    if tokenizer.eos_token_id is None or not tokenizer("1 + 2")["input_ids"]:
        raise SettingsError(
            f"--model_path {model_path}: its tokenizer has {len(tokenizer)} tokens and end token {tokenizer.eos_token!r}; "
            "are tokenizer.json and tokenizer_config.json there?"
        )
    return tokenizer


def load_config(model_path: str) -> Any:
    """The model's configuration."""
    from transformers import AutoConfig

    return load_pretrained(AutoConfig, model_path)


def load_base(model_path: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """The base model in `dtype` with float32 logits, frozen, in eval mode.

    Raises SettingsError when it cannot be had or is of an unfit kind.
    """
    from transformers import AutoModelForCausalLM

    model = load_pretrained(AutoModelForCausalLM, model_path, dtype=dtype)
    try:
        check_model(model.config)
        use_float32_output(model)
    except ValueError as error:
        raise SettingsError(f"--model_path {model_path}: {error}") from error
    return model.to(device).requires_grad_(False).eval()


def add_lora(model: Any, rank: int, alpha: int, seed: int) -> PeftModel:
    """Put a fresh LoRA on every linear layer but the output layer, initialised from `seed`.

    Dropout is 0: with it, the learner's log-probs would not be those of the policy that sampled.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft = get_peft_model(model, config)
    trainable = sum(p.numel() for p in peft.parameters() if p.requires_grad)
    if trainable == 0:
        raise SettingsError("LoRA found no linear layer to train in this model")
    return peft


def check_base(model: Any, manifest: Manifest, name: str) -> None:
    """Refuse a base, loaded in the manifest's base_dtype, that adapter `name` was not made for. Raises SettingsError."""
    found = base_digest(model)
    if found != manifest.base_digest:
        raise SettingsError(
            f"adapter {name} was made for another base model: its manifest names {manifest.base_model} "
            f"({manifest.base_digest[:12]}…), this one is {model.name_or_path} ({found[:12]}…). Give the same --model_path."
        )


def attach_adapter(model: Any, adapter: Adapter) -> PeftModel:
    """Put a published adapter on a base model; rank, alpha and targets come from the adapter.

    Raises SettingsError when the adapter was made for another base.
    """
    check_base(model, adapter.manifest, adapter.pointer.folder)
    peft = PeftModel(model, adapter.config, autocast_adapter_dtype=False)
    peft.requires_grad_(False)
    install_adapter(peft, adapter)
    return peft


def lora_config(model: PeftModel) -> LoraConfig:
    """The configuration of the one adapter that a model has."""
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    return config


def use_threads(num_threads: int) -> None:
    """Compute with so many CPU threads, and keep freed memory instead of handing it back to the system at every step.

    glibc maps each tensor above 128 kB anew, so that its pages come as faults, one by one, whenever it is written: on a
    virtual machine that took up to ten times as long as the arithmetic of an activation.
    """
    torch.set_num_threads(num_threads)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)


def bfloat16_is_fast(device: torch.device | str) -> bool:
    """Whether bfloat16 pays here: on a CPU without instructions for it, it is emulated at half of float32's speed."""
    if torch.device(device).type != "cpu":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def likely_dtype(model_path: str, device: torch.device | str) -> torch.dtype:
    """What a learner's ds_config.json, which a sampler does not read, most likely says."""
    stated = load_config(model_path).get_text_config().dtype
    narrow = stated != torch.float32 and bfloat16_is_fast(device)
    return torch.bfloat16 if narrow else torch.float32


def describe_parameters(model: PeftModel) -> str:
    """How many parameters train."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    return f"{trainable:,} of {total:,} parameters train ({trainable / total:.1%})"


def pick_device(device: str, log: logging.Logger) -> torch.device:
    """The device asked for, or the CPU where there is no GPU at all. Raises SettingsError for a GPU that isn't there."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise SettingsError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        log.info("no GPU here: using the CPU instead of %s", device)
        return torch.device("cpu")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"--device {device}: this machine has {torch.cuda.device_count()} GPUs")
    return wanted
