"""Plans: exact where they can be, near what a real step holds, honest where nothing fits."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import LiveStorage
from mixtures import problem
from small_models import random_model
from tables import every_row, not_refused

from bench.memory import weigh
from lowmem_grpo.engines.kv_cache import GrowingCache
from lowmem_grpo.memory import training_step
from lowmem_grpo.memory.cards import Device, device
from lowmem_grpo.memory.cutting import prompts_once, token_rows
from lowmem_grpo.memory.layer_forms import ExpertForm, Linear, nf4_bytes
from lowmem_grpo.memory.model_shape import ModelShape, named_config, named_shapes, shape_name
from lowmem_grpo.memory.plan import MemoryPlan, PlanRow, RunSettings, Workload
from lowmem_grpo.memory.planner import EASE, chosen_for_rollout, max_context, plan
from lowmem_grpo.memory.rows import build
from lowmem_grpo.models.expert_loading import PACKED
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Head, Policy
from lowmem_grpo.models.trained_embedding import TrainedRows
from lowmem_grpo.trainer import embedding_optimizer
from lowmem_grpo.types import ImageToken, MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.utils import GIB

NEAR, LLAMA = 0.05, "llama-3.1-8b"
QWEN3: Any = named_config("qwen3-4b")
TARGETS = [  # case, GiB that it must fit into, and GiB for training alone
    ("llama-3.1-8b", 20480, 14, 11), ("llama-3.1-8b", 131072, 24, 24), ("qwen2.5-1.5b", 2048, 4, 4),
    ("phi-4-14b", 8192, 15, 15), ("llama-3.3-70b", 2048, 46, 46),
]
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "phi3": "Phi3ForCausalLM"}
RANDOM_SHAPES = 3  # a qwen3, a phi3 and a llama


def settings_of(context: int, **changes: Any) -> RunSettings:
    """Settings with nothing left open, as `weigh` has them by default."""
    fixed = RunSettings(context, max_tokens=context, mlp_tile=4096, chunk_rows=1024, optim="adamw_8bit",
                        host_embedding=False)
    return replace(fixed, **changes)


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(named_config(name))


def planned(name: str, card: str, context: int, **changes: Any) -> MemoryPlan:
    return plan(named_config(name), RunSettings(context, **changes), device(card))


def rows_of(found: MemoryPlan) -> dict[str, PlanRow]:
    return {row.name: row for row in found.rows}


def planned_bytes(config: dict[str, Any], settings: RunSettings) -> int:
    return build(ModelShape.from_config(config), settings, device("1024GiB")).train_allocated


def shallow(config: dict[str, Any], layers: int = 4) -> dict[str, Any]:
    """The same with few layers: what a layer adds is the same in each. A period is kept of layers that differ."""
    if config.get("layer_types"):
        return config | {"num_hidden_layers": 12, "layer_types": config["layer_types"][:12], "num_kv_shared_layers": 6}
    return config | {"num_hidden_layers": max(layers, config.get("full_attention_interval", 0))}


def weighed(config: dict[str, Any], context: int, near: float = NEAR, **features: Any) -> weigh.Weighed:
    """What a step was weighed at, which must be what is planned for it."""
    measured = weigh.weigh(config, [context], weigh.Features(**features))
    settings = {"chunk_rows" if name == "logits_chunk" else name: value for name, value in features.items()}
    assert math.isclose(planned_bytes(config, settings_of(context, **settings)), measured.device, rel_tol=near)
    return measured


def drawn_shape(seed: int) -> tuple[dict[str, Any], int]:
    """A config of random sizes, and a context."""
    draw = random.Random(seed)
    family, kv_heads = draw.choice(sorted(FAMILIES)), draw.choice([2, 4, 8])
    heads = kv_heads * draw.choice([1, 2, 4])
    size = draw.choice([64, 128])
    hidden = heads * size if family in ("phi3", "qwen2") else draw.randrange(1024, 5121, 256)
    config = {
        "model_type": family, "hidden_size": hidden, "intermediate_size": draw.randrange(2 * hidden, 5 * hidden, 256),
        "num_hidden_layers": draw.randrange(4, 9), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": size, "vocab_size": draw.randrange(32_000, 160_001, 64), "max_position_embeddings": 131072,
        "tie_word_embeddings": draw.random() < 0.5, "pad_token_id": 0,
    }
    return config, draw.randrange(2048, 16385, 512)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("gemma-4-e4b", "qwen3.6-27b")))  # weighing them takes long
    for name in {named_config(name)["model_type"]: name for name in named_shapes()}.values()])
@pytest.mark.every(3)
def test_weights_and_adapters_are_planned_to_the_byte(name: str) -> None:
    config = shallow(named_config(name), 2)
    found = weigh.weigh(config, [64])
    check_fixed(build(ModelShape.from_config(config), settings_of(64), device("80GiB")), found)


def check_fixed(built: MemoryPlan, found: weigh.Weighed) -> None:
    """Check that weights, adapters and gradients are planned to the byte."""
    rows = {row.name: row.train for row in built.rows}
    assert rows["weights"] + rows["embedding"] + rows["head"] == found.weights
    assert (rows["adapters"], rows["gradients"]) == (found.adapters, found.gradients)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [("qwen3.5-4b", 512), ("gemma-4-e4b", 8192)])
def test_two_periods_of_layers_that_differ_are_planned_within_five_percent(name: str, context: int) -> None:
    """Beside fewer weights than the whole model's, whose bytes are exact, so that an error in a layer shows more."""
    config, chunk = shallow(named_config(name), 8), min(256, context // 4)  # half of the trained tokens or fewer
    measured = weighed(config, context, logits_chunk=chunk)
    beside = measured.device - measured.activations
    activations = planned_bytes(config, settings_of(context, chunk_rows=chunk)) - beside
    assert math.isclose(activations, measured.activations, rel_tol=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [(name, context) for name, context, _, _ in TARGETS])
def test_a_step_holds_what_was_planned_within_five_percent_and_no_matrix_of_tokens(name: str, context: int) -> None:
    chunk, tile = max(1024, context // 16), max(4096, context // 8)
    measured = weighed(shallow(named_config(name), 3), context, logits_chunk=chunk, mlp_tile=tile)
    assert max(math.prod(made.shape) for _, _, made in measured.breakdown) < max(context**2 / 8, chunk * 200_000)


BOTH = ("embed_tokens", "lm_head")
TABLES = {LLAMA: 2 * 128_256 * 4096, "qwen3-4b": 151_936 * 2560}  # numbers, by hand: two matrices, and a tied one


@pytest.mark.parametrize(("name", "optim", "gib"), [
    (LLAMA, "adamw_8bit", 5.9), ("qwen3-4b", "adamw_8bit", 2.2), (LLAMA, "adamw_torch", 11.75),
])
def test_an_embedding_and_head_that_are_trained_would_take_bytes_that_no_row_has(
    name: str, optim: str, gib: float
) -> None:
    """Of each number 2 bytes of copy, 2 of gradient, and 8 of states or two codes and their scales of 256 numbers."""
    numbers, state = TABLES[name], 8 if optim == "adamw_torch" else 2 + 2 * 4 / 256
    alone, trained, one = (build(shape_of(name), settings_of(2048, optim=optim, modules_to_save=names),
                                 device("1024GiB")) for names in ((), BOTH, BOTH[:1]))
    before, after = rows_of(alone), rows_of(trained)
    more = {row: after[row].train - (before[row].train if row in before else 0)
            for row in ("trained copies", "gradients", "optimizer")}
    assert more == {"trained copies": 2 * numbers, "gradients": 2 * numbers,
                    "optimizer": pytest.approx(state * numbers, abs=1)}
    assert sum(more.values()) / GIB == pytest.approx(gib, abs=0.05)
    assert all(after[row] == before[row] for row in ("embedding", "head", "adapters", "adapter copy"))
    half = 1 if name == "qwen3-4b" else 2  # a tied matrix is one, whichever of its names is given
    assert rows_of(one)["trained copies"].train == 2 * numbers // half
    file = (after["adapters"].train + 2 * numbers * (2 if name == "qwen3-4b" else 1)) / GIB  # PEFT writes both names
    assert f"the adapter's file takes {file:.2f} GiB" in after["trained copies"].note


@pytest.mark.parametrize(("name", "layers", "context", "modules", "changes"), [
    ("qwen3-4b", 2, 512, BOTH, {"optim": "adamw_torch", "logits_chunk": 256}),  # most in the embedding's backward pass
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (LLAMA, 3, 1024, BOTH, {}), (LLAMA, 2, 4096, BOTH[:1], {}),
        (LLAMA, 3, 20480, BOTH[1:], {"logits_chunk": 1280}), ("qwen3-4b", 4, 16384, BOTH[:1], {}),
    )),
])
def test_a_step_that_trains_embedding_and_head_holds_what_was_planned_for_it(
    name: str, layers: int, context: int, modules: tuple[str, ...], changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside fewer layers than the whole model's, whose bytes are exact, so that an error in what is new shows more."""
    monkeypatch.setattr(embedding_optimizer, "CACHED", embedding_optimizer.AT_ONCE)  # its numbers at a time on a card
    config = shallow(named_config(name), layers)
    measured = weighed(config, context, modules_to_save=modules, **changes)
    settings = {"chunk_rows" if key == "logits_chunk" else key: value for key, value in changes.items()}
    built = build(ModelShape.from_config(config), settings_of(context, modules_to_save=modules, **settings),
                  device("1024GiB"))
    rows = rows_of(built)
    assert rows["adapters"].train + rows["trained copies"].train == measured.adapters
    assert rows["gradients"].train == measured.gradients
    assert math.isclose(rows["optimizer"].train, measured.optimizer, rel_tol=1e-3)
    beside = measured.device - measured.activations
    assert math.isclose(built.train_allocated - beside, measured.activations, rel_tol=0.08)


def test_the_gradients_of_many_trained_rows_take_no_tensor_of_all_tokens_and_rows() -> None:
    tokens, count, size = 20000, 1500, 64
    linear = torch.nn.Linear(size, 2 * count, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    rows = TrainedRows(torch.arange(count), torch.arange(count), torch.nn.Parameter(linear.weight[:count].float()))
    head = type("WithRows", (Head,), {"rows": rows})(linear)
    hidden, targets = torch.randn(tokens, size, dtype=torch.bfloat16, requires_grad=True), torch.arange(tokens) % count
    with LiveStorage() as storage:
        head.scores(hidden, targets, chunk_rows=16)[0].sum().backward()
    assert storage.peak < 4 * tokens * count / 3  # of one such tensor in float32



def test_copies_of_a_trained_head_would_be_missing_on_the_host_and_in_the_sum_of_ranks() -> None:
    def found(**changes: Any) -> MemoryPlan:
        asked = settings_of(2048, engine="transformers", **({"modules_to_save": BOTH} | changes))
        return build(shape_of(LLAMA), asked, device("1024GiB"))

    numbers, lora, plain = TABLES[LLAMA], shape_of(LLAMA).lora_weights(32), found()
    assert found(keeps_reference=True).host - plain.host == 4 * lora + 2 * numbers
    assert rows_of(found(ranks=2))["gradients"].train == 2 * 4 * lora + (2 + 4) * numbers, "they are summed in float32"
    assert rows_of(found(optim="paged_adamw_8bit"))["optimizer"].train > 2 * numbers, "only LoRA's states are paged"
    on_host, half = found(host_embedding=True), numbers // 2
    assert on_host.host - plain.host - 2 * half == pytest.approx((3 * 2 + 2 + 8 / 256) * half, abs=1)
    assert rows_of(on_host)["trained copies"].train == 2 * half
    assert rows_of(found(saved_itemsize=4))["gradients"].train == 4 * (lora + numbers), "float32 beside float16"
    rows = rows_of(found(modules_to_save=(), trained_rows=10))
    assert rows["trained copies"].train == 2 * rows_of(found(trained_rows=0, modules_to_save=(), trained=10 * 4096)
                                                       )["adapters"].train == 2 * 4 * 10 * 4096
    with pytest.raises(ValueError, match=r"modules_to_save is \('wte',\); it must be some of embed_tokens and lm_head"):
        found(modules_to_save=("wte",))


@cache
def without_teacher(tokens: int) -> weigh.Weighed:
    return weigh.weigh(shallow(named_config(LLAMA), 3), [tokens])


TAUGHT = {"sampled_token": (0.5, {}), "full_logits": (0.5, {}), "full_logits alone": (1.0, {}),
          "topk_logits": (0.5, {"distillation_topk": 100})}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "full_logits alone")) for name in TAUGHT])
