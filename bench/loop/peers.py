"""TRL's steps: its GRPOTrainer with vLLM in the same process, or with transformers' generation; and Unsloth's, which
patches that trainer. Each runs in its own environment, so functions import what they need."""

import dataclasses
import os
from typing import Any

from bench.loop.inputs import TARGETS, Patience, engine_share
from bench.loop.phase_watch import PhaseWatch

SHOWN = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "loss_type", "gradient_checkpointing",
         "use_vllm", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")  # settings that a row records

def timed(base: type, watch: PhaseWatch) -> type:
    """Return a GRPOTrainer class whose phases are timed."""

    class TimedTrainer(base):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with watch.phase("train"):
                return super().training_step(*args, **kwargs)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:  # inside training_step
            with watch.phase("score"):
                return super()._prepare_inputs(*args, **kwargs)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:  # inside _prepare_inputs
            with watch.phase("generate"):
                return super()._generate_single_turn(*args, **kwargs)

    return TimedTrainer


class TimedSampler:
    """TRL's vLLM; updates of its weights are timed as a separate phase."""

    def __init__(self, inner: Any, watch: PhaseWatch) -> None:
        self.inner, self.watch = inner, watch

    def sync_weights(self) -> None:
        with self.watch.phase("switch"):
            self.inner.sync_weights()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def listener(watch: PhaseWatch, patience: Patience) -> Any:
    """Return a callback that times steps from end to end, and the optimizer; it stops training when time is short."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin_step()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watch.enter("optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watch.leave()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.end_step()
            control.should_training_stop |= not patience.another(watch.steps)
            watch.begin_step()

    return Steps()


def settings(options: Any, outputs: str, use_vllm: bool, four_bit: bool) -> dict[str, Any]:
    """Return GRPOConfig's options: those of our run, with micro-batches of `--batch` completions, by default one."""
    work, size, batch = options.work, options.work.size, options.batch or 1
    if size.sequences % batch:
        raise ValueError(f"a micro-batch has {batch} completions; this must divide the {size.sequences} of a step")
    common = {
        "output_dir": outputs, "max_steps": options.all_steps, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": size.sequences // batch, "num_generations": size.n,
        "max_completion_length": size.completion_tokens, "learning_rate": work.learning_rate, "beta": 0.0,
        "loss_type": options.loss_type, "temperature": 1.0, "seed": 0, "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "shuffle_dataset": False,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": work.checkpointing, "bf16": work.dtype == "bfloat16",
        "use_cpu": options.device == "cpu", "dataloader_pin_memory": options.device != "cpu",
    }
    if not use_vllm:
        whole = {"generation_kwargs": {"min_new_tokens": size.completion_tokens}} if work.whole else {}
        return common | {"use_vllm": False, **whole}
    return common | {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": size.context,
        "vllm_gpu_memory_utilization": engine_share(size, four_bit, options.gib),
        "vllm_enable_sleep_mode": options.gib is not None,  # off by default; users turn it on when memory is short
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }


def load(options: Any, four_bit: bool) -> Any:
    """Return the model unquantized, or in bitsandbytes' NF4."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    place = {"device_map": {"": options.device}} if options.device != "cpu" or four_bit else {}
    return AutoModelForCausalLM.from_pretrained(
        str(options.folder), dtype=options.work.dtype, quantization_config=quantized if four_bit else None,
        trust_remote_code=False, **place
    )


def train(options: Any, watch: PhaseWatch, model: Any, tokenizer: Any, config: dict[str, Any], **more: Any) -> Any:
    """Make all steps; return the tokens of each, and the settings."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    work = options.work
    if "max_prompt_length" in {field.name for field in dataclasses.fields(GRPOConfig)}:  # older versions cut prompts
        config = config | {"max_prompt_length": work.size.prompt_tokens}
    trainer = timed(GRPOTrainer, watch)(
        model=model, reward_funcs=[work.reward], args=GRPOConfig(**config), processing_class=tokenizer,
        train_dataset=Dataset.from_list(work.rows(tokenizer, options.all_steps)), **more,
    )
    if getattr(trainer, "vllm_generation", None) is not None:
        trainer.vllm_generation = TimedSampler(trainer.vllm_generation, watch)
    trainer.add_callback(listener(watch, options.patience))
    trainer.train()
    return {"tokens": work.reward.tokens, "config": {name: config[name] for name in SHOWN if name in config}}


def run_trl(options: Any, watch: PhaseWatch, outputs: str, use_vllm: bool, four_bit: bool) -> dict[str, Any]:
    """Make TRL's steps with its LoRA."""
    import trl  # noqa: F401 - if it is not installed, fail before a model is loaded
    from peft import LoraConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(options.folder), padding_side="left", trust_remote_code=False)
    lora = LoraConfig(**options.work.lora, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    config = settings(options, outputs, use_vllm, four_bit)
    found = train(options, watch, load(options, four_bit), tokenizer, config, peft_config=lora)
    found["config"]["weights"] = "nf4" if four_bit else {"bfloat16": "bf16", "float32": "fp32"}[options.work.dtype]
    return found


def run_unsloth(options: Any, watch: PhaseWatch, outputs: str) -> dict[str, Any]:
    """Make Unsloth's steps: its 4-bit model, its vLLM on the same weights, its defaults where it lacks our settings."""
    if options.gib is not None:  # frees the cache while it trains; must be set before the import
        os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    import torch
    import unsloth  # first, because it patches what the others import

    size, lora = options.work.size, options.work.lora
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(options.folder), max_seq_length=size.context, load_in_4bit=True, fast_inference=True,
        max_lora_rank=lora["r"], dtype=torch.bfloat16, gpu_memory_utilization=engine_share(size, True, options.gib),
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model, **lora, lora_dropout=0, target_modules=TARGETS, use_gradient_checkpointing="unsloth", random_state=0,
    )
    config = settings(options, outputs, use_vllm=True, four_bit=True)
    for name in ("vllm_enable_sleep_mode", "vllm_max_model_length", "shuffle_dataset"):
        config.pop(name)  # the engine is made above, and its TRL may be older
    found = train(options, watch, model, tokenizer, config)
    found["config"]["weights"] = "nf4"
    return found
