"""Adapters with random weights, what exports of them leave behind, and stand-ins for llama.cpp and for the hub."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from small_models import scatter

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.__main__ import main
from lowmem_grpo.fast_model import FastPeftModel


def adapted(four_bit: bool, name: str = "tiny", spread: float = 0.05) -> FastPeftModel:
    """A model under an adapter whose factors are both random."""
    bare, _ = FastLanguageModel.from_pretrained(name, max_seq_length=128, load_in_4bit=four_bit)
    return scatter(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False), spread)


def export_command(*words: Any) -> Result:
    """`lowmem-grpo export` with these words."""
    return CliRunner().invoke(main, ["export", *(str(word) for word in words)])


def names_beside(folder: Path) -> list[str]:
    """What an export has left behind, hidden files and all."""
    return sorted(path.name for path in folder.iterdir())


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_record(folder: Path, **changes: Any) -> None:
    record = folder / "base_model.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def spoil(folder: Path, value: float) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "layers.3.mlp.up_proj.lora_B" in name)[0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")


CONVERTER = '''
import json, sys
from pathlib import Path
import numpy
from gguf import GGUFWriter
from safetensors import safe_open

merged, _, out, _, kind = sys.argv[1:]
Path(out).with_suffix(".arguments").write_text(json.dumps(sys.argv[1:]))
writer = GGUFWriter(out, "qwen2")
writer.add_token_list(["a", "b"])
with safe_open(merged + "/model.safetensors", "np") as file:
    for name in list(file.keys()){cut}:
        writer.add_tensor(name, numpy.zeros(file.get_slice(name).get_shape(), "float16"))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
'''


def llama_cpp(folder: Path, script: str) -> Path:
    """A stand-in for llama.cpp's folder."""
    folder.mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(script)
    return folder


class StubHub:
    """Stands in for huggingface_hub.HfApi."""

    def __init__(self, error: Exception | None = None, card: Path | None = None) -> None:
        """`card` is the README.md that the repository has already."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error, self.card = error, card

    def file_exists(self, _repo: str, name: str) -> bool:
        return name == "README.md" and self.card is not None

    def hf_hub_download(self, _repo: str, _name: str) -> str:
        return str(self.card)

    def create_repo(self, **given: Any) -> None:
        self.calls.append(("create_repo", given))

    def upload_folder(self, **given: Any) -> Any:
        if self.error is not None:
            raise self.error
        given["files"] = names_beside(Path(given["folder_path"]))
        self.calls.append(("upload_folder", given))
        return type("Commit", (), {"commit_url": "https://hub/owner/name/commit/1"})()