def test_a_teacher_would_raise_the_peak_of_training(name: str) -> None:
    """With few layers: a teacher would add as much to all of them, and more in proportion."""
    config, (weight, changes) = shallow(named_config(LLAMA), 3), TAUGHT[name]
    tokens = 20480 if name.startswith("full_logits") else 10240  # of fewer, the two logits of a chunk are the peak
    settings = {"teacher": "base", "distillation_mode": name.split()[0], "distillation_weight": weight, **changes}
    alone, taught = without_teacher(tokens), weigh.weigh(config, [tokens], teacher=settings)
    assert taught.device <= 1.01 * alone.device  # hidden states that stay on the card would be 1.04, or 1.02
    if weight == 1:  # else the loss of the rewards keeps as much beside it
        hidden = 2 * config["hidden_size"] * (tokens - weigh.PROMPT)
        base, planned = (build(ModelShape.from_config(config), settings_of(tokens, teacher_hidden_bytes=size),
                               device("24GiB")).host for size in (0, hidden))
        assert math.isclose(taught.host - alone.host, planned - base, rel_tol=NEAR)


KEEPERS = {  # a model, its layers, the tokens of a step, and settings of it: what the layers keep for backward
    "all": ("qwen3-4b", 4, 4096, {"checkpointing": False, "mlp_tile": 0}),
    "inputs on the card": ("qwen3-4b", 8, 4096, {"checkpointing": True}),
    "inputs on the host": ("llama-3.1-8b", 4, 8192, {}),
    **{f"all in {kept} layers": ("qwen3-4b", 4, 4096, {"kept_layers": kept}) for kept in (1, 3)},
    **{f"all in 3 layers of {name}": (name, 4, 2048, {"kept_layers": 3})
       for name in ("qwen3-30b-a3b", "gemma-4-e4b", "phi-4-14b")},
    "all in 3 layers of qwen3.5-4b": ("qwen3.5-4b", 4, 1024, {"kept_layers": 3, "chunk_rows": 128}),
    "keys that others lend": ("gemma-4-e4b", 4, 10240, {}),  # made again in backward, if held, would be 1.8% more
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KEEPERS)
def test_what_layers_keep_for_backward_is_planned_on_the_card_and_on_the_host(case: str) -> None:
    name, layers, context, changes = KEEPERS[case]
    config, settings = shallow(named_config(name), layers), settings_of(context, **changes)
    features = {"logits_chunk" if key == "chunk_rows" else key: value for key, value in changes.items()
                if key != "mlp_tile"}
    measured = weigh.weigh(config, [context], weigh.Features(**features))
    found = build(ModelShape.from_config(config), settings, device("1024GiB"))
    near = 0.01 if context == 10240 else NEAR
    assert math.isclose(found.train_allocated, measured.device, rel_tol=near)
    if name in ("qwen3-4b", "llama-3.1-8b"):  # within a layer's input
        assert abs(found.host - measured.host) <= 2 * context * config["hidden_size"] + 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM_SHAPES))
