"""A reward model: a sequence classifier with one label, whose logit is the reward of a prompt and its completion.

As in TRL, the input is prompt and completion, rendered by the chat template if the prompt is a chat, else joined as
text. The model is frozen, and computes in its own dtype, without autocast. If the policy is on a GPU, the reward model
is on the GPU only while it scores.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lowmem_grpo.data.prompt_inputs import readable
from lowmem_grpo.data.prompts import is_chat
from lowmem_grpo.memory.oom import BatchLimit, OutOfMemory, catch_oom, free, is_out_of_memory, smaller
from lowmem_grpo.models.pretrained import Pretrained, keep_layout
from lowmem_grpo.models.stored_model import find
from lowmem_grpo.rewards.reward import Reward, is_model

logger = logging.getLogger(__name__)

TOKENS = 8192  # most tokens of a forward pass, with padding, unless a single row is longer
KIND = "a model for sequence classification with num_labels=1, such as trl.RewardTrainer makes"


class RewardModel(Reward):
    """A reward function that returns a model's scores. The last part of the model's name is the reward's name."""

    after_sampling = True  # the KV cache must have left the card
    time_limit = math.inf
    adapter_bytes = 0  # beside the policy's own adapter

    def __init__(self, model: Any, tokenizer: Any = None, init: dict[str, Any] | None = None,
                 template_kwargs: dict[str, Any] | None = None) -> None:
        """`tokenizer` is by default the one stored with the model. `init` holds from_pretrained options for a model
        given by name: revision, token, dtype and quantization_config. `template_kwargs` go to the chat template.
        OSError for a name without a model, TypeError for a model of another kind, ValueError for a model with several
        labels, or without a fitting tokenizer."""
        named = isinstance(model, str)
        self.model: Any = None if named else model
        self.init, self.template_kwargs = dict(init or {}), dict(template_kwargs or {})
        told: dict[str, Any] = self.init if named else {}
        where = {name: value for name, value in told.items() if name in ("revision", "token")}
        config = None if named else getattr(model, "config", None)
        path = find(model, **where) if named else str(getattr(config, "_name_or_path", ""))
        self.source = Pretrained(model if named else path, path, where)
        super().__init__(path.rstrip("/").rpartition("/")[2] or type(model).__name__)
        if named:
            with self.source.naming_the_model():
                config = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
        self.check_kind(config)
        self.tokenizer = self.fitting_tokenizer(tokenizer, config)
        self.home = self.device = torch.device("cpu") if named else model.device
        self.bound = BatchLimit("rollout", "rows that a reward model scores at once")
        if not named:
            self.freeze()

    def check_kind(self, config: Any) -> None:
        """Raise TypeError unless the model is a sequence classifier, and ValueError if it has several labels."""
        kinds = list(getattr(config, "architectures", None) or [])
        if self.model is not None:
            kinds = [type(getattr(self.model, "_orig_mod", self.model)).__name__]  # unwraps a compiled model
        if not any("SequenceClassification" in kind for kind in kinds):
            raise TypeError(f"reward_funcs holds {self.__name__}, a {' or '.join(kinds) or 'model of no known class'}; "
                            f"a reward model is {KIND}; for another, give a function that calls it")
        if config.num_labels != 1:
            raise ValueError(f"the reward model {self.__name__} has {config.num_labels} labels, and a reward is one "
                             f"number: take {KIND}, or give a function that calls the model and chooses")

    def fitting_tokenizer(self, tokenizer: Any, config: Any) -> Any:
        """Return the tokenizer, with its end token for padding if it has no padding token. ValueError if there is no
        tokenizer, or if it has more tokens than the model."""
        name, text = self.__name__, config.get_text_config()
        try:
            tokenizer = self.source.tokenizer() if tokenizer is None else tokenizer
        except (OSError, ValueError) as error:
            raise ValueError(f"the reward model {name} has no tokenizer beside it ({str(error).splitlines()[0]}); "
                             "give one in reward_processing_classes") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ValueError(f"the tokenizer of the reward model {name} has neither a token for padding nor an end "
                             "token; set its pad_token, and give it in reward_processing_classes")
        if len(tokenizer) > text.vocab_size:
            raise ValueError(f"the tokenizer of the reward model {name} has {len(tokenizer)} tokens, and the model "
                             f"{text.vocab_size}; give the model's own in reward_processing_classes")
        return tokenizer

    # Placement

    def load(self, device: torch.device) -> None:
        """Load the model if it was passed by name. If `device`, the policy's, is a GPU, score on it from now on."""
        if self.model is None:
            target = device if "quantization_config" in self.init else torch.device("cpu")
            self.model, report = AutoModelForSequenceClassification.from_pretrained(
                self.source.path, num_labels=1, trust_remote_code=False, device_map={"": str(target)},
                output_loading_info=True, **self.init,
            )
            if report["missing_keys"]:
                raise ValueError(f"the reward model {self.__name__} lacks {', '.join(sorted(report['missing_keys']))}, "
                                 "which would be random; take a checkpoint that was trained as a reward model")
            self.freeze()
        if device.type == "cuda":
            devices = {*getattr(self.model, "hf_device_map", {}).values()}
            if getattr(self.model, "is_loaded_in_8bit", False) or len(devices) > 1:
                raise ValueError(f"the reward model {self.__name__} is in 8 bits or on several devices, and cannot be "
                                 "moved between host and card: load it on one device, in 16 or in 4 bits")
            self.device, self.home = device, torch.device("cpu")
            logger.info("the reward model %s waits on the host, and is on the card while it scores", self.__name__)
            self.move(self.home)

    def freeze(self) -> None:
        """Freeze the model, without a KV cache, and set its padding token: the last token before padding is scored."""
        config = self.model.requires_grad_(False).eval().config.get_text_config()
        config.pad_token_id, config.use_cache = self.tokenizer.pad_token_id, False
        keep_layout(self.model)  # 4-bit weights that were repacked for the CPU could not be moved to a card

    def move(self, device: torch.device) -> None:
        self.model.to(device)
        free(self.device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the model on its scoring device inside the block."""
        if self.device == self.home:
            yield
            return
        try:
            self.model.to(self.device)
            yield
        finally:
            self.move(self.home)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the model's weights."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def scoring_bytes(self) -> int:
        """The estimated bytes on the GPU while the model scores: weights, and activations inside a layer."""
        shape, dtypes = self.model.config.get_text_config(), [parameter.dtype for parameter in self.model.parameters()]
        size = max(dtype.itemsize for dtype in dtypes if dtype.is_floating_point)
        inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
        return self.weight_bytes + size * TOKENS * (2 * int(inner) + 6 * int(shape.hidden_size))

    # Scoring

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        if not is_chat(row.get("prompt")) or getattr(self.tokenizer, "chat_template", None):
            return None
        return ("the prompt is a chat, and the reward model's tokenizer has no chat template: set its chat_template, "
                "and give it in reward_processing_classes")

    def read(self, completions: list[Any]) -> list[Any]:
        return completions

    def pay(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} reads each prompt and got no prompts; a trainer passes them")
        if self.model is None:
            self.load(self.device)
        whole = [self.text(prompt, completion) for prompt, completion in zip(prompts, texts, strict=True)]
        with self.on_device():
            return list(self.scores(whole))

    def text(self, prompt: Any, completion: Any) -> str:
        if not is_chat(prompt):
            return str(prompt) + str(completion)
        messages = readable(self.tokenizer, [*prompt, *completion], self.template_kwargs)
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_kwargs))

    def scores(self, texts: list[str]) -> list[float]:
        """Return the scores (N,) of N texts, in batches, the shortest first; batches shrink if memory runs out."""
        lengths = [len(ids) for ids in self.encode(texts)["input_ids"]]
        waiting = sorted(range(len(texts)), key=lengths.__getitem__)
        done: dict[int, float] = {}
        while waiting:
            batch = self.first(waiting, lengths)
            scores = catch_oom(partial(self.forward, [texts[row] for row in batch]), self.device)
            if isinstance(scores, OutOfMemory):
                limit = smaller(len(batch), [len(batch)] if len(batch) > 1 else [])
                self.bound.lower(f"the reward model {self.__name__}", scores, limit)
                continue
            done |= dict(zip(batch, scores, strict=True))
            waiting = waiting[len(batch) :]
        return [done[row] for row in range(len(texts))]

    def first(self, waiting: list[int], lengths: list[int]) -> list[int]:
        """Return the next batch of the `waiting` rows, shortest first: at most TOKENS tokens, or a single row."""
        fitting = [count for count, row in enumerate(waiting, 1) if count * lengths[row] <= TOKENS]
        return waiting[: self.bound.under(max(fitting, default=1))]

    def encode(self, texts: Sequence[str], **options: Any) -> Any:
        """Tokenize texts without adding special tokens, as TRL does: a chat template has added them already."""
        return self.tokenizer(text=list(texts), add_special_tokens=False, **options)

    def forward(self, texts: list[str]) -> list[float]:
        """Return the scores (B,) of one batch."""
        inputs = self.encode(texts, return_tensors="pt", padding=True, padding_side="right")
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        try:
            with torch.inference_mode():
                logits = self.model(**inputs.to(self.device)).logits  # (B, 1)
        except (IndexError, RuntimeError) as error:
            if most is None or inputs["input_ids"].shape[1] <= most or is_out_of_memory(error):
                raise
            raise ValueError(f"a prompt with its completion has {inputs['input_ids'].shape[1]} tokens, and the reward "
                             f"model has {most} positions: lower max_completion_length, or take another") from error
        return [float(score) for score in logits[:, 0]]


def with_models(functions: Sequence[Any], processing_classes: Any = None, init: dict[str, Any] | None = None,
                template_kwargs: dict[str, Any] | None = None) -> list[Any]:
    """Return the reward functions, with a `RewardModel` in place of each model object or name. `processing_classes` is
    a tokenizer, or a list with an entry for each function. ValueError for a wrong number of tokenizers."""
    tokenizers = [None] * len(functions) if processing_classes is None else processing_classes
    tokenizers = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(functions):
        raise ValueError(f"{len(tokenizers)} reward_processing_classes and {len(functions)} reward functions: the "
                         "numbers must match. Give None for a function, or leave them out for the models' own")
    return [RewardModel(function, tokenizer, init, template_kwargs) if is_model(function) else function
            for function, tokenizer in zip(functions, tokenizers, strict=True)]
