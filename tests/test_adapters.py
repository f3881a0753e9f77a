"""Publishing and hot reload: the round trip, and every damage refused with the old adapter kept."""

import dataclasses
import json
import shutil

import msgspec
import pytest
import torch
from conftest import tiny_model
from peft import PeftModel
from safetensors.torch import load_file, save_file

from splitgrpo import adapters
from splitgrpo.adapters import (
    Publisher,
    adapter_parameters,
    base_digest,
    install_adapter,
    read_adapter,
    read_config,
)
from splitgrpo.config import SettingsError
from splitgrpo.evaluate import open_adapter
from splitgrpo.files import sha256_file, write_json
from splitgrpo.models import add_lora, attach_adapter, lora_config
from splitgrpo.pointer import AdapterError, order, read_pointer


def randomize(model, seed):
    torch.manual_seed(seed)
    for p in adapter_parameters(model).values():
        p.data.normal_(std=0.3)


def state(model):
    return {k: p.detach().clone() for k, p in adapter_parameters(model).items()}


@pytest.fixture
def run(tmp_path):
    """A learner's model and its publisher."""
    base = tiny_model()
    digest = base_digest(base)
    model = add_lora(base, rank=4, alpha=8, seed=0)
    (tmp_path / "adapters").mkdir()
    publisher = Publisher(tmp_path, "run", 1, "tiny", digest, "float32", lora_config(model), keep=2)
    return tmp_path, model, publisher


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15)[None]).logits


def read_latest(run_dir):
    return read_adapter(run_dir, read_pointer(run_dir))


def test_a_published_adapter_gives_the_sampler_the_learners_own_logits(run):
    run_dir, model, publisher = run
    randomize(model, 1)
    publisher.publish(0, state(model))
    sampler = attach_adapter(tiny_model(), read_latest(run_dir))
    assert torch.equal(logits(sampler), logits(model))
    randomize(model, 2)
    publisher.publish(1, state(model))
    assert not torch.equal(logits(sampler), logits(model))
    install_adapter(sampler, read_latest(run_dir))
    assert torch.equal(logits(sampler), logits(model))
    assert not sampler.training


def test_a_published_folder_opens_with_peft_itself(run):
    run_dir, model, publisher = run
    randomize(model, 1)
    pointer = publisher.publish(3, state(model))
    opened = PeftModel.from_pretrained(tiny_model(), run_dir / "adapters" / pointer.folder)
    assert (logits(opened) - logits(model)).abs().max() < 1e-5


def test_fifty_reloads_leave_the_base_as_it_was_and_add_no_parameter(run):
    run_dir, model, publisher = run
    publisher.publish(0, state(model))
    sampler = attach_adapter(tiny_model(), read_latest(run_dir))
    count = sum(1 for _ in sampler.parameters())
    for version in range(1, 51):
        randomize(model, version)
        publisher.publish(version, state(model))
        install_adapter(sampler, read_latest(run_dir))
    assert sum(1 for _ in sampler.parameters()) == count
    assert base_digest(sampler) == publisher.base_digest
    base = dict(tiny_model().named_parameters())
    for name, p in sampler.named_parameters():
        if "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert torch.equal(p, base[plain])


def test_versions_are_ordered_as_numbers_and_old_ones_are_removed(run):
    run_dir, model, publisher = run
    for version in (9, 10, 11):
        publisher.publish(version, state(model))
    assert sorted(p.name for p in (run_dir / "adapters").iterdir()) == ["v000010.L1", "v000011.L1"]
    assert order("v009000.L1") < order("v010000.L1") < order("v000001.L2")


def rewritten(run_dir, change):
    """Change the tensors of the newest adapter with all digests made right again: only content is wrong."""
    pointer = read_pointer(run_dir)
    folder = run_dir / "adapters" / pointer.folder
    tensors = change(load_file(folder / "adapter_model.safetensors"))
    save_file(tensors, folder / "adapter_model.safetensors")
    path = folder / "adapter_model.safetensors"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = [path.stat().st_size, sha256_file(path)]
    write_json(folder / "manifest.json", manifest)
    write_json(
        run_dir / "latest.json", msgspec.to_builtins(pointer) | {"sha256": sha256_file(path)}
    )


CONTENT = {
    "finite": lambda t: t | {min(t): t[min(t)] * float("nan")},
    "1 LoRA keys missing": lambda t: {k: v for k, v in t.items() if k != min(t)},
    "this model has not": lambda t: t | {"stranger.lora_A.weight": torch.ones(2, 2)},
    "keys missing": lambda t: {f"module.{k}": v for k, v in t.items()},
    "expected": lambda t: t | {min(t): torch.zeros(3, 3)},
}