def test_a_random_shape_holds_what_was_planned_for_it_within_five_percent(seed: int) -> None:
    weighed(*drawn_shape(seed))


@pytest.mark.parametrize("window", [1024, 4096])
@pytest.mark.slow
def test_a_window_makes_no_matrix_of_tokens_and_its_mask_is_planned_for(window: int) -> None:
    config = {
        "model_type": "mistral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32_000, "max_position_embeddings": 131072,
        "pad_token_id": 0, "sliding_window": window,
    }
    context = 8192
    measured = weighed(config, context)
    assert measured.device < planned_bytes(config | {"sliding_window": None}, settings_of(context)) + context**2
    free = config | {"model_type": "qwen2", "use_sliding_window": False}
    assert (ModelShape.from_config(config).window, ModelShape.from_config(free).window) == (window, None)


OF_IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {  # text model, the tower, tokens of 512 x 512 pixels
    "qwen2_5_vl": ("qwen2.5-7b", {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
                                  "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2}, 324),
    "qwen3_vl": ("qwen3-8b", {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
                              "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2,
                              "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}, 256),
}


def weighed_with_image(kind: str, layers: int = 3) -> tuple[Any, int, int, int]:
    """The plan of eight completions of a prompt with an image, its bytes, those weighed, and the text model's."""
    name, vision, image = OF_IMAGES[kind]
    text = shallow(named_config(name), layers)
    config = {"model_type": kind, "text_config": text | {"model_type": f"{kind}_text"}, "vision_config": vision}
    shape = ModelShape.from_config(config)
    assert shape.vision and shape.vision.tokens(512 * 512) == image
    plain = group_of_eight(512, 1536)
    batch = replace(plain, images={place: ImageToken(1, "seen") for place in range(64, 64 + image)})
    places = len(batch.input_ids)
    settings = settings_of(2048, max_tokens=places, spread=token_rows(batch.prompts) / places, image_tokens=image)
    built = build(shape, settings, device("1024GiB"))
    of_images, of_text = weigh.weigh(config, [places], batch=batch), weigh.weigh(text, [places], batch=plain)
    tower = {row.name: row.train for row in built.rows}["vision tower"]
    assert of_images.weights == of_text.weights + tower, "the tower is planned to the byte"
    return built, built.train_allocated, of_images.device, of_text.device + tower


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_IMAGES)
def test_a_model_of_images_holds_what_is_planned_and_hardly_more_than_its_text_model_and_tower(kind: str) -> None:
    built, found, measured, text = weighed_with_image(kind)
    assert math.isclose(found, measured, rel_tol=NEAR) and measured <= 1.1 * text
    assert "image features" in {row.name for row in built.rows}


def test_a_tower_waits_on_the_host_only_where_the_card_has_no_room_for_it() -> None:
    name, vision, image = OF_IMAGES["qwen2_5_vl"]
    text = named_config(name)
    config = {"model_type": "qwen2_5_vl", "text_config": text | {"model_type": "qwen2_5_vl_text"},
              "vision_config": vision}
    settings = RunSettings(context=2048, num_generations=8, engine="transformers", image_tokens=image)
    plans = {size: plan(config, settings, device(size)) for size in ("8.5GiB", "16GiB")}
    assert all(each.fits for each in plans.values())
    assert {size: each.settings.host_tower for size, each in plans.items()} == {"8.5GiB": True, "16GiB": False}
    rows = {size: {row.name: row for row in each.rows} for size, each in plans.items()}
    assert "vision tower" not in rows["8.5GiB"] and "vision tower" in rows["8.5GiB"]["host buffers"].note
    assert rows["8.5GiB"]["host buffers"].host >= rows["16GiB"]["vision tower"].train > 2**30
    assert plan(text, replace(settings, image_tokens=0), device("8.5GiB")).settings.host_tower is None


def group_of_eight(prompt: int, completion: int) -> MicroBatch:
    """One prompt with eight completions, in one micro-batch."""
    rollouts = [Rollout([1] * completion, [0.0] * completion, "stop", advantage=1.0) for _ in range(8)]
    (batch,) = pack([RolloutGroup({}, [1] * prompt, rollouts)])
    return batch


def bytes_of_group(name: str, batch: MicroBatch) -> tuple[int, int]:
    """(planned, weighed) of a step on that micro-batch, by three layers of a model."""
    config, places = shallow(named_config(name), 3), len(batch.input_ids)
    settings = settings_of(batch.max_seqlen, max_tokens=places, spread=token_rows(batch.prompts) / places)
    return planned_bytes(config, settings), weigh.weigh(config, [places], batch=batch).device


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prompt", "completion", "times"), [
    ("qwen2.5-3b", 1024, 128, 4), ("qwen3-4b", 1024, 128, 4), ("phi-4-14b", 1024, 128, 4),
    ("llama-3.1-8b", 400, 128, 1),
])
def test_sequences_that_share_a_prompt_hold_what_is_planned_side_by_side(
    name: str, prompt: int, completion: int, times: int
) -> None:
    """Eight short completions take several times their places in attention: the plan of that area has room for it."""
    batch = group_of_eight(prompt, completion)
    assert len(batch.sources) == token_rows(batch.prompts) >= times * len(batch.input_ids)
    planned, weighed = bytes_of_group(name, batch)
    assert math.isclose(planned, weighed, rel_tol=NEAR)


@pytest.mark.slow
def test_a_prompt_that_is_computed_once_holds_no_more_than_is_planned() -> None:
    """The plan counts copied keys as if there were as many heads of them as of queries: this model has a quarter."""
    batch = group_of_eight(4096, 128)
    assert prompts_once(batch.prompts)
    planned, weighed = bytes_of_group(LLAMA, batch)
    assert weighed <= planned <= 1.15 * weighed


@pytest.mark.parametrize("card", ["h100", "16GiB"])
@pytest.mark.parametrize("name", ["qwen2.5-3b", "qwen3.5-4b", "qwen3-30b-a3b"])
def test_a_bound_of_the_users_below_the_context_is_kept_where_layers_may_keep_all(name: str, card: str) -> None:
    asked = RunSettings(4096, checkpointing="auto", max_tokens=1024)
    assert plan(named_config(name), asked, device(card)).settings.max_tokens == 1024


def test_as_many_layers_keep_what_they_compute_as_there_is_room_for_unless_the_user_says_otherwise() -> None:
    config, shape = named_config("qwen2.5-3b"), shape_of("qwen2.5-3b")
    asked = RunSettings(640, completions_per_step=64, checkpointing="auto")
    roomy, middle, tight = (plan(config, asked, device(gib)) for gib in ("h100", "24GiB", "5GiB"))
    assert all(found.fits for found in (roomy, middle, tight))
    assert (roomy.settings.kept_layers, roomy.host, tight.settings.kept_layers) == (36, 0, 0)
    kept = middle.settings.kept_layers
    assert kept is not None and 0 < kept < 36
    held, more = (build(shape, replace(middle.settings, kept_layers=count, sleeps=True), middle.device)
                  for count in (kept, kept + 1))
    assert held.train <= EASE * middle.device.budget
    assert more.train > EASE * more.device.budget, "one more layer has no room"
    known = plan(config, asked, device("4090"))
    assert (known.settings.kept_layers or 0) > kept, "with smaller micro-batches, whose time is known"
    assert (known.settings.max_tokens or 0) < (middle.settings.max_tokens or 0)
    long = planned("llama-3.1-8b", "16GiB", 20480, checkpointing="auto")
    assert long.settings.kept_layers == 0, "room for a few of 32 layers is not worth filling the card"
    for fixed in ({"checkpointing": "offload"}, {"checkpointing": True}, {"mlp_tile": 512}):
        found = plan(config, replace(asked, **fixed), device("80GiB")).settings  # type: ignore[arg-type]
        assert (found.kept_layers, found.checkpointing) == (0, fixed.get("checkpointing", "offload"))


@every_row(("name", "context", "gib", "training"), TARGETS)
def test_a_named_case_fits_the_card_that_was_promised(name: str, context: int, gib: int, training: int) -> None:
    found = plan(named_config(name), RunSettings(context), device(f"{gib}GiB"), name)
    assert found.fits
    assert found.peak <= gib * GIB
    assert found.train <= training * GIB
    assert found.concurrent_sequences >= 1


def gsm8k_like(seed: int = 0) -> list[tuple[int, list[int]]]:
    """8 prompts of about 100 tokens, 8 completions each of about 200 and at most 512."""
    draw = random.Random(seed)
    return [(draw.randint(70, 130), [min(512, max(40, round(draw.gauss(178, 90)))) for _ in range(8)])
            for _ in range(8)]


def test_a_step_of_gsm8k_is_cut_into_at_most_two_micro_batches_on_a_card_of_24_gib() -> None:
    found, step = planned("qwen2.5-3b", "24GiB", 640, completions_per_step=64), gsm8k_like()
    assert 12_000 < sum(prompt - 1 + sum(lengths) for prompt, lengths in step) < 13_500
    assert found.micro_batches(step) <= 2
    settings = found.settings
    assert (settings.optim, settings.chunk_rows, settings.mlp_tile) == (
        "adamw_torch_fused", 1024, settings.max_tokens)


def test_the_long_case_of_8b_holds_no_more_and_samples_no_fewer_than_before_micro_batches_grew() -> None:
    found = planned(LLAMA, "16GiB", 20480)
    rows = rows_of(found)
    copy, states = rows["adapter copy"].train, rows["optimizer"].train  # came later: 0.16 and 0.01 GiB
    assert found.train_allocated - states <= 7.89 * GIB and found.train - copy - states <= 8.95 * GIB  # 7.88 and 8.94
    assert found.concurrent_sequences >= 3
    fixed = plan(named_config(LLAMA), settings_of(20480, spread=None), device("1024GiB"))
    assert fixed.settings.spread and fixed.settings.spread < 1
    assert fixed.train_allocated <= 8.05 * GIB


@every_row(("name", "card", "context", "before"), [  # at commit 56e294e
    (LLAMA, "16GiB", 20480, (3, "paged_adamw_8bit", 1024, 4096)),
    (LLAMA, "8GiB", 4096, (2, "paged_adamw_8bit", 1024, 4096)),
    (LLAMA, "8GiB", 640, (8, "adamw_8bit", 1024, 4096)),
    ("qwen3-8b", "8GiB", 2048, (2, "paged_adamw_8bit", 256, 4096)),  # 3 without the sampler's copy of the adapter
    ("qwen2.5-3b", "4GiB", 8192, (2, "paged_adamw_8bit", 256, 2048)),  # 1 and 4,096 with prefills of 8,192 tokens
    (LLAMA, "12GiB", 4096, (8, "adamw_torch_fused", 1024, 4096)),
])
def test_larger_micro_batches_cost_no_sequence_and_no_slower_setting(
    name: str, card: str, context: int, before: tuple[Any, ...]
) -> None:
    found = planned(name, card, context)
    settings = found.settings
    assert (found.concurrent_sequences, settings.optim, settings.chunk_rows, settings.mlp_tile) == before


@pytest.mark.parametrize(("name", "card", "before"), [  # at commit 56e294e
    (LLAMA, "8GiB", 6528), (LLAMA, "12GiB", 38144), (LLAMA, "16GiB", 70912), (LLAMA, "t4", 56576),
    ("qwen2.5-3b", "4GiB", 11776),
])
def test_the_longest_context_does_not_fall_as_micro_batches_grow(name: str, card: str, before: int) -> None:
    assert max_context(named_config(name), RunSettings(1), device(card)) >= before


def test_micro_batches_leave_the_last_tenth_of_a_card_and_end_with_a_step() -> None:
    tight = planned(LLAMA, "12GiB", 640)
    assert tight.train <= EASE * 12 * GIB and (tight.settings.max_tokens or 0) > 8 * 640
    assert planned(LLAMA, "80GiB", 640, completions_per_step=4).settings.max_tokens == 4 * 640
    assert [planned(LLAMA, gib, 640).settings.max_tokens for gib in ("80GiB", "24GiB")] == [
        32768 // 640 * 640, 16384 // 640 * 640]


def test_a_host_with_little_memory_gets_no_more_layer_inputs_than_it_holds() -> None:
    found = planned(LLAMA, "24GiB", 640, host_bytes=2 * GIB)
    assert found.host <= 2 * GIB < planned(LLAMA, "24GiB", 640).host
    assert found.settings.optim == "adamw_torch_fused"


def test_rows_add_up_every_component_has_one_and_json_holds_them() -> None:
    found = planned(LLAMA, "16GiB", 20480)
    assert sum(row.train for row in found.rows) == found.train
    assert sum(row.rollout for row in found.rows) == found.rollout
    assert {row.name for row in found.rows} >= {
        "weights", "embedding", "head", "adapters", "gradients", "optimizer", "KV cache", "layer recompute",
        "MLP tile", "logits chunk", "U and hidden states", "attention workspace", "host buffers", "CUDA context",
        "reserve",
    }
    again = json.loads(json.dumps(found.to_dict()))
    assert again["train"] == found.train and again["fits"] is True
    assert [row["name"] for row in again["rows"]] == [row.name for row in found.rows]


def test_settings_that_were_asked_for_stay_as_they_are() -> None:
    asked = RunSettings(4096, max_tokens=4096, mlp_tile=2048, chunk_rows=128, optim="adamw_torch", kv_bytes=GIB,
                        host_embedding=False, spread=1.0, head_groups=1)
    found = plan(named_config(LLAMA), asked, device("8GiB"))
    assert (found.settings, found.choices) == (asked, ())


def test_a_smaller_card_gets_slower_settings_and_is_told_what_each_bought() -> None:
    roomy, tight = (planned(LLAMA, gib, 8192, engine="transformers") for gib in ("80GiB", "9.5GiB"))
    assert [choice.name for choice in roomy.choices] == ["kv_bytes", "mlp_tile", "sleeps"]  # MLPs whole, graphs kept
    bought = {choice.name: choice.saved for choice in tight.choices if choice.name != "kv_bytes"}
    assert {"optim", "host_embedding"} <= set(bought)
    assert all(saved > 0 for saved in bought.values())
    assert tight.train < roomy.train


def test_the_cache_takes_what_is_left_and_never_more_than_a_group_needs() -> None:
    assert planned("qwen2.5-1.5b", "80GiB", 2048).kv_bytes == 8 * shape_of("qwen2.5-1.5b").kv_bytes(2048)
    tight = planned(LLAMA, "14GiB", 20480)
    assert tight.rollout <= 14 * GIB and 1 <= tight.concurrent_sequences < 8


def test_the_longest_context_fits_a_longer_one_does_not_and_is_told_the_longest() -> None:
    for gib, least in (("16GiB", 20480), ("12GiB", 0)):
        longest = max_context(named_config(LLAMA), RunSettings(1), device(gib))
        assert least < longest < 131072 and planned(LLAMA, gib, longest).fits
        assert not planned(LLAMA, gib, longest + 128).fits
    far = planned(LLAMA, "12GiB", 131072)
    assert not far.fits and f"is {longest:,} tokens" in far.advice[0]


def test_a_plan_that_does_not_fit_is_told_what_would() -> None:
    found = planned("llama-3.3-70b", "t4", 2048)
    words = " ".join(found.advice)
    assert not found.fits and "weights and adapters alone take" in words
    assert "the largest known model that fits" in words and "phi-4-14b" in words
    words = " ".join(planned("phi-4-14b", "12GiB", 2048, form="fp8").advice)
    assert "the largest known model that fits" in words, "of those that can be held in FP8"
    found, eight = (planned(LLAMA, "14GiB", 61_440, kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    assert not found.fits and found.advice[0].startswith("with kv_cache_dtype=fp8 it fits") and eight.fits


@every_row(("call", "message"), [
    (lambda: plan("qwen3-4b", RunSettings(256), device("h100")), r"config is 'qwen3-4b'.*named_config\(name\)"),
    (lambda: plan(QWEN3, {"context": 256}, device("h100")), "run_config is {'context': 256}; .*RunSettings.context"),
    (lambda: max_context(QWEN3, RunSettings(256), "h100"), r"device is 'h100'; .*planning.device\('h100'\)"),
    (lambda: named_config(None), "the model is None; give one of gemma"),
    (lambda: named_config(""), "the model is ''; give one of gemma"),
    (lambda: Workload(2, 8, "10", 20, 30), "prompt_length is '10'; it must be at least 1"),
    (lambda: Workload(2, 8, 10, 20, 30, updates=1.5), "updates is 1.5; it must be a whole number"),
    (lambda: Workload(0, 8, 10, 20, 30), "prompts is 0; it must be"),
])
def test_arguments_of_a_plan_that_are_something_else_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="context is 50000; this model's is 40960 at most"):
        planned("qwen3-8b", "h100", 50000)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} is 0") for name in (
        "context", "num_generations", "completions_per_step", "max_tokens", "head_groups", "longest_completion")),
    *(({name: -1}, f"{name} is -1") for name in ("mlp_tile", "spread", "host_bytes")),
    ({"optim": "sgd"}, "optim is 'sgd'; it must be one of adamw_torch, "), ({"engine": "sglang"}, "engine is 'sglang'"),
    ({"checkpointing": "yes"}, "checkpointing is 'yes'"), ({"host_embedding": True}, "looks the embedding up"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'; it must be one of auto, fp8, fp8_e4m3, fp8_e5m2"),
    ({"kv_cache_dtype": "fp8", "engine": "transformers"}, "whose cache has the model's dtype; use engine='vllm'"),
    ({"sampling_weights": "8bit"}, "sampling_weights is '8bit'; it must be one of 4bit, 16bit, or None"),
    *(({"sampling_weights": "16bit", "form": form, "engine": engine},
       "sampling_weights is '16bit', which needs 4-bit or FP8 weights")
      for form in ("16bit", "mxfp4") for engine in ("vllm", "transformers")),
]


