"""The factors of an adapter, and adapters that cannot be merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from export_tools import edit, names_beside, spoil

from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.merge import read_pairs
from lowmem_grpo.runs.saved_adapter import AdapterError


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_an_adapter_that_is_not_finite_is_refused_by_layer(kind: str, value: float, copy: Path, tmp_path: Path) -> None:
    spoil(copy, value)
    with pytest.raises(AdapterError, match=r"3\.mlp\.up_proj\.lora_[AB]\.weight holds NaN.*older checkpoint"):
        export(copy, kind, tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


@pytest.mark.parametrize(("change", "message"), [
    ({"use_dora": True}, "use_dora=True, and only plain LoRA is merged here"), ({"bias": "all"}, "bias='all'"),
    ({"peft_type": "IA3"}, "type IA3; only LoRA"), ({"rank_pattern": {"q_proj": 2}}, "r=2; one file"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
])
def test_what_is_not_plain_lora_is_refused_by_name(change: dict[str, Any], message: str, copy: Path) -> None:
    edit(copy, **change)
    with pytest.raises(AdapterError, match=message):
        read_pairs(copy)


def test_scaling_is_pefts(copy: Path) -> None:
    edit(copy, lora_alpha=32, use_rslora=True)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {16.0}
    edit(copy, use_rslora=False)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {8.0}
