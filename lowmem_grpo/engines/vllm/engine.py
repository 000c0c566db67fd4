"""Rollouts by vLLM in this process, on the trainer's own frozen weights; the adapter is copied before each call."""

import logging
import tempfile
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import FOUR, EngineSettings, EngineUnavailableError
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import EVERYTHING, Calls, Conversation, ExpectedLengths, Meanwhile, Pace
from lowmem_grpo.engines.vllm import process_state
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.process_state import PROCESS, random_states_kept
from lowmem_grpo.engines.vllm.requests import CallSampling, OpenTurns, Prompts, Steps
from lowmem_grpo.engines.vllm.sampling_weights import new_buffer
from lowmem_grpo.engines.vllm.settings import Capacity
from lowmem_grpo.engines.vllm.shared_linear import check_family
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing, active_adapter
from lowmem_grpo.memory.oom import OutOfMemory, RolloutLimit, catch_oom, free, is_out_of_memory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import OnGroup, Rollout
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)
SPARE = 512 * 2**20  # bytes that stay free when the cache is mapped: for whole pages of it, and the driver


class VLLMEngine:
    """A vLLM engine on the trainer's tensors; a process can have one at a time. `close` frees its KV cache."""

    name = "vllm"
    capabilities = EVERYTHING

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int,
                 settings: EngineSettings | None = None, sampled: int | None = None,
                 bound: RolloutLimit | None = None) -> None:
        """Start vLLM. Without `settings.max_num_seqs`, up to `sampled` sequences of a call are decoded together, as far
        as the cache has room; the others wait. `bound` holds limits from earlier shortages of memory.

        Raises EngineUnavailableError if vLLM cannot be used, BorrowError if the model does not map onto vLLM's,
        ValueError if the cache is too small for one sequence, MemoryExhaustedError if even such a cache does not fit.
        """
        process_state.check_alone()
        settings = settings or EngineSettings()
        check_family(policy.base.config, policy.dtype, policy.device)
        self.policy, self.tokenizer, self.max_seq_length = policy, tokenizer, max_seq_length
        self.on_card = self.sleeps = vllm_settings.on_card(policy)
        free(policy.device)
        self.tells_routes = policy.routed_layers > 0
        self.eager = vllm_settings.is_eager(policy, settings.enforce_eager)
        self.vllm = import_plugin()
        self.capacity = Capacity(policy, max_seq_length, settings, sampled, bound)
        self.sampling_weights, self.capacity.kv_budget = vllm_settings.choose_weights(self.capacity, self.eager)
        self.capacity.check()
        self.kv_bytes, self.policy_version, self.asleep, self.base = 0, 0, False, False
        self.stays = False  # True: a run does not let the engine sleep while it trains, since memory has room
        self.pace, self.expected = Pace(), ExpectedLengths()
        self.llm: Any = None
        self.eos_ids = policy.eos_token_ids(tokenizer)
        self.vllm.check_architecture(type(policy.base).__name__)
        self.adapter = active_adapter(policy.base)
        if self.tells_routes:
            self.vllm.check_routes()
        if settings.in_8_bits:
            self.vllm.check_cache_dtype(settings.kv_cache_dtype)
        self.in_less_memory(self.start_or_do_without)

    @property
    def bound(self) -> RolloutLimit:
        """The limits that shortages of memory have set; a run replaces this object with its own."""
        return self.capacity.bound

    @bound.setter
    def bound(self, bound: RolloutLimit) -> None:
        self.capacity.bound = bound

    @property
    def slots(self) -> int:
        return self.capacity.seqs

    @property
    def cache_dtype(self) -> str:
        return self.capacity.settings.kv_cache_dtype

    def start_or_do_without(self) -> None:
        """Start vLLM; if it lacks an optional feature here, start again without it (see `does_without`)."""
        while True:
            try:
                return self.start()
            except (RuntimeError, ValueError, AssertionError) as error:
                if not self.does_without(error):
                    raise
            # retry outside the handler, where the error's traceback would keep the failed engine alive

    def does_without(self, error: Exception) -> bool:
        """Turn off the optional feature that kept vLLM from starting: sleep, if there is no memory pool for it, or
        expert routes. Returns False if the error has another cause."""
        if self.sleeps and process_state.is_pool_missing(error):
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
        """Start vLLM on the trainer's tensors. If it fails, stop sharing them and add advice to the error."""
        if not PROCESS.clean:
            process_state.reset_pool()
        vllm_settings.check_room(self.policy.device, self.capacity.cache)
        PROCESS.clean = not self.on_card  # set True again after a successful start; a failed one leaves the pool dirty
        # dequantized weights lie in vLLM's pool, whose addresses last as CUDA graphs need, or in plain memory
        room = new_buffer if self.eager else process_state.SleepingRoom()
        with torch.inference_mode(False):
            self.loan = WeightSharing(self.policy.base, self.policy.device, self.adapter,
                                      None if self.sampling_weights == FOUR else room)
        with tempfile.TemporaryDirectory(prefix="lowmem_grpo_") as folder, self.vllm.lending(self.loan):
            vllm_settings.write_config(self.policy, self.tokenizer, self.max_seq_length, Path(folder))
            try:
                with random_states_kept(self.policy.device), warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # vLLM looks at all names of torch, old ones too
                    self.llm = self.vllm.LLM(folder, **vllm_settings.llm_options(
                        self.capacity, self.vllm.NAME, self.eager, self.sleeps, self.tells_routes))
            except BaseException as error:
                self.loan.close()
                self.vllm.cleanup_dist_env_and_memory()
                process_state.explain(error, self.policy)
                raise
        if self.loan.wide is None:
            self.sampling_weights = FOUR
        PROCESS.clean, self.asleep, self.seqs = True, False, self.capacity.seqs
        self.cache = self.kv_bytes = self.capacity.cache
        self.prefixes: Hashable = None  # identifies the policy that the cached prefixes were computed with
        self.ending = weakref.finalize(self, process_state.end, self.llm, self.loan)
        PROCESS.engine = weakref.ref(self)

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
                 meanwhile: Meanwhile | None = None) -> list[list[Rollout]]:
        """Sample n rollouts of each prompt. If vLLM dies, it is restarted once and samples the missing prompts; a
        second death raises an error. Invalid arguments raise an error at once. If memory runs out, also while waking,
        vLLM is restarted without dequantized weights or with a smaller KV cache (see `Capacity.lower`)."""
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
        self.check_open()
        call = OpenTurns(conversation, self.sampling(replace(params, n=1)), self.policy.device)
        self.in_less_memory(lambda: self.run_with_restart(call), call)

    def sampling(self, params: SamplingParams) -> CallSampling:
        return CallSampling(params, self.max_seq_length, self.policy.head.weight.shape[0], self.eos_ids, self.tokenizer,
                        self.vllm.SamplingParams, self.policy.routed_places)

    def in_less_memory(self, attempt: Callable[[], None], call: Calls | None = None) -> None:
        """Run `attempt`. While memory runs out, repeat it without dequantized weights, and then with smaller sizes. If
        memory ran out in one of the caller's callbacks, raise the callback's error."""
        while isinstance(shortage := catch_oom(attempt, self.policy.device), OutOfMemory):
            if call is not None and call.failed_outside is not None:
                raise call.failed_outside
            if not self.fall_back_to_4bit(shortage):
                self.capacity.lower(shortage, sampling=self.llm is not None and not self.asleep)

    def fall_back_to_4bit(self, shortage: OutOfMemory) -> bool:
        """Stop using dequantized weights for the rest of the run, and close vLLM; return False if there were none."""
        if self.sampling_weights == FOUR:
            return False
        self.bound.note("sampling with weights in 16 bits", shortage,
                        "the 4-bit kernels serve for the rest of the run, and the work is repeated")
        self.sampling_weights = FOUR
        self.close()
        return True

    def expect(self, sampled: int) -> None:
        """Prepare for a run that samples `sampled` completions per call. An engine sized for fewer will restart."""
        if sampled > self.seqs:
            self.capacity.sampled = sampled

    @property
    def outdated(self) -> bool:
        """True if vLLM must be restarted: it is closed, a call was interrupted, or the capacity has changed."""
        return (self.llm is None or self.unfinished
                or (self.seqs, self.cache) != (self.capacity.seqs, self.capacity.cache))

    def run_with_restart(self, call: Prompts | OpenTurns) -> None:
        """Run a call. Restart vLLM before it if it is outdated, and once more if it dies during the call."""
        if self.outdated:
            self.restart()  # else the sequences of an interrupted call would continue in this call
        try:
            return self.run(call)
        except Exception as error:
            in_use = self.unfinished or self.asleep  # asleep: waking failed
            hopeless = isinstance(error, ValueError | TypeError) or call.failed_outside or not in_use
            if hopeless or is_out_of_memory(error):
                raise  # a new engine would do no better
            logger.warning("vLLM's engine died (%s: %s); making a new one and repeating this call once",
                           type(error).__name__, error)
        self.restart()  # outside the handler, where the error's traceback would keep the old engine alive
        self.run(call)

    @property
    def unfinished(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def run(self, call: Prompts | OpenTurns) -> None:
        """Run the unfinished part of a call with the trainer's current policy."""
        self.loan.check()
        self.wake()
        self.loan.fill_weights()
        identity = self.loan.use_policy(self.base)
        prefixes = identity if identity == "base" else (identity, self.policy_version)
        if prefixes != self.prefixes and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop its cached prefixes: it holds requests that are not ours")
        self.prefixes = prefixes
        self.pace.start_call()
        call.run(Steps(self.llm, self.pace), self.policy_version)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Sample the base model in this context, by setting the engine's copy of the adapter to zero."""
        self.check_open()
        before, self.base = self.base, True
        try:
            yield
        finally:
            self.base = before

    def on_policy_update(self, policy_version: int) -> None:
        """Store the policy's version. The next call copies the adapter, and drops prefixes cached with the old one."""
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Free dequantized weights, and on a card the KV cache (the other weights are the trainer's). vLLM cannot free
        its cache on the CPU, or on a card without a memory pool."""
        if self.llm is not None:
            self.loan.drop_weights()
        if self.sleeps and self.llm is not None and not self.asleep:
            process_state.sleep(self.llm)
            self.asleep, self.kv_bytes = True, 0

    def stay(self, stays: bool) -> None:
        self.stays = stays

    def give_back(self) -> None:
        """After memory ran out in training, sleep now (unless a call is running), and in each later training phase."""
        self.stays = False
        if self.llm is not None and not self.unfinished:
            self.sleep()

    def wake(self) -> None:
        """Map the KV cache and the room for dequantized weights again. If memory is short, first free torch's cached
        blocks, which vLLM's pool cannot use. OutOfMemoryError if that is not enough; then everything stays asleep."""
        self.check_open()
        if not self.asleep:
            return
        size = self.cache + (0 if self.loan.wide is None else self.loan.wide.nbytes)
        if (vllm_settings.free_bytes(self.policy.device) or 0) < size + SPARE:
            free(self.policy.device)
        vllm_settings.check_room(self.policy.device, size)
        try:
            process_state.wake(self.llm)
        except BaseException:
            process_state.unmap(self.llm)
            raise
        self.asleep, self.kv_bytes, self.prefixes = False, self.cache, None  # the cache came back empty

    def restart(self) -> None:
        self.close()
        self.start_or_do_without()

    def close(self) -> None:
        """Free all that vLLM owns, the KV cache too, but no tensor of the trainer. A second call does nothing."""
        if self.llm is None:
            return
        self.llm, self.kv_bytes, PROCESS.engine = None, 0, None
        self.ending()
        free(self.policy.device)

    def check_open(self) -> None:
        """Raise EngineUnavailableError after `close`."""
        if self.llm is None:
            raise EngineUnavailableError("this engine was closed; make a new one")