def test_impossible_settings_are_refused_by_name() -> None:
    assert not_refused(lambda changes: RunSettings(**{"context": 2048} | changes), IMPOSSIBLE) == []


def test_a_hub_name_finds_its_shape() -> None:
    shapes = {
        "meta-llama/Llama-3.1-8B-Instruct": LLAMA, "meta-llama/Meta-Llama-3.1-8B": LLAMA,
        "unsloth/Qwen2.5-1.5B-Instruct-unsloth-bnb-4bit": "qwen2.5-1.5b", "Qwen/Qwen3-8B-Base": "qwen3-8b",
        "microsoft/phi-4": "phi-4-14b", "LLAMA-3.3-70B": "llama-3.3-70b", "Qwen/Qwen3-32B": None,
        "Qwen/Qwen3.8-27B": "qwen3.6-27b", "unsloth/Qwen3.6-27B": "qwen3.6-27b",
    }
    assert {name: shape_name(name) for name in shapes} == shapes


def test_qwen_of_27_billion_has_the_numbers_of_its_model_card() -> None:
    """48 of 64 layers are gated delta nets: 16 heads of q and k, 48 of v and of its gate; others attend with a gate."""
    wide, mlp = 5120, 3 * 5120 * 17408
    delta = wide * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 48 * 128 * wide
    attention = wide * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * wide
    shape = shape_of("Qwen/Qwen3.8-27B")
    assert shape.linear_weights == 64 * mlp + 48 * delta + 16 * attention
    assert 26.8e9 < shape.linear_weights + 2 * shape.vocabulary * shape.hidden < 27e9 and not shape.tied
    assert shape.context == 262_144


