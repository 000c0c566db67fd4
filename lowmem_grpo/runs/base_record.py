"""Which base model a saved adapter was trained on, and how it was held: a file beside the adapter."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASE_FILE = "base_model.json"


@dataclass(frozen=True)
class BaseRecord:
    """What `FastLanguageModel.from_pretrained` was given, as far as it decides the weights. None: not known."""

    model: str | None
    load_in_4bit: bool | None = None
    dtype: str | None = None  # "bfloat16"
    revision: str | None = None

    def write(self, folder: Path) -> None:
        """Put it beside the adapter; a folder is named by its whole path."""
        local = self.model is not None and Path(self.model).is_dir()
        fields = asdict(self) | ({"model": str(Path(str(self.model)).absolute())} if local else {})
        (folder / BASE_FILE).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def base_of_adapter(folder: Path) -> BaseRecord:
    """What is known of the base: this package's record, or the name alone that PEFT keeps. ValueError for a broken
    record."""
    own = folder / BASE_FILE
    if own.is_file():
        try:
            return BaseRecord(**json.loads(own.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{own} cannot be read ({error}); name the base with --base, and how it was held with "
                             "--load-in-4bit or --16bit") from error
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'adapter_config.json'} cannot be read: {error}") from error
    return BaseRecord(config.get("base_model_name_or_path") or None)