@pytest.mark.parametrize("reason", CONTENT)
def test_wrong_content_is_refused_and_the_old_adapter_stays(run, reason):
    run_dir, model, publisher = run
    publisher.publish(0, state(model))
    sampler = attach_adapter(tiny_model(), read_latest(run_dir))
    before = state(sampler)
    randomize(model, 5)
    publisher.publish(1, state(model))
    rewritten(run_dir, CONTENT[reason])
    with pytest.raises(AdapterError, match=reason):
        install_adapter(sampler, read_latest(run_dir))
    for key, value in state(sampler).items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_file_is_refused(run, name, damage):
    run_dir, model, publisher = run
    publisher.publish(0, state(model))
    path = run_dir / "adapters" / "v000000.L1" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    try:
        adapter = read_latest(run_dir)
    except AdapterError:
        return
    # A flipped bit in the manifest may hit text that is only shown; what is used must be untouched.
    assert (name, damage) == ("manifest.json", "flip")
    assert adapter.pointer.sha256 == sha256_file(
        run_dir / "adapters/v000000.L1/adapter_model.safetensors"
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": "1"}'])
def test_a_damaged_pointer_is_an_error_and_not_an_empty_folder(run, content):
    run_dir, *_ = run
    assert read_pointer(run_dir) is None
    (run_dir / "latest.json").write_text(content)
    with pytest.raises(AdapterError, match=r"latest\.json"):
        read_pointer(run_dir)


def test_a_pointer_cannot_lead_out_of_the_folder(run):
    run_dir, model, publisher = run
    pointer = publisher.publish(0, state(model))
    evil = msgspec.structs.replace(pointer, folder="../../elsewhere")
    write_json(run_dir / "latest.json", msgspec.to_builtins(evil))
    with pytest.raises(AdapterError, match="no adapter's name"):
        read_pointer(run_dir)


def test_a_pointer_to_a_version_that_is_not_there_is_an_error(run):
    run_dir, model, publisher = run
    pointer = publisher.publish(0, state(model))
    shutil.rmtree(run_dir / "adapters" / pointer.folder)
    with pytest.raises(AdapterError, match="cannot read"):
        read_latest(run_dir)


def test_an_adapter_made_for_another_base_is_refused_naming_both(run):
    run_dir, model, publisher = run
    publisher.publish(0, state(model))
    with pytest.raises(SettingsError, match=r"another base model: its manifest names tiny"):
        attach_adapter(tiny_model(seed=1), read_latest(run_dir))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_evaluation_takes_a_peft_folder_only_whole(run):
    run_dir, model, publisher = run
    folder = run_dir / "adapters" / publisher.publish(0, state(model)).folder
    assert torch.equal(logits(open_adapter(tiny_model(), folder)), logits(model))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    save_file({k.replace("layers", "blocks"): v for k, v in state(model).items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(SettingsError, match="28 LoRA keys missing"):
        open_adapter(tiny_model(), folder)
    (folder / "adapter_model.safetensors").write_bytes(weights[:-40])
    with pytest.raises(SettingsError, match="cannot be loaded"):
        open_adapter(tiny_model(), folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(SettingsError, match="cannot be loaded"):
        open_adapter(tiny_model(), folder)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff", b'{"peft_type": "IA3"}', b'{"peft_type": "X"}']
)
def test_a_configuration_that_is_not_loras_is_refused_naming_its_file(content, tmp_path):
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_config(content, tmp_path / "adapter_config.json")


def test_reading_an_adapter_asks_for_no_file_again_once_its_digest_is_checked(run, monkeypatch):
    run_dir, model, publisher = run
    pointer = publisher.publish(0, state(model))
    load = adapters.load_tensors

    def removed(content):
        shutil.rmtree(run_dir / "adapters" / pointer.folder)
        return load(content)

    monkeypatch.setattr(adapters, "load_tensors", removed)
    assert read_latest(run_dir).config.lora_alpha == 8


@pytest.mark.parametrize("field", ["r", "lora_alpha", "use_rslora"])
def test_another_scaling_is_refused(run, field):
    run_dir, model, publisher = run
    publisher.publish(0, state(model))
    adapter = read_latest(run_dir)
    sampler = attach_adapter(tiny_model(), adapter)
    values = {"r": 8, "lora_alpha": 99, "use_rslora": True}
    changed = dataclasses.replace(adapter.config, **{field: values[field]})
    with pytest.raises(AdapterError, match=field):
        install_adapter(sampler, dataclasses.replace(adapter, config=changed))


def test_a_fresh_adapter_changes_nothing_and_is_the_same_for_the_same_seed():
    base = logits(tiny_model())
    one, two = (add_lora(tiny_model(), rank=4, alpha=8, seed=3) for _ in range(2))
    assert torch.equal(logits(one), base)
    for a, b in zip(state(one).values(), state(two).values(), strict=True):
        assert torch.equal(a, b)