@every_row(("content", "message"), [
    ("{", "cannot be read"), ("[]", "holds no object"), ('{"hidden_size": 64}', "has no intermediate_size"),
    *((json.dumps(named_config("qwen3-4b") | {name: size}),
       f"config.json: {name} is {size}; it must be a whole number, from 1 to ")
      for name, size in (("num_hidden_layers", 0), ("hidden_size", -5))),
])
def test_a_config_that_describes_no_decoder_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        shape_of(str(tmp_path))


def test_only_states_of_large_tensors_are_planned_in_memory_that_the_driver_may_move_to_the_host() -> None:
    """In bitsandbytes' source: states of fewer than 100,000 numbers and the scales of all are the card's."""
    small, large = 32 * 32 * 2 * 1024, 32 * 32 * (9 * 4096 + 3 * 14336)  # one side of each k and v, and all others
    held, paged = (build(shape_of(LLAMA), settings_of(512, optim=optim), device("24GiB"))
                   for optim in ("adamw_8bit", "paged_adamw_8bit"))
    assert held.needed("train") - paged.needed("train") == paged.host - held.host == 2 * large
    assert rows_of(paged)["optimizer"].train == 2 * small + (small + large) // 32


def test_a_plan_says_which_phase_wants_more() -> None:
    assert build(shape_of(LLAMA), settings_of(20480), Device("x", GIB, GIB)).short_of() == ["train", "rollout"]


# what the sampler holds


def test_the_samplers_copy_of_the_adapter_is_planned_at_2_bytes_a_number_in_training_only_where_it_stays() -> None:
    shape = shape_of("qwen2.5-3b")
    copies = [rows_of(build(shape, settings_of(640, engine=engine), device("24GiB")))["adapter copy"]
              for engine in ("vllm", "transformers")]
    numbers = shape.lora_weights(32)
    assert [(copy.rollout, copy.train) for copy in copies] == [(2 * numbers, 2 * numbers), (2 * numbers, 0)]


def test_our_own_engine_keeps_cache_graphs_and_adapters_while_training_only_where_they_have_room() -> None:
    kept = [planned(LLAMA, gib, 640, engine="transformers", sequences=64) for gib in ("14GiB", "40GiB")]
    assert [found.settings.sleeps for found in kept] == [True, False] and all(found.fits for found in kept)
    tight, roomy = map(rows_of, kept)
    for name in ("KV cache", "adapter copy"):
        assert tight[name].train == 0 < roomy[name].train == roomy[name].rollout
    assert roomy["KV cache"].train == 64 * shape_of(LLAMA).kv_bytes(640)
    assert (tight["engine workspace"].train, roomy["engine workspace"].train) == (0, 384 * 2**20)
    assert kept[1].train <= 0.9 * kept[1].device.budget
    hybrid = planned("qwen3.5-4b", "40GiB", 640, engine="transformers")
    assert hybrid.settings.sleeps, "steps of it are not recorded"


