"""What the config.json of a folder says before torch is imported, so that what cannot be trained is refused at once."""

from pathlib import Path
from typing import Any

from lowmem_grpo.memory.families import check_family, check_float16
from lowmem_grpo.memory.named_configs import read_config
from lowmem_grpo.models.stored_form import stored_form


def look(folder: str, name: str, dtype: Any) -> None:
    """ValueError for a family that is refused, for weights in a form that is not read, and for a hybrid model in
    float16. A name on the hub is looked at when its config is there."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return
    fields = read_config(file)
    check_family(fields, name)
    stored_form(fields, name)
    if str(dtype).removeprefix("torch.") == "float16":
        check_float16(fields)
