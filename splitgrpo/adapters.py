"""Publishing LoRA adapters to a folder and reloading them while sampling goes on.

    RUN/latest.json               pointer, replaced atomically: version, lineage, folder, sha256, run_id, done
    RUN/adapters/v000012.L1/      an ordinary PEFT folder, plus manifest.json with sizes and sha256 of its files

A reader follows the pointer, checks every digest, and copies the tensors into the model it has: strict keys, shapes and
scaling. Whatever fails, the model keeps the adapter it had. PEFT itself only warns about missing keys.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from splitgrpo.files import save_tensors, sha256_file, write_folder, write_json
from splitgrpo.pointer import FOLDER, POINTER, AdapterError, Pointer, order, read_struct

MANIFEST = "manifest.json"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an adapter is for, and the digest of each of its files."""

    version: int
    lineage: int
    run_id: str
    base_model: str
    base_digest: str
    base_dtype: str
    files: dict[str, tuple[int, str]]  # name -> (bytes, sha256)


@dataclass(frozen=True)
class Adapter:
    """An adapter read from disk, every digest checked."""

    pointer: Pointer
    manifest: Manifest
    config: LoraConfig
    tensors: dict[str, Tensor]  # PEFT's key -> float32


def base_digest(model: nn.Module) -> str:
    """Digest of a base model's parameter names, shapes, dtypes and first values; LoRA parameters are left out.

    Tells two bases apart without hashing gigabytes. Call it before DeepSpeed takes the parameters over.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        head = parameter.detach().reshape(-1)[:64].to("cpu", torch.float32).numpy()
        digest.update(
            f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + head.tobytes()
        )
    return digest.hexdigest()


def adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """The LoRA parameters of a model by the key that PEFT's files use for them."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


@dataclass(frozen=True)
class Publisher:
    """Writes adapters of one run; only rank 0 has one. It never removes the versions in `needed`."""

    run_dir: Path
    run_id: str
    lineage: int
    base_model: str
    base_digest: str
    base_dtype: str
    config: LoraConfig
    keep: int
    needed: frozenset[int] = frozenset()

    def publish(self, version: int, tensors: dict[str, Tensor], *, done: bool = False) -> Pointer:
        """Write one version and point at it. `tensors` are float32 on the CPU.

        Raises OSError; readers then find the version before, or this one whole, and the same call may be tried again.
        """
        return self.point(version, self.write(version, tensors), done=done)

    def write(self, version: int, tensors: dict[str, Tensor]) -> str:
        """Write one version, which nobody finds yet; returns the sha256 of its weights. Raises OSError."""
        folder = self.run_dir / "adapters" / self.name(version)
        if not folder.exists():
            write_folder(folder, lambda aside: self.fill(aside, version, tensors))
        return self.read_digest(folder)

    def point(self, version: int, digest: str, *, done: bool = False) -> Pointer:
        """Point at what `write` wrote, and remove what is old. Raises OSError."""
        pointer = Pointer(
            version=version,
            lineage=self.lineage,
            folder=self.name(version),
            sha256=digest,
            run_id=self.run_id,
            done=done,
        )
        write_json(self.run_dir / POINTER, msgspec.to_builtins(pointer))
        self.remove_old(pointer.folder)
        return pointer

    def name(self, version: int) -> str:
        """Of the folder of one version."""
        return f"v{version:06d}.L{self.lineage}"

    def fill(self, folder: Path, version: int, tensors: dict[str, Tensor]) -> None:
        """Write the PEFT files and the manifest into an empty folder."""
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
        self.config.save_pretrained(str(folder))
        files = {
            n: ((folder / n).stat().st_size, sha256_file(folder / n)) for n in (WEIGHTS, CONFIG)
        }
        manifest = Manifest(
            version=version,
            lineage=self.lineage,
            run_id=self.run_id,
            base_model=self.base_model,
            base_digest=self.base_digest,
            base_dtype=self.base_dtype,
            files=files,
        )
        write_json(folder / MANIFEST, msgspec.to_builtins(manifest))

    def read_digest(self, folder: Path) -> str:
        """sha256 of the weights in a folder that this run has written."""
        return read_struct(folder / MANIFEST, Manifest).files[WEIGHTS][1]

    def remove_old(self, current: str) -> None:
        """Keep the newest `keep` versions, as numbers and not as text, those needed, and whatever the pointer names."""
        found = [p for p in (self.run_dir / "adapters").iterdir() if FOLDER.fullmatch(p.name)]
        for folder in sorted(found, key=lambda p: order(p.name))[: -self.keep]:
            if folder.name != current and order(folder.name)[1] not in self.needed:
                shutil.rmtree(
                    folder, ignore_errors=True
                )  # a reader's, on some disks; next time then


