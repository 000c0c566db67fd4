"""TRL's trainer on the kernels against TRL's own: loss, metrics, gradients, memory; refusals; the page's examples."""

import ast
import inspect
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from memory import LiveStorage
from small_models import SHAPE, SPLIT, TINY, load_model, random_model, scatter, with_adapter
from tables import every_row
from transformers import AutoTokenizer

if os.environ.get("CI") != "true":  # in CI its absence fails the import below
    pytest.importorskip("trl", reason="TRL is a development dependency")

import trl
from trl.experimental.gmpo import GMPOTrainer
from trl_runs import (
    Rollouts,
    TrlRun,
    make_trainer,
    prepare,
    random_rollouts,
    trl_run,
    window,
    with_sampler_noise,
)

from lowmem_grpo.integrations.trl import OVERRIDDEN, TRL, check_version, logit_shape, refused, use_lowmem_kernels
from lowmem_grpo.models.trained_embedding import prepare_embeddings

pytestmark = pytest.mark.filterwarnings("ignore:.*(rollout_func|supports vLLM).*")
PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
assert len(BLOCKS) == 2
STALE = {"num_iterations": 2, "drift": 0.05}  # TRL then keeps the old log-probabilities, and the ratio is not 1


def seeded(family: str, **options: Any) -> transformers.PreTrainedModel:
    """A model of a family that only these tests train; a bias of its head is random too."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SHAPE, **options))
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def lora_with_head() -> peft.LoraConfig:
    """An adapter that has a head of its own."""
    return peft.LoraConfig(r=4, target_modules=SPLIT, task_type="CAUSAL_LM", modules_to_save=["lm_head"])


def with_head_of_its_own() -> peft.PeftModel:
    """A model under such an adapter, whose head was moved away from the model's."""
    adapted = peft.get_peft_model(load_model("Llama"), lora_with_head())
    head = adapted.get_base_model().lm_head.modules_to_save["default"].weight
    head.data += 0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(5))
    return adapted