def test_vllm_keeps_its_cache_while_training_only_where_it_has_room_beside_layers_that_keep_all() -> None:
    """Its sleep empties torch's cache, which takes long to fill again where layers keep what they compute."""
    found = {card: plan(named_config("qwen2.5-3b"), RunSettings(640, checkpointing="auto", completions_per_step=64),
                        device(card)) for card in ("h100", "5GiB")}
    assert {card: plan.settings.sleeps for card, plan in found.items()} == {"h100": False, "5GiB": True}
    assert {card: rows_of(plan)["KV cache"].train for card, plan in found.items()} == {
        "h100": found["h100"].kv_bytes, "5GiB": 0}
    assert all(each.fits for each in found.values()) and found["h100"].settings.kept_layers == 36
    full = replace(found["h100"].settings, sleeps=True, kv_bytes=20 * 2**30)
    assert plan(named_config("qwen2.5-3b"), replace(full, kept_layers=36), device("h100")).settings.sleeps


@pytest.mark.parametrize(("name", "card", "sleeps"), [
    ("qwen2.5-3b", "h100", False), ("qwen2.5-3b", "t4", False), (LLAMA, "v100-32", True)
])
def test_our_own_engine_keeps_weights_in_16_bits_while_training_only_where_they_have_room(
    name: str, card: str, sleeps: bool
) -> None:
    """By hand: of 36 layers q and o of 2048 x 2048, k and v of 256, an MLP of 11008; of 32, 4096, 1024 and 14336."""
    numbers = {"qwen2.5-3b": 36 * 2048 * (2 * 2048 + 2 * 256 + 3 * 11008),
               LLAMA: 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)}[name]
    found = planned(name, card, 640, engine="transformers", sequences=64)
    wide = rows_of(found)["sampling weights"]
    assert (found.settings.sampling_weights, found.settings.sleeps) == ("16bit", sleeps)
    assert (wide.rollout, wide.train) == (2 * numbers, 0 if sleeps else 2 * numbers)
    assert ("stay" in wide.note) == (not sleeps) and found.fits
    assert sleeps or found.train <= 0.9 * found.device.budget
    in_vllm = build(shape_of(name), replace(found.settings, engine="vllm", sleeps=False), device(card))
    assert rows_of(in_vllm)["sampling weights"].train == 2 * numbers, "they lie in its pool, which only sleep frees"


@pytest.mark.parametrize("name", ["qwen2.5-3b", LLAMA])
@pytest.mark.parametrize("context", [640, 20480])
def test_weights_are_dequantized_while_sampling_only_where_the_whole_cache_has_room_beside_them(
    name: str, context: int
) -> None:
    wider = 0
    for gib in (12, 16, 24, 40, 80, 141):
        found, narrow = (planned(name, f"{gib}GiB", context, sampling_weights=form) for form in (None, "4bit"))
        assert (found.concurrent_sequences, found.kv_bytes, found.fits, found.train) == (
            narrow.concurrent_sequences, narrow.kv_bytes, narrow.fits, narrow.train)
        rows = rows_of(found)
        if found.settings.sampling_weights == "16bit":
            wider += 1
            assert found.concurrent_sequences == found.settings.num_generations
            assert rows["sampling weights"].rollout == 2 * shape_of(name).linear_weights
            assert rows["sampling weights"].train == 0
            assert found.rollout <= found.device.budget
            assert "sampling_weights" in {choice.name for choice in found.choices}
        else:
            assert "sampling weights" not in rows
    assert 1 <= wider < 6 or (name, context) == ("qwen2.5-3b", 640)


def test_weights_that_are_not_4_bit_are_never_planned_twice() -> None:
    for engine in ("vllm", "transformers"):
        found = planned("qwen2.5-3b", "141GiB", 640, engine=engine, form="16bit")
        assert found.settings.sampling_weights is None, engine


@pytest.mark.slow
def test_gemma_4s_larger_embedding_is_planned_on_the_host_where_a_card_is_small() -> None:
    config = shallow(named_config("gemma-4-e4b"))
    shape = ModelShape.from_config(config)
    measured = weigh.weigh(config, [256], weigh.Features(host_embedding=True))
    asked = settings_of(256, host_embedding=True, engine="transformers")
    rows = rows_of(build(shape, asked, device("80GiB")))
    assert rows["embedding"].train == 0
    assert rows["weights"].train + rows["head"].train == measured.weights
    assert shape.host_bytes() == 2 * 262144 * 12 * 256
    tight = planned("gemma-4-e4b", "8GiB", 1024, engine="transformers")
    assert tight.fits and tight.settings.host_embedding
    assert tight.host >= shape_of("gemma-4-e4b").host_bytes() == 2 * 262144 * 42 * 256
    assert not planned("gemma-4-e4b", "8GiB", 1024).fits  # vLLM needs it on the card


@every_row(("name", "times"), [
    (LLAMA, 1.9), ("qwen3-8b", 1.9), ("gemma-4-e4b", 1.9), ("qwen3-30b-a3b", 1.9), ("qwen3.5-4b", 1.8),
])
def test_a_cache_in_8_bits_holds_nearly_twice_the_sequences_but_for_the_states_of_hybrid_models(
    name: str, times: float
) -> None:
    whole, eight = (planned(name, "80GiB", 20480, num_generations=1000, kv_bytes=32 * GIB, kv_cache_dtype=kind)
                    for kind in ("auto", "fp8"))
    assert eight.concurrent_sequences >= times * whole.concurrent_sequences
    notes = [rows_of(found)["KV cache"].note for found in (whole, eight)]
    assert notes[0].startswith("16 bits") and notes[1].startswith("8 bits (fp8)")
    (choice,) = chosen_for_rollout(shape_of(name), whole, RunSettings(20480, num_generations=1000))
    assert "with kv_cache_dtype=fp8" in choice.why


def test_8b_samples_all_8_sequences_of_20480_tokens_at_once_on_16_gib() -> None:
    """7 of them without a word about their prompt; 8 where they share 4,096 tokens of prompt, which vLLM holds once."""
    alone, group = (planned(LLAMA, "16GiB", 20480, kv_cache_dtype="fp8", longest_completion=longest)
                    for longest in (None, 16384))
    assert alone.fits and alone.concurrent_sequences == 7
    assert group.fits and group.concurrent_sequences == 8 and group.peak <= 16 * GIB
    # but for the block of the prompt's last token
    assert group.kv_bytes == shape_of(LLAMA).kv_bytes(8 * 20480 - 7 * 4080, 1)
    assert planned(LLAMA, "16GiB", 20480).concurrent_sequences == 3


WIDE = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 128,
        "vocab_size": 32_000, "max_position_embeddings": 131072, "tie_word_embeddings": True, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "key_heads", "groups"), [(32, 8, 8), (8, 8, 4), (30, 5, 2)])
