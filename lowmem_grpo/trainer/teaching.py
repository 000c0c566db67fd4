"""A run's teacher: making it from what the user gave, and letting it read the completions of an update."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.teacher import BASE, EMA, OF_MODEL, SAMPLED, STORED, TOP_K
from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.quantized_linear import linears_in_4bit
from lowmem_grpo.models.stored_model import find_teacher
from lowmem_grpo.models.teacher import Teacher, adapter_of, weight_bytes
from lowmem_grpo.rollout.teacher_prompts import PrivilegedPrompts, SuccessPrompts, TeacherPrompts, check_same_tokens
from lowmem_grpo.runs.saved_adapter import adapter_at
from lowmem_grpo.trainer.model_setup import Brought, loading_options, quantization
from lowmem_grpo.trainer.parts import TrainedModel
from lowmem_grpo.trainer.teacher_objective import TeacherObjective
from lowmem_grpo.types import RolloutGroup

if TYPE_CHECKING:
    from lowmem_grpo.engines.served_teacher import ServedTeacher

logger = logging.getLogger(__name__)


class Teaching:
    """The teacher of a run, and what it reads. `objective` makes the objective that learns from it."""

    def __init__(self, config: GRPOConfig, trained: TrainedModel, encoder: Any, given: Any = None) -> None:
        """`given` is a model that the user loaded; otherwise `config.teacher` says which teacher. `encoder` makes the
        student's prompts, and leaves out rows that the teacher cannot read. ValueError for other tokens."""
        self.config, self.ranks = config, trained.ranks
        rows, most = len(trained.policy.head.weight), config.distillation_topk
        if config.distillation_mode == TOP_K and most is not None and most > rows:
            raise ValueError(f"distillation_topk is {most}, and the vocabulary has {rows} tokens; set at most that")
        if config.is_served:
            check_images(config, encoder)
        self.served = served_by(config, trained, given) if config.is_served else None
        self.teacher: Teacher | None = None
        tokenizer = own = None
        if self.served is None and config.teacher != STORED:
            self.teacher, tokenizer = teacher_of(config, trained, given)
        if tokenizer is not None:
            check_images(config, encoder)
            check_same_tokens(trained.tokenizer, tokenizer)
            own = PromptEncoder(tokenizer, trained.context, config.chat_template_kwargs)
        self.objective = partial(TeacherObjective, policy=trained.policy, teacher=self.teacher)
        longest = trained.context - config.max_completion_length
        self.prompts = prompts_of(config)(config, encoder, own, longest)
        encoder.refuses = self.prompts.refused

    @property
    def planned(self) -> dict[str, Any]:
        """The fields of RunSettings about the teacher, for the memory plan."""
        config, teacher = self.config, self.teacher
        if teacher is None:
            return {}
        completions, policy = config.prompts_per_generation * config.num_generations, teacher.other or teacher.student
        places = 0 if config.distillation_mode == SAMPLED else completions * config.max_completion_length
        copied = policy.head.weight.nbytes if policy.head.is_trained and places else 0
        return {"keeps_teacher": teacher.kind == EMA or teacher.adapter is not None,
                "teacher_bytes": copied if teacher.other is None else weight_bytes(teacher.other.base),
                "teacher_hidden_bytes": places * policy.head.weight[0].nbytes}

    def read(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Decide behind which prompts the teacher reads the completions of scored groups, and which tokens count; ask a
        teacher elsewhere. Return metrics of the prompts."""
        metrics = self.prompts.assign(groups)
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        if self.teacher is not None and self.teacher.other is not None:
            known = len(self.teacher.other.base.get_input_embeddings().weight)
            most = max([0, *(max(group.prompt_ids + rollout.completion_ids) for group, rollout in rollouts)])
            if most >= known:
                raise ValueError(f"a prompt or completion has the token {most}, and the teacher has {known} tokens; "
                                 "take a teacher with as many as the student")
        if skipped := getattr(self.config, "num_loss_tokens_to_skip", 0):
            for _, rollout in rollouts:
                counted = torch.arange(len(rollout.completion_ids)) >= skipped
                rollout.fields["teacher_mask"] = rollout.fields["teacher_mask"] * counted
        if (served := self.served) is not None:
            if any(rollout.splits and rollout.teacher_prompt is None for _, rollout in rollouts):
                raise ValueError("the teacher at a URL reads a row's prompt and all that follows, and an environment "
                                 "or rollout_func gave the policy another history; take a teacher that computes here")
            read = [(rollout.teacher_prompt or group.prompt_ids, rollout.completion_ids) for group, rollout in rollouts]
            told = self.ranks.first("the teacher's answers", lambda: served.score(read))
            for (_, rollout), scores in zip(rollouts, told, strict=True):
                rollout.fields |= {f"teacher_{name}": values for name, values in vars(scores).items()}
        return metrics


def check_images(config: GRPOConfig, encoder: Any) -> None:
    """Raise ValueError if the student reads images, and the teacher, which is another model, does not get them."""
    if encoder.images:
        raise ValueError(f"the student reads images, and the teacher {config.teacher} is another model, which gets "
                         "none of them; take 'base', 'ema' or the folder of an adapter as the teacher")


def check_teacher(config: GRPOConfig, given: Any = None) -> None:
    """Raise an error for a teacher that is not there, before a student is loaded. `given` as in `Teaching`."""
    if config.is_served:
        server_of(config, given).reach()
    elif given is None:
        options = options_of(config)
        find_teacher(str(config.teacher), **{name: options[name] for name in ("revision", "token") if name in options})
    elif not isinstance(given, torch.nn.Module):
        raise TypeError(f"the teacher is a {type(given).__name__}; give a model, its name, the folder of an adapter or "
                        "a URL. FastLanguageModel.from_pretrained returns a model and its tokenizer: give the model")


def options_of(config: GRPOConfig) -> dict[str, Any]:
    """Return the options for loading another model as the teacher. ValueError for one that our loader lacks."""
    return loading_options({"revision": getattr(config, "teacher_model_revision", None),
                            **(getattr(config, "teacher_model_init_kwargs", None) or {})})


def server_of(config: GRPOConfig, given: "ServedTeacher | None") -> "ServedTeacher":
    """Return the teacher at the config's URL, or the `given` one. ValueError if it tells another number of tokens."""
    from lowmem_grpo.engines.served_teacher import ServedTeacher  # imports openai

    teacher = given or ServedTeacher(str(config.teacher), top_k=config.distillation_topk or 1)
    if config.distillation_mode == TOP_K and teacher.top_k != config.distillation_topk:
        raise ValueError(f"distillation_topk is {config.distillation_topk}, and the ServedTeacher's top_k is "
                         f"{teacher.top_k}; give both the same number")
    return teacher


def served_by(config: GRPOConfig, trained: TrainedModel, given: "ServedTeacher | None") -> "ServedTeacher":
    """Return the teacher at a URL, once it has passed its self-test. TeacherError if it has not."""
    teacher = server_of(config, given)
    teacher.vocabulary = len(trained.policy.head.weight)
    trained.ranks.first("the teacher's self-test", lambda: teacher.check(trained.tokenizer))
    return teacher


def prompts_of(config: GRPOConfig) -> type[TeacherPrompts]:
    """Return the class that decides what the teacher reads, by the templates that the config has."""
    if hasattr(config, "teacher_prompt_template"):
        return PrivilegedPrompts
    return SuccessPrompts if hasattr(config, "reprompt_template") else TeacherPrompts


def loaded(name: str, config: GRPOConfig, trained: TrainedModel) -> Any:
    """Return another model as the teacher, loaded with the config's options; in 4 bits if the student is."""
    options = options_of(config)
    stored = options.pop("quantization_config", None)
    bits = {"load_in_4bit": any(linears_in_4bit(trained.policy.base))} if stored is None else quantization(stored)
    where = {"device": str(trained.policy.device)}
    return FastLanguageModel.from_pretrained(name, max_seq_length=trained.context, **where | bits | options)[0]


def teacher_of(config: GRPOConfig, trained: TrainedModel, given: Any) -> tuple[Teacher, Any]:
    """Return the teacher, and the tokenizer whose chat template it reads if that is not the student's."""
    policy, name = trained.policy, str(config.teacher)
    if isinstance(given, PeftModel) and not hasattr(given, "loaded"):
        raise TypeError("the teacher is a PeftModel; pass its adapter's folder, or what its merge_and_unload() returns")
    if isinstance(given, torch.nn.Module) and any(part is policy.base for part in given.modules()):
        raise ValueError("the teacher is the model that is trained; say teacher='base' or 'ema', or load another model")
    if name == BASE and config.distillation_weight == 1 and not (config.privileged or policy.is_trained()):
        logger.warning("the adapter is new, so the policy is its teacher 'base' and learns nothing: continue a trained "
                       "adapter, or take another teacher")
    if given is None and name in OF_MODEL:
        return Teacher(name, policy), None
    if given is None and (folder := adapter_at(name)):
        return Teacher(name, policy, adapter_of(folder, policy, trained.model.loaded)), None
    if given is not None and getattr(config, "teacher_model_init_kwargs", None):
        raise ValueError("teacher_model_init_kwargs is given, and the teacher is loaded already; leave one of them out")
    if given is None:
        model = loaded(name, config, trained)
    else:
        made_here = not getattr(getattr(given, "config", None), "_name_or_path", "")  # no tokenizer belongs to it
        tokenizer = trained.tokenizer if made_here else None
        model = given if hasattr(given, "loaded") else Brought(given, tokenizer, None, None, config, 0).loaded()
    other = Policy(getattr(model, "inner", model), policy.autocast_dtype, config.logits_chunk)
    if other.device != policy.device:  # as TRL does
        other.base.to(policy.device)
        other.device = policy.device
    longest = getattr(other.base.config.get_text_config(), "max_position_embeddings", None) or trained.context
    if longest < trained.context:
        raise ValueError(f"the teacher reads at most {longest} tokens, and the student was loaded for "
                         f"{trained.context}; load it with max_seq_length={longest}")
    return Teacher(name, policy, other=other), model.loaded.tokenizer