CASES: dict[str, dict[str, Any]] = {  # a model or an adapter may be a function that makes it
    "dapo": {},
    "dapo in micro-batches": {"micro_batches": 3},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, **STALE},
    "dr_grpo with two-sided clipping": {"loss_type": "dr_grpo", "delta": 1.3, **STALE},
    "sequence level": {"loss_type": "grpo", "importance_sampling_level": "sequence", **STALE},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **STALE},
    "sapo": {"loss_type": "sapo", **STALE},
    "vespo": {"loss_type": "vespo", **STALE},
    "top entropy": {"top_entropy_quantile": 0.3},
    "entropy bonus": {"entropy_coef": 0.05},
    "entropy bonus of the top tokens": {"entropy_coef": 0.05, "top_entropy_quantile": 0.3, "loss_type": "bnpo"},
    "temperature": {"temperature": 0.7, "entropy_coef": 0.05},
    "truncated completions masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True, "beta": 0.1},
    "corrected for the sampler": {"correction": True, "vllm_importance_sampling_mode": "token_truncate", **STALE},
    "off-policy sequences masked": {"off_policy_mask_threshold": 0.001, "correction": True, **STALE},
    "softcap": {"model": "Gemma3", "entropy_coef": 0.05},
    "tied head": {"model": "tiny"},
    "tied head that is trained": {"model": "tiny", "adapter": False, "entropy_coef": 0.05},
    "head that is trained": {"adapter": False, "entropy_coef": 0.05},
    "head of the adapter": {"model": with_head_of_its_own, "adapter": False, "beta": 0.1, "num_iterations": 2,
                            "drift": 0.02},
    "reference with the model's own head": {"adapter": lora_with_head, "beta": 0.1, "drift": 0.05},
    "adapter given with the model": {"model": lambda: with_adapter(load_model("Llama")), "adapter": False,
                                     "beta": 0.1, "drift": 0.02},
    "logits that are divided": {"model": lambda: seeded("Granite", logits_scaling=4.0), "beta": 0.1},
    "head with a bias": {"model": lambda: seeded("Phi"), "beta": 0.1},
    "experts without auxiliary loss": {
        "model": lambda: seeded("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "adapter": False, "router_aux_loss_coef": 0.0},
}


def run(rollouts: Rollouts, **options: Any) -> TrlRun:
    """A run for which model and adapter are made."""
    made = {name: options[name]() for name in ("model", "adapter") if callable(options.get(name))}
    return trl_run(rollouts, **options | made)


def both(rollouts: Rollouts, **options: Any) -> tuple[TrlRun, TrlRun]:
    """The same run by TRL and on the kernels."""
    base = options.pop("trainer_class", trl.GRPOTrainer)
    return tuple(run(rollouts, trainer_class=each, **options) for each in (base, use_lowmem_kernels(base)))


def assert_equal(expected: TrlRun, result: TrlRun, tolerance: float = 1e-5) -> None:
    """Loss, every metric and every gradient, relative; and the batch's log-probabilities."""
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=tolerance, abs=1e-7)
    assert result.metrics.keys() == expected.metrics.keys()
    assert result.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=1e-6)
    assert result.gradients.keys() == expected.gradients.keys() and len(expected.gradients) > 0
    for name, gradient in expected.gradients.items():
        assert gradient.norm() > 0, name
        assert (result.gradients[name] - gradient).norm() <= tolerance * gradient.norm(), name
    for name in {"old_per_token_logps", "ref_per_token_logps"} & expected.batch.keys():
        torch.testing.assert_close(result.batch[name], expected.batch[name], rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_loss_metrics_and_gradients_are_those_of_trl(case: str) -> None:
    rollouts, options = random_rollouts(), CASES[case]
    if options.get("correction"):
        rollouts = with_sampler_noise(rollouts, make_trainer(rollouts).model, 0.3)
    assert_equal(*both(rollouts, **options))


def with_trained_rows(tied: bool, shared: bool) -> peft.PeftModel:
    """A model of which rows of embedding and head are trained, by PEFT's layer or in the base's own matrix."""
    rows: Any = [7, 20, 300, 5]
    config = peft.LoraConfig(r=4, target_modules=SPLIT, task_type="CAUSAL_LM", trainable_token_indices=rows if tied
                             else {"embed_tokens": rows, "lm_head": rows})
    model = scatter(peft.get_peft_model(random_model("Llama", tie_word_embeddings=tied), config))
    scatter(model, of="tokens_delta")
    model.get_base_model().lm_head.bias = None  # which TRL reads, and PEFT's wrapper has not
    if shared:
        prepare_embeddings(model)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_the_head_have_the_gradients_of_trl_and_peft(tied: bool) -> None:
    options = {"adapter": False, "entropy_coef": 0.05, "temperature": 0.7}
    expected, plain = both(random_rollouts(), model=lambda: with_trained_rows(tied, False), **options)
    shared = run(random_rollouts(), model=lambda: with_trained_rows(tied, True), trainer_class=use_lowmem_kernels(),
                 **options)
    for result in (plain, shared):
        assert_equal(expected, result)


def test_the_cases_do_what_their_names_say() -> None:
    rollouts = random_rollouts()
    rollouts = with_sampler_noise(rollouts, make_trainer(rollouts).model, 0.3)
    plain = trl_run(rollouts, loss_type="dr_grpo", **STALE)
    assert plain.metrics["clip_ratio/low_mean"] > 0 and plain.metrics["clip_ratio/high_mean"] > 0
    changes = {"delta": 1.3, "beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.3, "temperature": 0.7,
               "importance_sampling_level": "sequence", "mask_truncated_completions": True, "correction": True,
               "off_policy_mask_threshold": 0.001}
    for name, value in changes.items():
        changed = trl_run(rollouts, loss_type="dr_grpo", **STALE, **{name: value}).loss
        assert float(changed) != pytest.approx(float(plain.loss), rel=1e-3), name
    for name, least in (("head of the adapter", 1e-4), ("reference with the model's own head", 1e-2)):
        changed = run(rollouts, **CASES[name])
        assert changed.metrics["kl"] > least
        assert any("modules_to_save" in parameter for parameter in changed.gradients)


def test_the_adaptive_entropy_bonus_takes_its_gradient_in_the_second_step() -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 100.0}
    runs = [window(each.trainer, each.batch) for each in both(random_rollouts(), **options)]
    assert_equal(*runs)
    without = trl_run(random_rollouts()).gradients
    assert any((runs[1].gradients[name] - without[name]).norm() > 1e-2 * without[name].norm() for name in without)