def test_a_step_with_groups_of_heads_holds_what_is_planned_where_attention_holds_most(
    heads: int, key_heads: int, groups: int
) -> None:
    config = WIDE | {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    settings = settings_of(4096, chunk_rows=128, mlp_tile=512, head_groups=groups)
    assert build(ModelShape.from_config(config), settings, device("1024GiB")).moment == "attention backward"
    weighed(config, 4096, head_groups=groups, mlp_tile=512, logits_chunk=128)


@pytest.mark.slow
def test_8b_trains_and_samples_131072_tokens_in_16_gib_and_holds_what_is_planned() -> None:
    config, long = shallow(named_config(LLAMA), 3), {"head_groups": 8, "chunk_rows": 4096}
    built = build(ModelShape.from_config(config), settings_of(131072, **long), device("1024GiB"))
    assert built.moment == "attention backward", "no chunk of logits"
    weighed(config, 131072, head_groups=8, logits_chunk=4096)
    whole, grouped, chosen = (planned(LLAMA, "16GiB", 131072, kv_cache_dtype="fp8", head_groups=count)
                              for count in (1, 8, None))
    assert whole.train - grouped.train >= 5 * GIB
    assert grouped.fits and grouped.train <= 15.2 * GIB
    assert grouped.rollout - grouped.kv_bytes + 131072 * 2 * 32 * 1024 <= 15 * GIB
    assert chosen.settings.head_groups == 8


@pytest.mark.slow
def test_phi_4_trains_and_samples_20480_tokens_in_16_gib() -> None:
    """Its own context is 16,384 tokens: planned as if it were longer."""
    config = named_config("phi-4-14b") | {"max_position_embeddings": 20480}
    asked = RunSettings(20480, kv_cache_dtype="fp8")
    found = plan(config, asked, device("16GiB"))
    assert found.fits and found.train <= 13.5 * GIB and found.concurrent_sequences == 2
    assert plan(config, replace(asked, longest_completion=16384), device("16GiB")).concurrent_sequences == 3
    weighed(shallow(config, 3), 20480, head_groups=10)


def test_heads_are_taken_in_groups_only_where_the_room_wants_it_and_the_plan_says_so() -> None:
    assert planned(LLAMA, "16GiB", 20480).settings.head_groups == 1
    found = planned(LLAMA, "16GiB", 98_304, kv_cache_dtype="fp8")
    assert found.fits and (found.settings.head_groups or 1) > 1
    (choice,) = [one for one in found.choices if one.name == "head_groups"]
    assert choice.value == found.settings.head_groups and choice.saved > GIB
    assert f"of one of {choice.value} groups of heads" in rows_of(found)["attention workspace"].note
    assert not planned(LLAMA, "16GiB", 98_304, kv_cache_dtype="fp8", head_groups=1).fits
    longest = [max_context(named_config(LLAMA), RunSettings(1, kv_cache_dtype="fp8", head_groups=count),
                           device("16GiB")) for count in (1, None)]
    assert longest == [86_912, 131_072]


def test_the_workspace_of_attention_does_not_grow_with_the_number_of_heads() -> None:
    def workspace(heads: int, groups: int) -> int:
        config = WIDE | {"num_attention_heads": heads, "num_key_value_heads": heads // 4}
        found = build(ModelShape.from_config(config), settings_of(65_536, head_groups=groups), device("1024GiB"))
        return rows_of(found)["attention workspace"].train

    assert workspace(64, 1) == 2 * workspace(32, 1)
    assert workspace(64, 16) == workspace(32, 8) == workspace(32, 1) // 8 == workspace(64, 64)


def test_a_hybrid_model_and_our_own_engine_hold_each_prompt_as_often_as_it_is_continued() -> None:
    for name, engine in (("qwen3.5-4b", "vllm"), ("qwen3-4b", "transformers")):
        shared, apart = (planned(name, "80GiB", 8192, engine=engine, longest_completion=longest)
                         for longest in (1024, None))
        assert shared.kv_bytes == apart.kv_bytes


def test_a_hybrid_models_cache_is_planned_in_pages_as_vllm_divides_it() -> None:
    """Qwen3.5-4B: states of 24 layers beside keys of 8. A page of 528 tokens is as large as a layer's states."""
    shape = shape_of("qwen3.5-4b")
    assert shape.delta is not None and shape.states_bytes == 24 * shape.delta.state_bytes
    block = shape.paged_block(16)
    assert 2 * 2 * shape.keys * (block - 16) < shape.delta.state_bytes <= 2 * 2 * shape.keys * block
    page = 8 * block * 2 * 2 * shape.keys
    assert [shape.paged_bytes(tokens) for tokens in (1, block, block + 1)] == [4 * page, 4 * page, 5 * page]
    paged, own = (planned("qwen3.5-4b", "24GiB", 640, engine=engine) for engine in ("vllm", "transformers"))
    assert (paged.kv_bytes, own.kv_bytes) == (8 * shape.paged_bytes(640), 8 * shape.kv_bytes(640))
    together = plan(named_config("qwen3.5-4b"), settings_of(640, engine="transformers", sequences=64), device("24GiB"))
    assert (together.kv_bytes, together.concurrent_sequences) == (64 * shape.kv_bytes(640), 64), "all that are decoded"
    assert "of 8 layers; states of 24, 49 MiB a sequence" in rows_of(paged)["KV cache"].note
    dense = shape_of("qwen3-4b")
    assert dense.paged_bytes(640) == dense.kv_bytes(640) and dense.paged_block(16) == 16


def test_states_and_keys_of_a_hybrid_models_sequence_are_planned_to_the_byte() -> None:
    model, cache = random_model("Qwen3_5").to(torch.bfloat16), GrowingCache()
    with torch.no_grad():
        Policy(model).backbone(input_ids=torch.arange(3, 13)[None], past_key_values=cache, use_cache=True)
    assert cache.nbytes == ModelShape.from_config(model.config).kv_bytes(10)
    fields = model.config.to_dict()
    without = {name: value for name, value in fields.items() if name != "layer_types"}
    assert ModelShape.from_config(without) == ModelShape.from_config(fields)


# mixtures of experts

routed = import_module("lowmem_grpo.kernels.routed_experts")  # whose function has its name
MIXTURE = "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(("changes", "context"), [
    pytest.param({}, 8192, marks=pytest.mark.slow), ({"num_hidden_layers": 4}, 8192),
    ({"num_hidden_layers": 4, "mlp_only_layers": [1]}, 2048),  # a layer with an MLP, frozen
    ({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}, 4096),
])
@pytest.mark.every(3)
def test_experts_are_planned_to_the_byte_and_a_step_within_five_percent(changes: dict[str, Any], context: int) -> None:
    config = named_config(MIXTURE) | changes
    built = build(ModelShape.from_config(config), settings_of(context), device("1024GiB"))
    check_fixed(built, found := weighed(config, context))
    beside = found.device - found.activations
    assert math.isclose(built.train_allocated - beside, found.activations, rel_tol=NEAR)


def test_thirty_billion_weights_take_sixteen_gib_and_train_on_24() -> None:
    found = planned(MIXTURE, "24GiB", 2048, engine="transformers")
    assert sum(rows_of(found)[name].train for name in ("weights", "embedding", "head")) <= 16 * GIB
    assert found.fits and found.concurrent_sequences == 8


def test_what_the_experts_hold_inside_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (training_step.PIECE, training_step.GROUPED_ROWS) == (routed.PIECE, routed.GROUPED_ROWS)
    monkeypatch.setattr("lowmem_grpo.kernels.nf4.REFERENCE_ELEMENTS", 2**12)  # temporaries of the CPU path
    tokens, experts = 4096, ExpertForm(1, 3, 2, 64)
    given = problem(tokens, (3, 2, 128, 64), dtype=torch.bfloat16)
    x, weights = given["x"].detach(), given["weights"].detach()
    with LiveStorage() as storage:
        stacks = map(routed.Matrices, (given["gate_up"], given["down"]))
        routed.routed_backward(x, x, given["ids"], weights, *routed.flat(stacks))
    shape = ModelShape.from_config(named_config(MIXTURE) | {"hidden_size": 128})
    step = training_step.StepShape(shape, RunSettings(tokens), tokens)
    assert 0.8 * storage.peak <= step.at_experts(experts) <= 1.3 * storage.peak


