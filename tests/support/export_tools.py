"""Stand-ins for the programs of llama.cpp and for the hub."""

from pathlib import Path
from typing import Any

from adapters import names_beside

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

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, **given: Any) -> None:
        self.calls.append(("create_repo", given))

    def upload_folder(self, **given: Any) -> Any:
        if self.error is not None:
            raise self.error
        given["files"] = names_beside(Path(given["folder_path"]))
        self.calls.append(("upload_folder", given))
        return type("Commit", (), {"commit_url": "https://hub/owner/name/commit/1"})()