def test_a_subclass_of_trls_keeps_its_own_loss() -> None:
    expected, result = both(random_rollouts(), trainer_class=GMPOTrainer, beta=0.1, **STALE)
    assert_equal(expected, result)
    plain = trl_run(random_rollouts(), beta=0.1, **STALE)
    assert float(result.loss) != pytest.approx(float(plain.loss), rel=1e-2)
    assert type(result.trainer).__name__ == "LowMemGMPOTrainer"


def test_a_head_in_float32_under_a_model_in_bfloat16() -> None:
    expected, result = both(random_rollouts(), model=lambda: load_model("Llama").bfloat16(), cast_lm_head_to_fp32=True,
                            entropy_coef=0.05)
    assert_equal(expected, result, tolerance=1e-2)  # the backbone's gradients are rounded to bfloat16
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-5)


def test_logits_of_a_model_in_bfloat16_are_not_rounded_to_bfloat16() -> None:
    options = {"num_iterations": 2}
    exact, rounded, result = (
        trl_run(random_rollouts(), model=load_model("Llama").bfloat16(), trainer_class=each, **options, **more)
        .batch["old_per_token_logps"]
        for each, more in ((trl.GRPOTrainer, {"cast_lm_head_to_fp32": True}), (trl.GRPOTrainer, {}),
                           (use_lowmem_kernels(), {}))
    )
    assert (result - exact).abs().max() < 1e-4 < (rounded - exact).abs().max()


def test_mixed_precision_of_a_model_in_float32_follows_trls() -> None:
    expected, result = both(random_rollouts(), bf16=True, entropy_coef=0.05)
    assert_equal(expected, result, tolerance=3e-2)  # TRL rounds logits to bfloat16
    exact = trl_run(random_rollouts(), entropy_coef=0.05)
    assert float(result.loss) != float(exact.loss), "mixed precision was left out"


def test_a_compiled_model_is_unwrapped() -> None:
    rollouts = random_rollouts()
    trainer = make_trainer(rollouts, trainer_class=use_lowmem_kernels())
    batch = prepare(trainer, rollouts)
    compiled = torch.compile(trainer.model, backend="eager")
    torch.testing.assert_close(trainer.compute_loss(compiled, batch), trainer.compute_loss(trainer.model, batch))


def test_a_whole_training_run_ends_with_trls_weights() -> None:
    settings = {"max_steps": 4, "num_iterations": 2, "beta": 0.1, "entropy_coef": 0.01, "logging_strategy": "steps",
                "logging_steps": 1}
    trained = []
    for each in (trl.GRPOTrainer, use_lowmem_kernels()):
        trainer = make_trainer(random_rollouts(), trainer_class=each, micro_batches=3, settings=settings)
        trainer.train()
        trained.append(trainer)
    expected, result = trained
    for before, after in zip(expected.state.log_history[:-1], result.state.log_history[:-1], strict=True):
        del before["step_time"], after["step_time"]
        assert after == pytest.approx(before, rel=1e-3, abs=1e-5)
    ours = dict(result.model.named_parameters())
    for name, parameter in expected.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-3, atol=1e-5)