def test_lora_on_each_expert_would_be_missing_in_the_plan() -> None:
    """By hand: of 48 layers, 128 experts with gate and up of 2048 x 1536, and down of 768 x 2048."""
    given = settings_of(512, lora_rank=4)
    alone, each = (rows_of(build(shape_of(MIXTURE), replace(given, expert_lora=every), device("1024GiB")))
                   for every in (False, True))
    numbers = 48 * 128 * 4 * (2048 + 1536 + 768 + 2048)
    assert each["adapters"].train - alone["adapters"].train == 4 * numbers
    assert each["optimizer"].train - alone["optimizer"].train == pytest.approx(2.03125 * numbers, abs=1)
    assert "of rank 4 on attention and each expert" in each["adapters"].note


def test_experts_in_a_form_in_which_they_are_not_held_have_no_plan() -> None:
    with pytest.raises(ValueError, match=r"not held in FP8; plan it in 4 bits, or in 16"):
        shape_of(MIXTURE).weight_bytes("fp8")
    with pytest.raises(ValueError, match=r"mixtral has several experts.*plans are made for Qwen3-MoE, gpt-oss only"):
        ModelShape.from_config(named_config(MIXTURE) | {"model_type": "mixtral", "num_local_experts": 8})


GPT_OSS = "openai/gpt-oss-20b"


def test_gpt_oss_takes_the_bytes_of_its_checkpoint_counted_by_hand() -> None:
    """Of 24 layers: experts of 5,760 and 2,880 rows in codes of half a byte and a scale for 32, and their biases; q, k,
    v and o with biases, a sink for each head, a router with a bias, two norms. Then a norm, and the angles' table."""
    layers, wide, experts = 24, 2880, 32
    numbers = experts * 3 * wide * wide
    attention = wide * (4096 + 2 * 512 + 4096) + 4096 + 2 * 512 + wide + 64
    others = experts * (3 * wide) + experts * (wide + 1) + 2 * wide
    shape = shape_of(GPT_OSS)
    packed = numbers // 2 + numbers // 32
    assert shape.weight_bytes("mxfp4") == layers * (packed + 2 * (attention + others)) + 2 * wide + 4 * 64
    in_nf4 = sum(nf4_bytes(Linear("", rows, columns)) for rows, columns in (
        (4096, wide), (512, wide), (512, wide), (wide, 4096)))
    weights = wide * (4096 + 2 * 512 + 4096)
    offsets = 4 * (719 + 89 + 89)  # q, k and v lie together: an offset for each nested block, not one
    assert shape.weight_bytes("mxfp4") - shape.weight_bytes("nf4") == layers * (2 * weights - in_nf4 - offsets)
    assert round(layers * packed / GIB, 2) == 9.46 and round(shape.table_bytes / GIB, 2) == 1.08
    loaded = named_config(GPT_OSS) | {"quantization_config": {"quant_method": PACKED}}
    assert ModelShape.from_config(loaded) == shape, "its loaded model's config names our quantizer"
    assert shape.kv_bytes(1) == 48 * 1024, "our engine keeps all tokens of the layers with a window too"
    on_attention = layers * 32 * (wide + 4096 + 2 * (wide + 512) + 4096 + wide)
    assert shape.lora_weights(32) == on_attention
    assert shape.lora_weights(32, experts=True) - on_attention == layers * experts * 32 * (wide + 5760 + wide + wide)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("layers", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_gpt_oss_holds_what_is_planned_for_8_sequences_of_2048_tokens(layers: int, every: bool) -> None:
    """With LoRA on attention, and on each expert: weights to the byte, the rest within five percent."""
    config, batch = named_config(GPT_OSS) | {"num_hidden_layers": layers}, group_of_eight(512, 1536)
    places, spread = len(batch.input_ids), token_rows(batch.prompts) / len(batch.input_ids)
    settings = settings_of(2048, expert_lora=every, max_tokens=places, spread=spread, chunk_rows=256)
    found = weigh.weigh(config, [places], weigh.Features(expert_lora=every, logits_chunk=256), batch=batch)
    built = build(ModelShape.from_config(config), settings, device("1024GiB"))
    check_fixed(built, found)
    assert math.isclose(built.train_allocated, found.device, rel_tol=NEAR)
    beside = found.device - found.activations
    assert math.isclose(built.train_allocated - beside, found.activations, rel_tol=NEAR)


def test_gradients_of_lora_on_each_expert_are_planned_where_they_are_most() -> None:
    config, context = named_config(GPT_OSS) | {"num_hidden_layers": 2}, 1024
    settings = settings_of(context, expert_lora=True, chunk_rows=64)
    built = build(ModelShape.from_config(config), settings, device("1024GiB"))
    assert built.moment == "MLP backward"
    found = weigh.weigh(config, [context], weigh.Features(expert_lora=True, logits_chunk=64))
    beside = found.device - found.activations
    assert math.isclose(built.train_allocated - beside, found.activations, rel_tol=0.1)  # without: half as much


@pytest.mark.every(2)
@pytest.mark.parametrize(("card", "context", "together"), [
    ("16GB", 768, 62), ("16GB", 1024, 46), ("16GB", 2048, 22), ("rtx4060ti-16", 768, 64), ("rtx5080", 1024, 51),
])
def test_gpt_oss_trains_within_15_gib_of_a_card_of_16_and_samples_whole_groups(
    card: str, context: int, together: int
) -> None:
    """With its embedding on the host. How many are sampled at a time is what the cache has room for."""
    asked = RunSettings(context, engine="transformers", sequences=64, completions_per_step=64, host_embedding=True,
                        form="16bit")
    found = plan(named_config(GPT_OSS), asked, device(card))
    assert found.fits and found.train <= 15 * GIB
    assert found.needed("rollout") + 8 * shape_of(GPT_OSS).kv_bytes(context) <= 15 * GIB
    assert found.concurrent_sequences == together >= 8
    assert found.settings.form == "mxfp4", "as it is stored"
    small = plan(named_config(GPT_OSS), replace(asked, form="nf4"), device(card))
    assert small.peak <= 15 * GIB and small.concurrent_sequences >= together
    assert rows_of(small)["weights"].note.startswith("experts in MXFP4, as they are stored, linears in NF4")
    assert rows_of(found)["weights"].note.startswith("experts in MXFP4, as they are stored, other linears in 16 bits")
    each = plan(named_config(GPT_OSS), replace(asked, expert_lora=True, lora_rank=8), device(card))
    assert each.fits and each.train <= 15 * GIB and "attention and each expert" in rows_of(each)["adapters"].note
    own, vllm = (" ".join(plan(named_config("llama-3.3-70b"), RunSettings(2048, engine=engine), device("16GiB")).advice)
                 for engine in ("transformers", "vllm"))
    assert "2,048 tokens is gpt-oss-20b" in own and "2,048 tokens is phi-4-14b" in vllm, "which does not sample it"


def test_a_model_that_overflows_in_float16_takes_four_bytes_a_number_on_a_card_without_bfloat16() -> None:
    """By hand: a table of all tokens and 2,560 numbers, which is embedding and head."""
    old, new = (rows_of(planned("qwen3.5-4b", card, 2048, engine="transformers")) for card in ("t4", "l4"))
    table = shape_of("qwen3.5-4b").vocabulary * 2560
    assert (old["head"].train, new["head"].train) == (4 * table, 2 * table)
    assert "32 bits" in old["KV cache"].note and old["head"].note == "32 bits"
    on_t4 = planned(GPT_OSS, "t4", 2048, engine="transformers", host_embedding=True, form="16bit")
    assert not on_t4.fits and on_t4.peak > 15 * GIB, "its attention and its head take 2.27 GiB more than in 16 bits"
    on_t4 = planned(GPT_OSS, "t4", 1024, engine="transformers", host_embedding=True)
    assert on_t4.fits and on_t4.concurrent_sequences >= 8, "with attention in NF4"
    assert planned("qwen2.5-3b", "t4", 2048).train == planned("qwen2.5-3b", "l4", 2048).train, "float16 serves there"
