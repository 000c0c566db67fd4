"""Choosing the sampling engine for a loaded model, and keeping the one vLLM engine that a process can have."""

import gc
import logging
import weakref
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import TRANSFORMERS, VLLM, EngineSettings, EngineUnavailableError, check_engine
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.installed import installed, why_unusable
from lowmem_grpo.engines.vllm.process_state import collectable, import_from_a_thread, is_of_start, living
from lowmem_grpo.memory.cards import IN_16_BITS, why_not_on_card, why_not_on_cpu
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.oom import RolloutLimit
from lowmem_grpo.models.hub import first_line
from lowmem_grpo.models.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, and why it was chosen, in words for messages."""

    name: str
    why: str
    forced: bool = False  # the user named it, so it is an error if it cannot be used


def choose_engine(fast_inference: bool | str, device: str) -> EngineChoice:
    """Choose the engine for `fast_inference` and a model on `device`, from package metadata alone.
    EngineUnavailableError if the user asked for "vllm" and it cannot be used."""
    check_engine(fast_inference)
    if fast_inference in (False, TRANSFORMERS):
        return EngineChoice(TRANSFORMERS, f"fast_inference={fast_inference!r}", forced=True)
    why_not = why_not_here(device)
    if why_not is None:
        there, old = f"{' '.join(installed() or ())} is installed", old_card(device)
        if old is None or fast_inference == VLLM:
            return EngineChoice(VLLM, f"{there}; {old}" if old else there, forced=fast_inference == VLLM)
        why_not = f'{there}, but {old}; fast_inference="vllm" tries it'
    if fast_inference == VLLM:
        raise EngineUnavailableError(f'{why_not}, or sample with fast_inference="transformers"')
    return EngineChoice(TRANSFORMERS, why_not)


def why_not_here(device: str) -> str | None:
    """Return why vLLM cannot sample with a model on `device`; None if it can, judged by its package metadata."""
    package = installed()
    if why := why_unusable(package):
        return why
    name, number = package or ("", "")
    for_cpus = name.endswith("-cpu") or "cpu" in number.partition("+")[2]
    if not for_cpus and device.startswith("cuda:") and device != "cuda:0":
        return (f"vLLM takes the first card that its process sees, and the model is on {device}: start with "
                f"lowmem-grpo run, or set CUDA_VISIBLE_DEVICES={device.partition(':')[2]} before torch is imported")
    if for_cpus == device.startswith("cpu"):
        return None
    return f"{name} {number} is built for {'CPUs' if for_cpus else 'cards'} and the model is on {device}"


def for_images(fast_inference: bool | str) -> EngineChoice:
    """Return the choice of our own engine for a model of images; EngineUnavailableError if vLLM must be taken."""
    why = "vLLM is not given a tower's features here, so our engine samples with images"
    if fast_inference == VLLM:
        raise EngineUnavailableError(f"fast_inference='vllm': {why}; take fast_inference=False")
    return EngineChoice(TRANSFORMERS, why)


def for_family(choice: EngineChoice, config: Any) -> EngineChoice:
    """Return the choice, or our own engine for a family that vLLM does not sample; EngineUnavailableError if vLLM must
    be taken."""
    why = why_not_family(config)
    if choice.name != VLLM or why is None:
        return choice
    if choice.forced:
        raise EngineUnavailableError(f"fast_inference='vllm': {why}; take fast_inference=False")
    return EngineChoice(TRANSFORMERS, why)


def why_not_family(config: Any) -> str | None:
    """Return why vLLM does not sample the family of a model's config; None if it does, or if the family has no row."""
    family = family_of(config)
    if family is None or family.vllm is not None:
        return None
    return f"vLLM has no {family.name} of its own, only transformers' model in its place"


def faster_engine(device: str) -> str | None:
    """Return advice to use vLLM if it could sample with a model on this card and was tested on it; None otherwise."""
    if not device.startswith("cuda") or old_card(device) or why_not_here(device):
        return None
    return (f"{' '.join(installed() or ())} is installed and not used: pass fast_inference=True to sample with it and "
            "the same weights, which plans put ahead on this card, or fast_inference=False for transformers")


