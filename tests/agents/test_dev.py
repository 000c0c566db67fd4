"""ART's `_internal_config`: each part reaches what takes it, and what has no meaning here is refused by name."""

from functools import partial

from tables import not_refused

from lowmem_grpo import agents as art
from lowmem_grpo.agents.dev import ModelOptions, with_lora

read = partial(ModelOptions.from_names({"r": 2, "seed": 1}).with_config, base_model="tiny")


def test_each_part_of_a_config_reaches_what_takes_it_and_wins() -> None:
    options = read(art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(model_name="tiny", load_in_4bit=False), peft_args={"r": 4}, chat_template="{{ x }}",
        engine_args=art.dev.EngineArgs(model="tiny", max_model_len=64, tensor_parallel_size=1),
        trainer_args={"output_dir": "elsewhere", "beta": 0.1}, chat_template_kwargs={"x": 1},
    ) | {"trainer_gpu_ids": [0]})
    assert options == ModelOptions({"load_in_4bit": False, "max_seq_length": 64}, {"r": 4}, {
        "seed": 1, "beta": 0.1, "chat_template_kwargs": {"x": 1}}, "{{ x }}")


def test_arts_lora_config_reaches_peft_args_by_our_names() -> None:
    lora = art.LoRAConfig(rank=8, alpha=16, dropout=0.0, target_modules=["q_proj"])
    model = art.TrainableModel(name="a", run_name="run-1", project="p", base_model="tiny", lora_config=lora)
    assert (model.folder_name, model.folder().name) == ("run-1", "run-1")
    assert read(with_lora({"peft_args": {"r": 4, "bias": "none"}}, model.lora_config)).lora == {
        "r": 8, "bias": "none", "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    assert with_lora(None, None) == {}


def test_a_part_of_a_config_that_has_no_meaning_here_is_refused_by_name() -> None:
    assert not_refused(read, [
        ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args: tensor_parallel_size=2 is not supported"),
        ({"engine_args": {"trust_remote_code": True}}, "trust_remote_code=True"), ({"trainer_gpu_ids": [1]}, "device"),
        ({"init_args": {"model_name": "m"}}, "base_model"),
        ({"chat_template": "a", "chat_template_path": "b"}, "one of"),
    ]) == []
    assert not_refused(read, [({"engine_args": {"max_num_seq": 2}}, "did you mean max_num_seqs"),
                              ({"engine_arg": {}}, "did you mean engine_args")], TypeError) == []