def test_a_batch_without_a_token_to_learn_from_gives_zero_and_a_gradient_of_zero() -> None:
    rollouts = random_rollouts()
    cut = Rollouts(rollouts.prompt_ids, [[3, 4, 5]] * len(rollouts.prompt_ids), rollouts.rewards, 4)
    expected, result = both(cut, mask_truncated_completions=True)
    assert float(result.loss) == float(expected.loss) == 0
    assert result.gradients.keys() == expected.gradients.keys()
    assert all(float(gradient.abs().max()) == 0 for gradient in result.gradients.values())


@pytest.mark.slow
def test_no_tensor_of_tokens_by_vocabulary_is_ever_alive() -> None:
    vocab_size, peaks = 65536, []
    rollouts = random_rollouts(prompts=4, longest=96, vocab_size=vocab_size)
    for each in (trl.GRPOTrainer, use_lowmem_kernels()):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=2,
        ))
        trainer = make_trainer(rollouts, model, each, settings={"max_completion_length": 96, "num_iterations": 2,
                                                                "beta": 0.1})
        with LiveStorage() as storage:
            window(trainer, prepare(trainer, rollouts))
        peaks.append(storage.peak)
    logits = sum(rollouts.lengths) * vocab_size * 4  # bytes
    assert peaks[1] < logits / 3, "logits of all tokens were alive"
    assert peaks[1] < peaks[0] / 3, "TRL's own head needs no more"


def test_trl_calls_the_overridden_method_for_every_logprob_and_from_nowhere_else() -> None:
    calls: dict[str, int] = {}
    source = ast.parse(Path(inspect.getfile(trl.GRPOTrainer)).read_text(encoding="utf-8"))
    for function in ast.walk(source):
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            found = [node for node in ast.walk(function)
                     if isinstance(node, ast.Attribute) and node.attr == OVERRIDDEN]
            calls |= {function.name: len(found)} if found else {}
    assert calls == {"_generate_and_score_completions": 3, "_compute_loss": 1}  # old, two kinds of reference; policy


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "2.0.0"])
def test_another_version_of_trl_is_refused_with_what_to_do(found: str) -> None:
    with pytest.raises(ImportError, match=rf"trl is {found}; allowed is {TRL}.*pip install"):
        check_version(found)


def test_what_is_no_trainer_class_of_trl_is_refused() -> None:
    for wrong in (transformers.Trainer, make_trainer(random_rollouts())):
        with pytest.raises(TypeError, match=r"a subclass of trl.GRPOTrainer is needed"):
            use_lowmem_kernels(wrong)  # type: ignore[arg-type]


def test_a_trainer_with_logprobs_of_its_own_is_refused() -> None:
    own = type("Own", (trl.GRPOTrainer,), {OVERRIDDEN: lambda self: None})
    with pytest.raises(ValueError, match=f"Own has a {OVERRIDDEN} of its own"):
        use_lowmem_kernels(own)


def trainer_with(**changes: Any) -> SimpleNamespace:
    """What `refused` reads of a trainer."""
    plain = {
        "accelerator": SimpleNamespace(num_processes=1), "is_deepspeed_enabled": False, "is_fsdp_enabled": False,
        "processing_class": AutoTokenizer.from_pretrained(TINY), "aux_loss_enabled": False, "ref_model": None,
        "args": SimpleNamespace(use_liger_kernel=False, torch_compile=False), "model": load_model("Llama"),
    }
    return SimpleNamespace(**(plain | changes))