def old_card(device: str) -> str | None:
    """Return a note on vLLM for a card below compute capability 8.0 (a T4 has 7.5); None on other cards."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else (f"vLLM was not tested on compute capability {major}.{minor}, where the "
                                    "transformers engine is the checked one")


def check_cache_dtype(settings: EngineSettings, choice: EngineChoice, device: str) -> None:
    """Raise EngineUnavailableError if an 8-bit KV cache is set and the chosen engine cannot hold one on `device`."""
    if not settings.in_8_bits:
        return
    if choice.name != VLLM:
        why: str | None = f"only vLLM holds its cache in 8 bits, but the {choice.name} engine samples ({choice.why})"
    elif device.startswith("cpu"):
        why = why_not_on_cpu(torch.backends.cpu.get_cpu_capability())
    else:
        why = why_not_on_card(torch.cuda.get_device_capability(device), find_spec("flashinfer") is not None)
    if why:
        raise EngineUnavailableError(f"kv_cache_dtype is {settings.kv_cache_dtype!r}, and {why}. {IN_16_BITS}")


@dataclass(eq=False)
class EngineKeeper:
    """The provider of one loaded model's engine. A vLLM engine is made once and kept; a process can have only one.

    This object is also `model.vllm_engine`. Programs for Unsloth call its `sleep` and `wake_up`, which training and
    sampling also do by themselves. With the transformers engine both methods do nothing.
    """

    max_seq_length: int
    choice: EngineChoice = field(default_factory=lambda: choose_engine(False, "cpu"))
    settings: EngineSettings = field(default_factory=EngineSettings)
    label: str = "the model"  # its name, for messages
    kept: VLLMEngine | None = None
    bound: RolloutLimit | None = None  # the sizes for which the last engine had memory
    sampled: int | None = None  # completions that a run samples per call; None before a run
    holder: ClassVar["weakref.ref[EngineKeeper] | None"] = None  # the last keeper that made a vLLM engine

    def engine(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Engine:
        """Return an engine that samples with the policy's current weights. A kept vLLM engine is returned again if it
        was made for this model and tokenizer."""
        if self.choice.name != VLLM:
            return TransformersEngine(policy, tokenizer, self.max_seq_length, self.settings.enforce_eager,
                                      self.settings.sampling_weights)
        kept = self.kept
        if (kept is not None and living() is kept and kept.policy.model is policy.model
                and kept.tokenizer is tokenizer):
            return kept
        self.make_room()
        try:
            return self.start(policy, tokenizer)
        except Exception as error:
            if self.choice.forced or self.settings.in_8_bits or not is_of_start(error):
                raise
            self.choice = EngineChoice(TRANSFORMERS, f"vLLM cannot sample with this model: {first_line(error)}")
            logger.warning("engine: %s (%s)", self.choice.name, self.choice.why)
        return self.engine(policy, tokenizer)

    def expect(self, sampled: int) -> None:
        """Set how many completions a run samples per call. A vLLM engine takes its size from this number."""
        self.sampled = sampled
        if self.kept is not None:
            self.kept.expect(sampled)

    def make_room(self) -> None:
        """Close the process's open vLLM engine. EngineUnavailableError if the user made that engine by hand."""
        if living() is None:
            return
        gc.collect()  # its model may be unreachable already, and the engine with it
        holder = None if EngineKeeper.holder is None else EngineKeeper.holder()
        if holder is not None and living() is holder.kept is not None:
            if holder is not self:
                logger.warning("closing the vLLM engine of %s to make one for %s: a process can have only one. To "
                               'sample with both in turn, load one with fast_inference="transformers"',
                               holder.label, self.label)
            holder.close()
        if living() is not None:
            raise EngineUnavailableError("an engine of vLLM that was made by hand is open here; close() it first")

    def start(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Engine:
        import_from_a_thread()
        with collectable():
            self.kept = VLLMEngine(policy, tokenizer, self.max_seq_length, self.settings, self.sampled, self.bound)
        EngineKeeper.holder = weakref.ref(self)
        return self.kept

    def close(self) -> None:
        """Close the kept engine. The next call of `engine` makes a new one, with sizes that have fitted into memory."""
        if self.kept is not None:
            self.kept.close()
            self.bound = self.kept.bound
        self.kept = None

    def sleep(self, level: int = 1) -> None:
        """Free vLLM's KV cache. `level` is ignored, as the weights are the trainer's."""
        if self.kept is not None:
            self.kept.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Make the KV cache again, unless `tags` names only the weights, which never sleep."""
        if self.kept is not None and (tags is None or "kv_cache" in tags):
            self.kept.wake()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"model.vllm_engine has no {name!r} here, but sleep and wake_up; sample with "
                             "model.fast_generate(prompts, sampling_params)")
