"""Rollouts by vLLM in this process, on the trainer's own frozen weights; the adapter is copied before each call."""

import logging
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import FOUR
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import EVERYTHING, Conversation, Meanwhile, OnGroup
from lowmem_grpo.engines.progress import Calls, ExpectedLengths, Pace
from lowmem_grpo.engines.vllm import pool as vllm_pool
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError, import_plugin
from lowmem_grpo.engines.vllm.process_state import PROCESS, check_alone, end, explain, random_states_kept
from lowmem_grpo.engines.vllm.requests import CallSampling, OpenTurns, Prompts, Steps
from lowmem_grpo.engines.vllm.settings import Capacity
from lowmem_grpo.engines.vllm.shared_linear import check_family
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing, active_adapter
from lowmem_grpo.memory.cards import AUTO, in_8_bits
from lowmem_grpo.memory.oom import OutOfMemory, RolloutLimit, catch_oom, free, is_out_of_memory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)


class VLLMEngine:
    """vLLM around the trainer's tensors, one at a time in a process; `close` returns them and frees the cache."""

    name = "vllm"
    capabilities = EVERYTHING

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int,
                 gpu_memory_utilization: float = 0.5, kv_cache_bytes: int | None = None,
                 max_num_seqs: int | None = None, enforce_eager: bool | None = None,
                 sampling_weights: str | None = None, bound: RolloutLimit | None = None, sampled: int | None = None,
                 block_size: int | None = None, kv_cache_dtype: str = AUTO) -> None:
        """`kv_cache_bytes` sizes the key-value cache; None takes what `gpu_memory_utilization` of the card leaves.
        `max_num_seqs` sequences are decoded together; None takes the `sampled` ones of a call, as far as the cache has
        room. A call may ask for more at any time: the rest waits. `block_size` is that of the cache, in tokens; None
        takes vLLM's own, and 32 for contexts of at most 2,048 tokens on the CPU. `kv_cache_dtype` is what its keys and
        values are held in: "auto" for the model's dtype, or "fp8", "fp8_e4m3" and "fp8_e5m2" for 8-bit floats.

        `enforce_eager=None` decodes with CUDA graphs on a card, and without them elsewhere. `sampling_weights="16bit"`
        dequantizes 4-bit weights once for each phase of sampling, "4bit" never; None does it on a card where memory has
        room for it. `bound` is what memory had room for before.

        Raises EngineUnavailableError where vLLM cannot be used, BorrowError where the model does not map onto vLLM's,
        ValueError where the cache is too small for one sequence, and MemoryExhaustedError where memory does not even
        have room for such a cache.
        """
        check_alone()
        check_family(policy.base.config, policy.head.weight.dtype, policy.device)
        self.policy, self.tokenizer, self.max_seq_length = policy, tokenizer, max_seq_length
        self.on_card = self.sleeps = vllm_settings.on_card(policy)
        free(policy.device)
        self.tells_routes = policy.routed_layers > 0
        self.eager = vllm_settings.is_eager(policy, enforce_eager)
        self.vllm = import_plugin()
        self.capacity = Capacity(policy, max_seq_length, kv_cache_bytes, gpu_memory_utilization, max_num_seqs, sampled,
                                 bound, block_size, kv_cache_dtype)
        self.sampling_weights, self.capacity.kv_budget = vllm_pool.choose_for_engine(
            sampling_weights, policy, self.capacity, self.eager)
        self.capacity.check(policy)
        self.kv_bytes, self.policy_version, self.asleep, self.base = 0, 0, False, False
        self.pace, self.expected = Pace(), ExpectedLengths()
        self.llm: Any = None
        self.eos_ids = policy.eos_token_ids(tokenizer)
        self.vllm.check_architecture(type(policy.base).__name__)
        self.adapter = active_adapter(policy.base)
        if self.tells_routes:
            self.vllm.check_routes()
        if in_8_bits(kv_cache_dtype):
            self.vllm.check_cache_dtype(kv_cache_dtype)
        self.in_less_memory(self.start_or_do_without)

    @property
    def bound(self) -> RolloutLimit:
        """The sizes that memory had room for; a run sets its own."""
        return self.capacity.bound

    @bound.setter
    def bound(self, bound: RolloutLimit) -> None:
        self.capacity.bound = bound

    @property
    def slots(self) -> int:
        return self.capacity.seqs

    @property
    def cache_dtype(self) -> str:
        return self.capacity.cache_dtype

    def start_or_do_without(self) -> None:
        """`start`, and again without what this vLLM lacks here."""
        while True:
            try:
                return self.start()
            except (RuntimeError, ValueError, AssertionError) as error:
                if not self.does_without(error):
                    raise
            # again, but not in the handler: the error's traceback keeps alive what was made

    def does_without(self, error: Exception) -> bool:
        """Return whether vLLM did not start because of what can be left out: sleep, where there is no memory pool for
        it, or routes."""
        if self.sleeps and vllm_pool.is_missing(error):
            self.sleeps = False
            self.sampling_weights = self.sampling_weights if self.eager else FOUR
            logger.warning("vLLM has no memory pool here (%s): the key-value cache of %s stays on the card while "
                           "training", str(error).splitlines()[0], size_text(self.capacity.cache))
            return True
        if self.tells_routes and (why := vllm_settings.why_no_routes(error)):
            self.tells_routes = False
            logger.warning("vLLM does not return here which experts tokens took (%s): the trainer's router chooses "
                           "anew", why)
            return True
        return False

    def start(self) -> None:
        if not PROCESS.clean:
            vllm_pool.reset()
        vllm_settings.check_room(self.policy.device, self.capacity.cache)
        PROCESS.clean = not self.on_card  # until it has started: a start that fails leaves the pool as it is
        room = vllm_pool.room_for(self.sampling_weights, self.eager)
        with torch.inference_mode(False):
            self.loan = WeightSharing(self.policy.base, self.policy.device, self.adapter, room)
        with tempfile.TemporaryDirectory(prefix="lowmem_grpo_") as folder, self.vllm.lending(self.loan):
            vllm_settings.write_config(self.policy, self.tokenizer, self.max_seq_length, Path(folder))
            try:
                with random_states_kept(self.policy.device):
                    self.llm = self.vllm.LLM(folder, **vllm_settings.llm_options(
                        self.policy, self.max_seq_length, self.vllm.NAME, self.capacity, self.eager, self.sleeps,
                        self.tells_routes))
            except BaseException as error:
                self.loan.close()
                self.vllm.cleanup_dist_env_and_memory()
                explain(error, self.policy)
                raise
        if self.loan.wide is None:
            self.sampling_weights = FOUR
        PROCESS.clean, self.asleep, self.seqs = True, False, self.capacity.seqs
        self.cache = self.kv_bytes = self.capacity.cache
        self.prefixes: Hashable = None  # what the cached prefixes were computed with
        self.ending = weakref.finalize(self, end, self.llm, self.loan)
        PROCESS.engine = weakref.ref(self)

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
                 meanwhile: Meanwhile | None = None) -> list[list[Rollout]]:
        """n rollouts of each prompt. If vLLM dies, a new one is made once and samples what is missing; a second death
        raises, and so does a call that cannot be right. If memory runs out (in waking too), a new one is made with a
        smaller cache: see `Capacity.lower`."""
        self.check_open()
        if not prompts:
            return []
        waiting = len(prompts) * params.n > self.slots
        call = Prompts(prompts, self.sampling(params), on_group, meanwhile, self.expected if waiting else None)
        with random_states_kept(self.policy.device):
            self.in_less_memory(lambda: self.run_with_restart(call), call)
        groups = call.result()
        self.expected.note_groups(prompts, groups)
        return groups

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Turns of episodes, as `Engine.converse` says: the same for turns that are in the engine."""
        self.check_open()
        call = OpenTurns(conversation, self.sampling(replace(params, n=1)), self.policy.device)
        self.in_less_memory(lambda: self.run_with_restart(call), call)

    def sampling(self, params: SamplingParams) -> CallSampling:
        return CallSampling(params, self.max_seq_length, self.policy.head.weight.shape[0], self.eos_ids, self.tokenizer,
                        self.vllm.SamplingParams, self.policy.routed_places)

    def in_less_memory(self, attempt: Callable[[], None], call: Calls | None = None) -> None:
        """Repeat the attempt, each time with less, until memory has room for it. An error of the caller's own ends
        it."""
        while isinstance(shortage := catch_oom(attempt, self.policy.device), OutOfMemory):
            if call is not None and call.failed_outside is not None:
                raise call.failed_outside
            if not self.fall_back_to_4bit(shortage):
                self.capacity.lower(shortage, sampling=self.llm is not None and not self.asleep)

    def fall_back_to_4bit(self, shortage: OutOfMemory) -> bool:
        """Give up dequantized weights first where memory ran out beside them; returns whether there were any."""
        if self.sampling_weights == FOUR:
            return False
        self.bound.note("sampling with weights in 16 bits", shortage,
                        "the 4-bit kernels serve for the rest of the run, and the work is repeated")
        self.sampling_weights = FOUR
        self.close()
        return True

    def expect(self, sampled: int) -> None:
        """A run is about to sample this many completions in each call. An engine for fewer is restarted."""
        if sampled > self.seqs:
            self.capacity.sampled = sampled

    @property
    def outdated(self) -> bool:
        """Whether vLLM has to be restarted: a call broke off, or it was made for other bounds than hold now."""
        return (self.llm is None or self.unfinished
                or (self.seqs, self.cache) != (self.capacity.seqs, self.capacity.cache))

    def run_with_restart(self, call: Prompts | OpenTurns) -> None:
        """`run` in an engine that is up to date, and once more in a new one if that dies."""
        if self.outdated:
            self.restart()  # a call that broke off would leave its sequences to the next one
        try:
            return self.run(call)
        except Exception as error:
            in_use = self.unfinished or self.asleep  # still asleep: it did not wake
            hopeless = isinstance(error, ValueError | TypeError) or call.failed_outside or not in_use
            if hopeless or is_out_of_memory(error):
                raise  # a new engine would do no better
            logger.warning("vLLM's engine died (%s: %s); making a new one and repeating this call once",
                           type(error).__name__, error)
        self.restart()  # not in the handler: the error's traceback keeps the old engine alive
        self.run(call)

    @property
    def unfinished(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def run(self, call: Prompts | OpenTurns) -> None:
        """Run what is left of a call, with the policy as the trainer would compute with it now."""
        self.loan.check()
        self.wake()
        self.loan.fill_weights()
        identity = self.loan.use_policy(self.base)
        self.forget_prefixes(identity if identity == "base" else (identity, self.policy_version))
        self.pace.start_call()
        call.run(Steps(self.llm, self.pace), self.policy_version)

    def forget_prefixes(self, identity: Hashable) -> None:
        """Drop cached prefixes that were computed with anything else than `identity`."""
        if identity != self.prefixes and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its cached prefixes: it holds requests that are not ours")
        self.prefixes = identity

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Inside, completions come from the base model: the adapter's numbers on the device are zero."""
        self.check_open()
        before, self.base = self.base, True
        try:
            yield
        finally:
            self.base = before

    def on_policy_update(self, policy_version: int) -> None:
        """Note the new version. The next call copies the adapter as it is then, and drops what the old one cached."""
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Free dequantized weights, and on a card the key-value cache (the other weights are not vLLM's). vLLM cannot
        free its cache on the CPU, nor on a card where it has no memory pool."""
        if self.llm is not None:
            self.loan.drop_weights()
        if self.sleeps and self.llm is not None and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep, self.kv_bytes = True, 0

    def wake(self) -> None:
        """Map the cache again, and the room for dequantized weights. torch first gives back what it has cached of the
        training step, because vLLM's pool cannot take that. If memory still has no room, the error says so, and all of
        it stays asleep."""
        self.check_open()
        if not self.asleep:
            return
        free(self.policy.device)
        wide = 0 if self.loan.wide is None else self.loan.wide.nbytes
        vllm_settings.check_room(self.policy.device, self.cache + wide)
        try:
            self.llm.wake_up()
        except BaseException:
            vllm_pool.unmap(self.llm)
            raise
        self.asleep, self.kv_bytes, self.prefixes = False, self.cache, None  # the cache came back empty

    def restart(self) -> None:
        self.close()
        self.start_or_do_without()

    def close(self) -> None:
        """Free the cache and everything else of vLLM's; the trainer's tensors stay. A second call does nothing."""
        if self.llm is None:
            return
        self.llm, self.kv_bytes, PROCESS.engine = None, 0, None
        self.ending()
        free(self.policy.device)

    def check_open(self) -> None:
        """Raise EngineUnavailableError after `close`."""
        if self.llm is None:
            raise EngineUnavailableError("this engine was closed; make a new one")
