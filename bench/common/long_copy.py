"""A copy of an embedded model that takes long sequences, which transformers' own loaders read, too."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

CONTEXT = 32768  # tokens; programs and notebooks ask for more than an embedded model's own 2,048


def long_copy(model: str, folder: Path) -> str:
    """The path of a copy of the embedded `model`, in `folder`, which is made."""
    shutil.copytree(str(files("lowmem_grpo") / "assets" / model), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return str(folder)
