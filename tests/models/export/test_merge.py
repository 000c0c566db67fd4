"""Merging weight by weight: shards, rounding, memory, and what reading back finds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from export_tools import edit, names_beside, spoil
from memory import LiveStorage
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import TINY
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.models.export import merge
from lowmem_grpo.models.export.base_weights import Weight, live_weights
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.merge import (
    LoraPair,
    MergeCheck,
    MergeError,
    check_merged,
    read_pairs,
    size_of,
    tiles,
    write_merged,
)
from lowmem_grpo.models.export.stored_weights import stored_weights, tensor_files
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.utils import GIB


def test_shards_together_are_the_model(adapter: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(TINY)
    weights, pairs = stored_weights(TINY, config, "16bit", torch.float32), read_pairs(adapter)
    for folder, size in (("one", GIB), ("many", 300_000)):
        (tmp_path / folder).mkdir()
        write_merged(tmp_path / folder, weights, pairs, torch.bfloat16, size)
    files = tensor_files(tmp_path / "many")
    assert len(set(files.values())) > 5
    assert all(path.stat().st_size < 330_000 for path in files.values())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert len(whole) == len(files) == 74
    for name, tensor in whole.items():
        with safe_open(files[name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
    assert check_merged(tmp_path / "many", files, weights, pairs).merged == 42


@pytest.mark.parametrize(("damage", "message"), [
    (lambda tensors: tensors["model.norm.weight"].mul_(1.02), "model.norm.weight was read back and is not what"),
    (lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3].zero_(), "up_proj.weight was read back and is"),
    (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "model.norm.weight was read back and is not what"),
    (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing or unexpected"),
])
def test_a_damaged_file_is_found_and_nothing_is_left(
    damage: Any, message: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        damage(tensors)
        save_file(tensors, *rest)

    monkeypatch.setattr(merge, "save_file", damaged)
    with pytest.raises(MergeError, match=message):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


def merged_weight(folder: Path, base: torch.Tensor, written: LoraPair, meant: LoraPair) -> MergeCheck:
    """Merge one weight with the pair `written`, and check the file against the pair `meant`."""
    weight = Weight("q.weight", tuple(base.shape), base.dtype, lambda: lambda start, stop: base[start:stop])
    write_merged(folder, [weight], {"q": written}, torch.bfloat16)
    return check_merged(folder, tensor_files(folder), [weight], {"q": meant})


@pytest.mark.parametrize("size", [1e-5, 1e-3])
def test_a_tiny_update_is_kept_on_average_and_a_missing_one_is_noticed(
    size: float, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    base = 0.6 + 0.3 * torch.rand(512, 512, generator=generator)
    pair = LoraPair(torch.randn(4, 512, generator=generator), size * torch.randn(512, 4, generator=generator), 1.0)
    check = merged_weight(tmp_path, base, pair, pair)
    assert check.kept == pytest.approx(1, abs=0.2 if size < 1e-4 else 0.01)
    assert check.worst_rounding <= 1
    with pytest.raises(MergeError, match="not base plus adapter"):
        merged_weight(tmp_path, base, LoraPair(pair.a, 0 * pair.b, 1.0), pair)


def test_an_update_below_the_rounding_of_16_bit_numbers_is_lost(tmp_path: Path) -> None:
    base = (0.6 + 0.3 * torch.rand(64, 64)).bfloat16()  # each of them a 16-bit number already
    pair = LoraPair(torch.randn(4, 64), 1e-4 * torch.randn(64, 4), 1.0)
    assert merged_weight(tmp_path, base, pair, pair).kept == 0


def test_one_tensor_of_an_8b_model_and_one_tile_are_held(tmp_path: Path) -> None:
    rows, width = 14336, 4096
    stored = torch.zeros(rows, width, dtype=torch.bfloat16)
    weight = Weight("up.weight", (rows, width), torch.bfloat16, lambda: lambda start, stop: stored[start:stop])
    pair = LoraPair(torch.zeros(16, width), torch.zeros(rows, 16), 1.0)
    with LiveStorage() as held:
        out = merge.merged_tensor(weight, pair, torch.bfloat16)
    assert out.shape == (rows, width)
    tile = 4 * merge.TILE_ELEMENTS
    assert held.peak < out.nbytes + 4 * tile
    assert all((stop - start) * width <= merge.TILE_ELEMENTS for start, stop in tiles(weight))


def test_the_largest_shard_of_an_8b_model_leaves_most_of_6_gib(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**named_config("llama-3.1-8b"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = live_weights(model)
    sizes = {weight.name: size_of(weight, torch.bfloat16) for weight in weights}
    files = merge.split_of(weights, torch.bfloat16, merge.SHARD_BYTES).filename_to_tensors
    largest = max(sum(sizes[name] for name in names) for names in files.values())
    assert sum(sizes.values()) > 14 * GIB
    assert 2 * largest + 12 * 4 * merge.TILE_ELEMENTS < 3 * GIB  # twice: safetensors may copy what it writes


def test_a_module_that_no_adapter_knows_is_copied(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("steps", torch.tensor(3))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    weights = live_weights(Bare())
    assert [weight.name for weight in weights] == ["inner.weight", "inner.bias", ".steps"]
    write_merged(tmp_path, weights, {}, torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    assert found[".steps"].dtype == torch.int64
    (stored,) = [one for one in stored_weights(tmp_path, None, "16bit", torch.float32) if one.name == ".steps"]
    assert stored.shape == () and torch.equal(stored.open()(0, 1), torch.tensor(3))
    assert check_merged(tmp_path, tensor_files(tmp_path), weights, {}).tensors == 3
    save_file(found | {".steps": torch.tensor(4)}, tmp_path / "model.safetensors")
    with pytest.raises(MergeError, match=r"\.steps was read back and is not what the base model has"):
        check_merged(tmp_path, tensor_files(tmp_path), weights, {})


# Adapters


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_an_adapter_that_is_not_finite_is_refused_by_layer(kind: str, value: float, copy: Path, tmp_path: Path) -> None:
    spoil(copy, value)
    with pytest.raises(AdapterError, match=r"3\.mlp\.up_proj\.lora_[AB]\.weight holds NaN.*older checkpoint"):
        export(copy, kind, tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


def test_scaling_is_pefts(copy: Path) -> None:
    edit(copy, lora_alpha=32, use_rslora=True)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {16.0}
    edit(copy, use_rslora=False)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {8.0}


def test_an_adapter_whose_ranks_do_not_meet_is_refused_by_name(copy: Path) -> None:
    edit(copy, rank_pattern={"q_proj": 2})
    with pytest.raises(AdapterError, match="r=2; one file"):
        read_pairs(copy)
    edit(copy, rank_pattern={})
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name: tensors[name][:, :2].contiguous()}, copy / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"has rank 4 and 2 in .*r=4; one file"):
        read_pairs(copy)
