"""Rollouts by vLLM in this process, on the trainer's own tensors: no second copy, nothing to sync."""

import gc
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.stopping import budget_of, cut_at_stop, eos_token_ids
from lowmem_grpo.engines.vllm_import import EngineUnavailableError, import_borrowing
from lowmem_grpo.policy import Policy
from lowmem_grpo.sampling import SamplingParams
from lowmem_grpo.types import Rollout

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30  # of the key-value cache on the CPU, where no card's memory says how much
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decoding replays CUDA graphs


class VLLMEngine:
    """One at a time in a process; `close` lets go of the trainer's tensors and of the cache."""

    name = "vllm"
    living: "VLLMEngine | None" = None

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int,
        gpu_memory_utilization: float = 0.5, kv_cache_bytes: int | None = None, max_num_seqs: int = 256,
        enforce_eager: bool | None = None,
    ) -> None:
        """`kv_cache_bytes` sizes the key-value cache; None takes what `gpu_memory_utilization` of the card leaves.

        `enforce_eager=None` decodes by CUDA graphs on a card, and without them elsewhere. Raises
        EngineUnavailableError where vLLM cannot be used, BorrowError where the model does not map onto vLLM's, and
        ValueError where the cache is too small for one sequence.
        """
        if VLLMEngine.living is not None:
            raise EngineUnavailableError("a vLLM engine lives in this process already; close() it first")
        self.policy, self.tokenizer, self.max_seq_length = policy, tokenizer, max_seq_length
        self.policy_version, self.kv_bytes = 0, 0
        self.kv_budget = kv_cache_bytes or default_kv_bytes(policy, gpu_memory_utilization)
        check_kv_budget(policy, self.kv_budget, max_seq_length)
        self.max_num_seqs = max_num_seqs
        self.on_card = policy.device.type == "cuda"
        self.eager = not self.on_card if enforce_eager is None else enforce_eager
        self.eos_ids = eos_token_ids(policy, tokenizer)
        self.start()

    def start(self) -> None:
        """Make vLLM's engine around the trainer's tensors."""
        borrow = import_borrowing()
        self.borrowing = borrow.Borrowing(self.policy.base, torch.ones((), device=self.policy.device))
        with tempfile.TemporaryDirectory(prefix="lowmem_grpo_") as folder, borrow.lending(self.borrowing):
            write_config(self.policy, self.tokenizer, Path(folder))
            try:
                self.llm = self.make_llm(folder, borrow.NAME)
            except BaseException:
                self.borrowing.close()
                raise
        self.asleep, self.kv_bytes = False, self.kv_budget
        VLLMEngine.living = self

    def make_llm(self, folder: str, name: str) -> Any:
        import vllm

        return vllm.LLM(
            folder, quantization=name, load_format=name, dtype=self.policy.head.weight.dtype, model_impl="vllm",
            max_model_len=self.max_seq_length, max_num_seqs=self.max_num_seqs, kv_cache_memory_bytes=self.kv_budget,
            enforce_eager=self.eager, compilation_config=None if self.eager else GRAPHS,
            enable_sleep_mode=self.on_card, enable_prefix_caching=True, logprobs_mode="processed_logprobs",
            generation_config="vllm", disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Rollout]]:
        """n rollouts of each prompt. An engine that dies is made anew once and the call repeated; a second death, or
        a call that cannot be right, raises."""
        if not prompts:
            return []
        budgets = [budget_of(prompt, params, self.max_seq_length) for prompt in prompts]
        self.borrowing.check()
        self.wake()
        try:
            return self.run(prompts, params, budgets)
        except (ValueError, TypeError, KeyboardInterrupt):
            raise
        except Exception as error:  # noqa: BLE001 - whatever killed the engine, one fresh engine gets the same call
            logger.warning("vLLM's engine died (%s: %s); making a new one and repeating this call once",
                           type(error).__name__, error)
        self.restart()
        return self.run(prompts, params, budgets)

    def run(self, prompts: list[list[int]], params: SamplingParams, budgets: list[int]) -> list[list[Rollout]]:
        """One call of vLLM."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        settings = [self.sampling(params, budget) for budget in budgets]
        outputs = self.llm.generate(requests, settings, use_tqdm=False)
        return [[self.rollout(output, params) for output in request.outputs] for request in outputs]

    def sampling(self, params: SamplingParams, budget: int) -> Any:
        """vLLM's form of our settings: ending tokens are ours, and detokenizing is needed for stop strings alone."""
        import vllm

        ending = [*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_ids)]
        return vllm.SamplingParams(
            n=params.n, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
            min_p=params.min_p or 0.0, max_tokens=budget, seed=params.seed, stop=params.stop_strings or None,
            stop_token_ids=ending, ignore_eos=True, include_stop_str_in_output=True, logprobs=0,
            detokenize=bool(params.stop_strings),
        )

    def rollout(self, output: Any, params: SamplingParams) -> Rollout:
        """A completion of vLLM as ours, with the log-probability of each sampled token."""
        ids = list(output.token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
        return Rollout(
            ids, logprobs, "stop" if output.finish_reason == "stop" else "length", cut_at_stop(text, params),
            self.policy_version,
        )

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Inside, completions come from the base model: the adapter is multiplied by 0, on the device."""
        self.borrowing.switch.zero_()
        self.llm.reset_prefix_cache()
        try:
            yield
        finally:
            self.borrowing.switch.fill_(1)
            self.llm.reset_prefix_cache()

    def on_policy_update(self, policy_version: int) -> None:
        """The weights are the trainer's: only cached prefixes are of the old policy."""
        self.policy_version = policy_version
        if not self.asleep:
            self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the key-value cache on a card (the weights are not vLLM's); on the CPU vLLM cannot, nothing happens."""
        if self.on_card and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep, self.kv_bytes = True, 0

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep, self.kv_bytes = False, self.kv_budget
            self.llm.reset_prefix_cache()  # the cache came back empty

    def restart(self) -> None:
        """A fresh engine around the same tensors."""
        self.close()
        self.start()

    def close(self) -> None:
        """Free the cache and everything else of vLLM's; the trainer's tensors stay."""
        if VLLMEngine.living is not self:
            return
        VLLMEngine.living = None
        self.borrowing.close()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.kv_bytes = None, 0
        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()


def write_config(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The model's config as vLLM reads it (without the quantization, which is ours to do), and the tokenizer."""
    config = policy.base.config
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(policy.base).__name__]
    type(config).from_dict(values).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def kv_bytes_of(policy: Policy, tokens: int) -> int:
    """Bytes of keys and values of one sequence of `tokens` tokens, without sliding windows."""
    config = policy.base.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * policy.head.weight.dtype.itemsize * tokens


def check_kv_budget(policy: Policy, budget: int, max_seq_length: int) -> None:
    """Raise ValueError where one sequence of the longest length does not fit."""
    needed = kv_bytes_of(policy, max_seq_length)
    if budget < needed:
        raise ValueError(
            f"the key-value cache has {budget:,} bytes; one sequence of max_seq_length={max_seq_length} needs "
            f"{needed:,}. Raise gpu_memory_utilization or kv_cache_bytes, or lower max_seq_length"
        )


def default_kv_bytes(policy: Policy, utilization: float) -> int:
    """What `utilization` of the card leaves beside what is in use; a fixed size on the CPU."""
    if policy.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(policy.device)
    return max(0, int(utilization * total) - (total - free))