def with_head(head: torch.nn.Module) -> torch.nn.Module:
    """A model with another output head."""
    model = load_model("Llama")
    model.lm_head = head
    return model


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "processes": ({"accelerator": SimpleNamespace(num_processes=2)}, "several processes.*train in one process"),
    "deepspeed": ({"is_deepspeed_enabled": True}, "DeepSpeed or FSDP.*train in one process"),
    "images": ({"processing_class": object()}, "the processing_class is a object.*allowed is a tokenizer"),
    "experts": ({"aux_loss_enabled": True}, r"auxiliary loss.*set router_aux_loss_coef=0\.0"),
    "liger": ({"args": SimpleNamespace(use_liger_kernel=True, torch_compile=False)}, "set use_liger_kernel=False"),
    "compiled": ({"args": SimpleNamespace(use_liger_kernel=False, torch_compile=True)},
                 r"set torch_compile=False.*model\.base_model\.compile\(\)"),
    "head": ({"model": with_head(torch.nn.Sequential(torch.nn.Linear(32, 384)))},
             "the output head is a Sequential; a plain torch.nn.Linear is needed"),
    "head of the reference": ({"ref_model": with_head(torch.nn.Identity())}, "the output head is a Identity"),
}


@every_row("case", REFUSED)
def test_what_cannot_be_trained_is_refused_with_what_to_do(case: str) -> None:
    changes, message = REFUSED[case]
    assert list(refused(trainer_with())) == []
    (problem,) = refused(trainer_with(**changes))
    assert re.search(message, problem)


ADAPTERS: dict[str, tuple[peft.PeftConfig, str]] = {
    "prompts": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "is PROMPT_TUNING; allowed is"),
    "other": (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"],
                             feedforward_modules=["down_proj"]), "is IA3; allowed is LORA.*peft.LoraConfig"),
    "activated": (peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["k_proj"], alora_invocation_tokens=[5]),
                  "has alora_invocation_tokens.*leave them out"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_the_constructor_refuses_an_adapter_that_needs_pefts_own_forward(case: str) -> None:
    config, message = ADAPTERS[case]
    model = peft.get_peft_model(load_model("Llama"), config)
    with pytest.raises(ValueError, match=f"LowMemGRPOTrainer cannot train this: .*{message}"):
        make_trainer(random_rollouts(), model, use_lowmem_kernels(), adapter=False)


def test_images_are_refused_by_name_where_they_arrive() -> None:
    trainer = make_trainer(random_rollouts(), trainer_class=use_lowmem_kernels())
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="got pixel_values; only text"):
        getattr(trainer, OVERRIDDEN)(trainer.model, ids, torch.ones_like(ids), 1, pixel_values=torch.zeros(1))


SCALES: list[tuple[dict[str, Any], float]] = [
    ({}, 1.0), ({"logit_scale": 0.25}, 0.25), ({"logit_scale": None}, 1.0), ({"output_multiplier": 3.0}, 3.0),
    ({"lm_head_multiplier": 0.5}, 0.5), ({"logits_scaling": 8.0}, 0.125),
    ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
]


def test_the_scale_of_the_logits_is_read_from_every_name_that_trl_knows() -> None:
    for fields, scale in SCALES:
        model = SimpleNamespace(get_text_config=partial(SimpleNamespace, **({"model_type": "llama"} | fields)))
        assert logit_shape(model) == {"logit_scale": scale, "softcap": None}, fields


def test_old_logprobs_are_computed_for_a_micro_batch_at_a_time() -> None:
    rollouts, rows = random_rollouts(), []
    trainer = make_trainer(rollouts, trainer_class=use_lowmem_kernels(), micro_batches=3,
                           settings={"num_iterations": 2})
    trainer.model.get_base_model().base_model.register_forward_hook(lambda _, __, out: rows.append(len(out[0])))
    prepare(trainer, rollouts)
    assert rows == [4, 4, 4]


@pytest.mark.slow
def test_a_backbone_compiled_in_place_is_the_one_that_computes() -> None:
    model, graphs = load_model("Llama"), []
    model.base_model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    compiled = trl_run(random_rollouts(), model=model, trainer_class=use_lowmem_kernels())
    assert_equal(trl_run(random_rollouts()), compiled)
    assert graphs


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_of_the_page_run(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = [float(value) for value in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert "reward" in done.stdout if number == 0 else sum(rewards[-2:]) / 2 > rewards[0] + 0.25, done.stdout