def read_adapter(run_dir: Path, pointer: Pointer) -> Adapter:
    """Read what a pointer names and check all of it before anything is used. Raises AdapterError."""
    folder = run_dir / "adapters" / pointer.folder
    manifest: Manifest = read_struct(folder / MANIFEST, Manifest)
    same = ("version", "lineage", "run_id")
    if any(getattr(manifest, n) != getattr(pointer, n) for n in same):
        raise AdapterError(f"{folder / MANIFEST} is of another version or run than {POINTER} says")
    if set(manifest.files) != {WEIGHTS, CONFIG} or manifest.files[WEIGHTS][1] != pointer.sha256:
        raise AdapterError(f"{folder / MANIFEST} does not list the weights that {POINTER} names")
    contents = {}
    for name, (size, digest) in manifest.files.items():
        try:
            contents[name] = (folder / name).read_bytes()  # never mapped: a torn map is a SIGBUS
        except OSError as error:
            raise AdapterError(f"cannot read {folder / name}: {error}") from error
        found = hashlib.sha256(contents[name]).hexdigest()
        if len(contents[name]) != size or found != digest:
            raise AdapterError(
                f"{folder / name}: {len(contents[name])} bytes with sha256 {found[:12]}…, the manifest says "
                f"{size} bytes with {digest[:12]}…"
            )
    try:
        tensors = load_tensors(contents[WEIGHTS])
    except SafetensorError as error:
        raise AdapterError(f"{folder / WEIGHTS}: {error}") from error
    for key in sorted(tensors):  # or another is named each time: the library's order changes
        tensor = tensors[key]
        if tensor.dtype != torch.float32:
            raise AdapterError(f"{folder / WEIGHTS}: {key} is {tensor.dtype}, expected float32")
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{folder / WEIGHTS}: {key} is not finite")
    return Adapter(pointer, manifest, read_config(contents[CONFIG], folder / CONFIG), tensors)


def read_config(content: bytes, path: Path) -> LoraConfig:
    """PEFT's configuration from bytes whose digest was checked; from_pretrained would read the file again, or ask the hub.

    Raises AdapterError.
    """
    try:
        fields = json.loads(content)
        config = LoraConfig.from_peft_type(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"{path} is no PEFT configuration: {error!r}") from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{path} is of {fields.get('peft_type')}, expected LORA")
    return config


def check_keys(have: Iterable[str], found: Iterable[str], name: str) -> None:
    """Refuse adapter `name` unless the keys found in it are those that a model has. Raises AdapterError."""
    missing, extra = sorted(set(have) - set(found)), sorted(set(found) - set(have))
    if missing or extra:
        raise AdapterError(
            f"adapter {name}: {len(missing)} LoRA keys missing (first {missing[:1]}), {len(extra)} that this model has "
            f"not (first {extra[:1]}): it was made for another base or other target modules"
        )


def install_adapter(model: PeftModel, adapter: Adapter) -> None:
    """Copy an adapter into a model's `default` adapter in place and leave the model in eval mode.

    All is compared before the first value is written. Raises AdapterError naming the first difference.
    """
    have, new = adapter_parameters(model), adapter.tensors
    check_keys(have, new, adapter.pointer.folder)
    for key, parameter in have.items():
        if parameter.shape != new[key].shape:
            raise AdapterError(
                f"adapter {adapter.pointer.folder}: {key} is {tuple(new[key].shape)}, expected {tuple(parameter.shape)}"
            )
    current: Any = model.peft_config["default"]
    for name in ("r", "lora_alpha", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern"):
        if getattr(current, name) != getattr(adapter.config, name):
            raise AdapterError(
                f"adapter {adapter.pointer.folder}: {name} is {getattr(adapter.config, name)}, this model has "
                f"{getattr(current, name)}"
            )
    with torch.no_grad():
        for key, parameter in have.items():
            parameter.copy_(new[key])
    model.eval()


def read_version(run_dir: Path, version: int, lineage: int) -> Adapter | None:
    """One published version, which no pointer need name any more; None where it is gone or damaged."""
    name = f"v{version:06d}.L{lineage}"
    try:
        manifest: Manifest = read_struct(run_dir / "adapters" / name / MANIFEST, Manifest)
        digest = manifest.files[WEIGHTS][1]
        return read_adapter(
            run_dir, Pointer(version, lineage, name, digest, manifest.run_id, done=False)
        )
    except (AdapterError, KeyError):
        return None
