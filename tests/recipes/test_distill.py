"""Recipes with a teacher: a student takes after the adapter that teaches it, and a teacher learns to read solutions."""

import json
from pathlib import Path

import pytest
from recipe_runs import invoke, records, run, run_well

from lowmem_grpo.config.distillation import SDFTConfig
from lowmem_grpo.recipes.distill import DistillOptions
from lowmem_grpo.recipes.self_distill import make_reading, make_solved
from lowmem_grpo.recipes.tasks.arithmetic import QUESTION

FEW = ["train_size=8", "max_completion_length=6"]


def test_a_student_without_a_teacher_is_refused_with_the_two_commands_and_so_is_a_folder_that_is_no_run(
    tmp_path: Path
) -> None:
    result = run("distill", tmp_path / "run")
    assert result.exit_code == 1
    assert "lowmem-grpo run arithmetic\n    lowmem-grpo run distill teacher=runs/arithmetic" in result.output
    (tmp_path / "empty").mkdir()
    result = run("distill", tmp_path / "run", f"teacher={tmp_path / 'empty'}")
    assert result.exit_code == 1 and "is neither a run nor an adapter" in result.output
    for teacher, said in (("./runs/arithmetc", "there is no teacher"), ("http://127.0.0.1:9", "cannot be reached")):
        result = run("distill", tmp_path / "run", f"teacher={teacher}", "distillation_mode=sampled_token")
        assert result.exit_code == 1 and said in result.output and "loading tiny," not in result.output
    assert not (tmp_path / "run").exists()


def test_a_run_teaches_a_student_on_its_base_with_its_lora_settings_unless_others_are_asked_for(tmp_path: Path) -> None:
    run_well("arithmetic", tmp_path / "teacher", *FEW, "lora_rank=4", "lora_alpha=8", "entropy_coef=0.1")
    teacher = f"teacher={tmp_path / 'teacher'}"
    run_well("distill", tmp_path / "run", *FEW, teacher, "num_generations=1")
    summary, line = records(tmp_path / "run")
    assert (summary["recipe"], summary["status"], summary["model"]) == ("distill", "finished", "tiny")
    assert line["distillation/divergence"] > 0 and "reward" not in line
    lora = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (lora["r"], lora["lora_alpha"]) == (4, 8)
    result = run("distill", tmp_path / "other", *FEW, teacher, "lora_rank=2")
    assert result.exit_code == 1 and "the teacher's adapter does not fit the student's" in result.output
    options = DistillOptions(gpu="24", model="another")
    options.follow(str(tmp_path / "teacher" / "adapter"))
    assert (options.gpu, options.model, options.lora_rank) == ("24", "another", 4)
    options = DistillOptions()
    options.follow("Qwen/Qwen2.5-7B-Instruct")
    assert (options.gpu, options.model, options.lora_rank) == ("auto", None, None)


def test_rows_have_the_solution_and_a_teacher_learns_to_copy_it_from_the_prompt_that_it_will_read() -> None:
    solved, reading = make_solved(4), make_reading(4, 0, SDFTConfig.teacher_prompt_template)
    assert solved.column_names == ["prompt", "privileged_context"]
    for row in reading:
        (message,) = row["prompt"]
        question, _, solution = message["content"].partition("\n\n")
        assert QUESTION.fullmatch(question) and solution == row["completion"]
        *lines, answer = solution.splitlines()
        assert [eval(line.replace(" = ", " == ")) for line in lines] == [True] * len(lines)
        assert answer == f"Answer: {lines[-1].rpartition(' ')[2]}"


@pytest.mark.parametrize("words", [[], ["teacher=ema"]])
def test_self_distillation_needs_no_rewards_and_only_a_model_that_cannot_read_learns_to(
    words: list[str], tmp_path: Path
) -> None:
    run_well("self_distill", tmp_path, *FEW, "reading_steps=1", *words)
    summary, line = records(tmp_path)
    assert summary["status"] == "finished" and "reward" not in line
    assert summary["teacher"] == ("ema" if words else str(tmp_path / "sft" / "adapter"))
    assert (tmp_path / "sft").exists() != bool(words)
    assert line["self_distillation/reprompt_sample_fraction"] == 1 and line["distillation/divergence"] > 0


def test_an_option_of_the_settings_of_these_recipes_is_checked_before_a_library_is_loaded(tmp_path: Path) -> None:
    result = invoke("run", "self_distill", f"output_dir={tmp_path / 'run'}", "num_loss_tokens_to_skip=-1")
    assert result.exit_code == 1 and "num_loss_tokens_to_skip is -1" in result.output
    assert "loading torch" not in result.output
