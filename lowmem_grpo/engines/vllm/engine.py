"""Rollouts by vLLM in this process, on the trainer's own frozen weights; the adapter is copied before each call."""

import gc
import logging
import math
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import OnGroup
from lowmem_grpo.engines.stopping import budget_of, cut_at_stop, eos_token_ids
from lowmem_grpo.engines.told import Told
from lowmem_grpo.engines.vllm import pool as vllm_pool
from lowmem_grpo.engines.vllm import sampling_weights as wide
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError, import_borrowing
from lowmem_grpo.engines.vllm.lent_adapter import AdapterCopy
from lowmem_grpo.engines.vllm.loan import Borrowing, active_adapter, loras_of
from lowmem_grpo.engines.vllm.process_state import seeds_of, undisturbed
from lowmem_grpo.engines.vllm.steps import Work, outputs
from lowmem_grpo.memory.bounds import RolloutBound, RunMemory, Shortage, free, is_out_of_memory, tried
from lowmem_grpo.memory.cards import sequences_at_once
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout
from lowmem_grpo.units import size_text

logger = logging.getLogger(__name__)

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decoding replays CUDA graphs
COLDEST = 0.01  # vLLM raises lower temperatures to this one


class VLLMEngine:
    """One at a time in a process; `close` lets go of the trainer's tensors and of the cache."""

    name = "vllm"
    living: "weakref.ref[VLLMEngine] | None" = None
    clean = True  # vLLM's memory pool, of which a process has one

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int,
        gpu_memory_utilization: float = 0.5, kv_cache_bytes: int | None = None,
        max_num_seqs: int | None = None, enforce_eager: bool | None = None, rollout_copy: bool = False,
        sampling_weights: str | None = None, bound: RolloutBound | None = None, sampled: int | None = None,
    ) -> None:
        """`kv_cache_bytes` sizes the key-value cache; None takes what `gpu_memory_utilization` of the card leaves.
        `max_num_seqs` sequences are decoded together; None takes the `sampled` ones of a call, as far as the cache has
        room. More may be asked for at any time: they wait.

        `enforce_eager=None` decodes by CUDA graphs on a card, and without them elsewhere. With `rollout_copy` the
        engine samples with a copy of the adapter as it was at the last `on_policy_update`, so that it can be trained
        meanwhile. `sampling_weights="16bit"` dequantizes 4-bit weights once for each phase of sampling, "4bit" never;
        None does it on a card where memory has room for it. `bound` is what memory had room for before.

        Raises EngineUnavailableError where vLLM cannot be used, BorrowError where the model does not map onto vLLM's,
        ValueError where the cache is too small for one sequence, and MemoryExhaustedError where even such a cache
        cannot be had.
        """
        check_alone()
        self.policy, self.tokenizer, self.max_seq_length = policy, tokenizer, max_seq_length
        self.given_seqs, self.sampled = max_num_seqs, sampled
        self.bound = bound or RunMemory().rollout  # on max_num_seqs, and on the cache
        self.on_card = self.sleeps = vllm_settings.on_card(policy)
        free(policy.device)
        self.eager = not self.on_card if enforce_eager is None else enforce_eager
        given = kv_cache_bytes is not None
        if kv_cache_bytes is None:
            kv_cache_bytes = vllm_settings.default_kv_bytes(policy, gpu_memory_utilization)
        self.vllm, self.least_cache = import_borrowing(), vllm_settings.least_kv_bytes(policy, max_seq_length)
        self.sampling_weights, kv_cache_bytes = self.choose_weights(sampling_weights, kv_cache_bytes, given)
        if self.bound.kv_bytes is None:  # else too much was asked for before, and is met as any shortage
            vllm_settings.check_kv_budget(policy, kv_cache_bytes, max_seq_length)
        self.kv_budget, self.kv_bytes = kv_cache_bytes, 0
        self.policy_version, self.asleep, self.base = 0, False, False
        self.llm: Any = None
        self.eos_ids = eos_token_ids(policy, tokenizer)
        self.vllm.check_architecture(type(policy.base).__name__)
        self.adapter = active_adapter(policy.base)
        self.copy = self.make_copy() if rollout_copy else None
        self.in_less_memory(self.start_surely)

    def choose_weights(self, asked: str | None, kv_bytes: int, given: bool) -> tuple[str, int]:
        """The form of 4-bit weights to sample with, and the bytes left for the cache."""
        sequences = self.given_seqs or sequences_at_once(self.sampled, kv_bytes // self.least_cache)
        form, left = wide.choose(asked, self.policy, kv_bytes, given, sequences, self.max_seq_length)
        if form == wide.FOUR or self.eager:
            return form, left
        why = vllm_pool.why_not()
        if why and asked is not None:
            raise EngineUnavailableError(f'sampling_weights="16bit" cannot be had: {why}. Leave it out, or load with '
                                         "enforce_eager=True, which needs no fixed addresses")
        if why:
            logger.warning("sampling with weights in 4 bits, though there is room for 16: %s", why)
        return (form, left) if not why else (wide.FOUR, kv_bytes)

    def weight_room(self) -> wide.Room | None:
        """Where dequantized weights lie: CUDA graphs need addresses that last, which vLLM's pool has."""
        if self.sampling_weights == wide.FOUR:
            return None
        return wide.PlainRoom() if self.eager else vllm_pool.SleepingRoom()

    def make_copy(self) -> AdapterCopy:
        """Two slots, which a new engine takes over: what was published stays published."""
        with torch.inference_mode(False):
            dtype = self.policy.head.weight.dtype
            return AdapterCopy(loras_of(self.policy.base, self.adapter), dtype, self.policy.device, published=True)

    def start_surely(self) -> None:
        """`start`, and once more without sleep where the driver or this vLLM has no memory pool for it."""
        try:
            return self.start()
        except (RuntimeError, ValueError, AssertionError) as error:
            if not self.sleeps or not vllm_pool.is_missing(error):
                raise
            self.sleeps = False
            self.sampling_weights = self.sampling_weights if self.eager else wide.FOUR
            logger.warning("vLLM has no memory pool here (%s): the key-value cache of %s stays on the card while "
                           "training", str(error).splitlines()[0], size_text(self.fitting_cache))
        self.start()  # not in the handler: the error's traceback holds on to what was made

    def start(self) -> None:
        """Make vLLM's engine around the trainer's tensors."""
        if not VLLMEngine.clean:
            vllm_pool.reset()
        vllm_settings.check_room(self.policy.device, self.fitting_cache)
        VLLMEngine.clean = not self.on_card  # until it has started: a start that breaks off leaves the pool as it is
        with torch.inference_mode(False):
            self.borrowing = Borrowing(
                self.policy.base, self.policy.device, self.adapter, self.copy, self.weight_room()
            )
        with tempfile.TemporaryDirectory(prefix="lowmem_grpo_") as folder, self.vllm.lending(self.borrowing):
            vllm_settings.write_config(self.policy, self.tokenizer, self.max_seq_length, Path(folder))
            try:
                with undisturbed(self.policy.device):
                    self.llm = self.make_llm(folder)
            except BaseException as error:
                self.borrowing.close()
                self.vllm.cleanup_dist_env_and_memory()
                vllm_settings.explain(error, self.policy)
                raise
        if self.borrowing.wide is None:
            self.sampling_weights = wide.FOUR
        VLLMEngine.clean, self.asleep, self.seqs = True, False, self.fitting_seqs
        self.cache = self.kv_bytes = self.fitting_cache
        self.prefixes: Hashable = None  # what the cached prefixes were computed with
        self.ending = weakref.finalize(self, end, self.llm, self.borrowing)
        VLLMEngine.living = weakref.ref(self)

    def make_llm(self, folder: str) -> Any:
        name = self.vllm.NAME
        return self.vllm.LLM(
            folder, quantization=name, load_format=name, dtype=self.policy.head.weight.dtype, model_impl="vllm",
            max_model_len=self.max_seq_length, max_num_seqs=self.fitting_seqs, kv_cache_memory_bytes=self.fitting_cache,
            enforce_eager=self.eager, compilation_config=None if self.eager else GRAPHS,
            enable_sleep_mode=self.sleeps, enable_prefix_caching=True, logprobs_mode="processed_logprobs",
            generation_config="vllm", disable_log_stats=True,
            **vllm_settings.memory_share(self.policy, self.fitting_cache),
            **vllm_settings.prefill(self.policy, self.max_seq_length, self.fitting_seqs),
        )

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """n rollouts of each prompt. An engine that dies is made anew once and asked for what is missing; a second
        death, or a call that cannot be right, raises. One that runs out of memory, in waking too, is made anew with a
        smaller cache: see `do_less`."""
        self.check_open()
        if not prompts:
            return []
        check_temperature(params)
        check_vocabulary(prompts, self.policy.head.weight.shape[0])
        told = Told(len(prompts), on_group)
        budgets = [budget_of(prompt, params, self.max_seq_length) for prompt in prompts]
        work = Work(prompts, params, self.settings(params, budgets))
        self.in_less_memory(lambda: self.run_surely(work, told))
        return told.result()

    def in_less_memory(self, attempt: Callable[[], None]) -> None:
        """Make the attempt until memory has room for it."""
        while isinstance(done := tried(attempt, self.policy.device), Shortage):
            if not self.back_to_four(done):
                self.do_less(done)

    def back_to_four(self, shortage: Shortage) -> bool:
        """Where memory ran out beside dequantized weights, these go first: whether there were any. The engine that
        the next attempt makes computes with the 4-bit ones."""
        if self.sampling_weights == wide.FOUR:
            return False
        self.bound.note("sampling with weights in 16 bits", shortage,
                        "the 4-bit kernels serve for the rest of the run, and the work is repeated")
        self.sampling_weights = wide.FOUR
        self.close()
        return True

    def do_less(self, shortage: Shortage) -> None:
        """Halve the key-value cache, down to one sequence of the longest length; and the sequences, where it was not
        the cache that could not be had. MemoryExhaustedError where neither can be less."""
        sampling = self.llm is not None and not self.asleep
        what = f"sampling at most {self.fitting_seqs} at once" if sampling else "making room for vLLM's cache"
        before, less = self.fitting_cache, max(self.least_cache, self.fitting_cache // 2)
        seqs, fewer = self.fitting_seqs, max(1, self.fitting_seqs // 2) if sampling else self.fitting_seqs
        if (less, fewer) == (before, seqs):
            self.bound.end(f"{what} ({size_text(before)}, what one sequence of max_seq_length={self.max_seq_length} "
                           "needs)", shortage)
        self.bound.kv_bytes = less
        if sampling:
            self.bound.lowered = fewer
        answer = f"for at most {fewer:,} sequences at once (before: {seqs:,}) and " if sampling else ""
        self.bound.note(what, shortage, f"vLLM's engine is made anew {answer}with {size_text(less)} of key-value cache "
                                        f"(before: {size_text(before)}), and the work is repeated")

    @property
    def fitting_cache(self) -> int:
        """Bytes of the cache that was asked for, or what memory had room for; one sequence always fits."""
        return max(self.bound.cache_under(self.kv_budget) or 0, self.least_cache)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded together where memory has room: as given by name, else what a run samples."""
        if self.given_seqs is not None:
            return self.given_seqs
        return sequences_at_once(self.sampled, self.kv_budget // self.least_cache)

    def expect(self, sampled: int) -> None:
        """A run is about to sample so many completions in each call. An engine for fewer is made anew for them."""
        if sampled > self.seqs:
            self.sampled = sampled

    @property
    def fitting_seqs(self) -> int:
        """max_num_seqs, or what memory had room for."""
        bound = self.bound.under(self.max_num_seqs)
        return self.max_num_seqs if bound is None else bound

    @property
    def outdated(self) -> bool:
        """Whether the living engine is of no use: broken off in a call, or made for other bounds than hold now."""
        return self.llm is None or self.unfinished or (self.seqs, self.cache) != (self.fitting_seqs, self.fitting_cache)

    def run_surely(self, work: Work, told: Told) -> None:
        """`run`, once more in a new engine where that dies; and in a new one where the old is of no use."""
        if self.outdated:
            self.restart()  # a call that was broken off would leave its sequences to the next one
        try:
            return self.run(work, told)
        except Exception as error:
            in_use = self.unfinished or self.asleep  # asleep: it did not wake
            hopeless = isinstance(error, ValueError | TypeError) or told.failed or not in_use
            if hopeless or is_out_of_memory(error):
                raise  # nothing that a fresh engine would do better
            logger.warning("vLLM's engine died (%s: %s); making a new one and repeating this call once",
                           type(error).__name__, error)
        self.restart()  # not in the handler: the error's traceback holds on to the old engine
        self.run(work, told)

    @property
    def unfinished(self) -> bool:
        """Whether vLLM was stopped in the middle of a call."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def run(self, work: Work, told: Told) -> None:
        """One call of vLLM for all that is missing, by the policy as the trainer would compute with it now."""
        self.borrowing.check()
        self.wake()
        self.borrowing.fill_weights()
        identity = self.borrowing.take(self.base)
        with undisturbed(self.policy.device):
            version = self.policy_version if self.copy is None else self.copy.version
            self.forget_prefixes(identity if identity == "base" else (identity, version))
            missing = told.missing
            for place, request in outputs(self.llm, work, missing, stepwise=told.on_group is not None):
                with told.ours():
                    rollouts = [self.rollout(output, work.params, version) for output in request.outputs]
                    told.tell(missing[place], rollouts)

    def settings(self, params: SamplingParams, budgets: list[int]) -> list[Any]:
        """vLLM's form of our settings for each prompt: ending tokens are ours, and text is for stop strings alone."""
        ending = [*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_ids)]
        return [
            self.vllm.SamplingParams(
                n=params.n, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
                min_p=params.min_p or 0.0, max_tokens=budget, seed=seed, stop=params.stop_strings or None,
                stop_token_ids=ending, ignore_eos=True, include_stop_str_in_output=True, logprobs=0,
                detokenize=bool(params.stop_strings), skip_special_tokens=False,
            )
            for seed, budget in zip(seeds_of(params.seed, len(budgets)), budgets, strict=True)
        ]

    def rollout(self, output: Any, params: SamplingParams, version: int) -> Rollout:
        """A completion of vLLM as ours, with the log-probability of each sampled token."""
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM gave up a completion ({output.finish_reason}); look at its log")
        ids = list(output.token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        if any(map(math.isnan, logprobs)):
            raise ArithmeticError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning "
                                  "rate")
        text = str(self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
        return Rollout(ids, logprobs, output.finish_reason, cut_at_stop(text, params), version)

    def forget_prefixes(self, identity: Hashable) -> None:
        """Drop cached prefixes that were computed with something else than `identity`."""
        if identity != self.prefixes and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its cached prefixes: it holds requests that are not ours")
        self.prefixes = identity

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Inside, completions come from the base model: the adapter's strength is 0, on the device."""
        self.check_open()
        before, self.base = self.base, True
        try:
            yield
        finally:
            self.base = before

    def on_policy_update(self, policy_version: int) -> None:
        """What was cached with the old weights is dropped before the next call, which also begins with a copy of the
        adapter as it is then: nothing is moved now. A rollout copy takes over the adapter as it is now (the same as
        `publish`). An engine that was closed has nothing to forget."""
        self.policy_version = policy_version
        if self.llm is not None:
            self.borrowing.publish(policy_version)

    publish = on_policy_update

    def sleep(self) -> None:
        """Free dequantized weights, and the key-value cache on a card (the other weights are not vLLM's). On the CPU,
        and on a card where vLLM has no memory pool, it cannot free its cache."""
        if self.llm is not None:
            self.borrowing.drop_weights()
        if self.sleeps and self.llm is not None and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep, self.kv_bytes = True, 0

    def wake(self) -> None:
        """Map the cache again. What torch has cached of the training step is given back first: vLLM's pool cannot take
        it. Where memory has no room all the same, the error says so, and all of it sleeps on."""
        self.check_open()
        if not self.asleep:
            return
        free(self.policy.device)
        vllm_settings.check_room(self.policy.device, self.cache)
        try:
            self.llm.wake_up()
        except BaseException:
            vllm_pool.unmap(self.llm)
            raise
        self.asleep, self.kv_bytes, self.prefixes = False, self.cache, None  # the cache came back empty

    def restart(self) -> None:
        """A fresh engine around the same tensors."""
        self.close()
        self.start_surely()

    def close(self) -> None:
        """Free the cache and everything else of vLLM's; the trainer's tensors stay. Twice is once."""
        if self.llm is None:
            return
        self.llm, self.kv_bytes, VLLMEngine.living = None, 0, None
        self.ending()
        free(self.policy.device)

    def check_open(self) -> None:
        if self.llm is None:
            raise EngineUnavailableError("this engine was closed; make a new one")


def end(llm: Any, borrowing: Borrowing) -> None:
    """Shut vLLM down and let go of the trainer's tensors; also when an engine is deleted without `close`. What sleeps
    is unmapped already, and the pool stumbles over unmapping it again: it is woken first, where memory has room.
    """
    borrowing.close()
    try:
        VLLMEngine.clean = vllm_pool.woken(llm)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - a dead engine may fail in any way, and has to go all the same
        VLLMEngine.clean = False
        logger.warning("vLLM's engine did not end cleanly (%s: %s)", type(error).__name__, error)


def check_alone() -> None:
    """Raise EngineUnavailableError where another engine lives."""
    if VLLMEngine.living is not None and VLLMEngine.living() is not None:
        gc.collect()  # it may be unreachable already
    other = None if VLLMEngine.living is None else VLLMEngine.living()
    if other is not None and other.llm is not None:
        raise EngineUnavailableError("a vLLM engine lives in this process already; close() it first")


def check_temperature(params: SamplingParams) -> None:
    """Raise ValueError for a temperature that vLLM would silently change."""
    if 0 < params.temperature < COLDEST:
        raise ValueError(f"temperature is {params.temperature}; vLLM samples at 0 (greedy) or from {COLDEST} on")


def check_vocabulary(prompts: list[list[int]], size: int) -> None:
    """Raise ValueError for a token that the model does not know."""
    for number, prompt in enumerate(prompts):
        unknown = [token for token in prompt if not 0 <= token < size]
        if unknown:
            raise ValueError(f"prompt {number} has the token {unknown[0]}; the model's tokens are 0 to {size - 1}")
