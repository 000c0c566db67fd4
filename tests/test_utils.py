"""Bytes and seconds in words; what is no number is refused; what YAML takes for text with what to write."""

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from tables import every_row
from trl import TrlParser

from lowmem_grpo import DPOConfig, GRPOConfig, KTOConfig, ORPOConfig, RLOOConfig, SamplingParams, SFTConfig
from lowmem_grpo.config.from_trl import settings_of
from lowmem_grpo.environments import AskBase
from lowmem_grpo.models.lora_targets import check_plain
from lowmem_grpo.utils import GIB, MIB, JsonError, bytes_of, check_template, read_json, size_text, time_text


@every_row(("count", "text"), [
    (0, "0.0 MiB"), (2**16, "0.1 MiB"), (300 * MIB, "300.0 MiB"), (GIB, "1.00 GiB"), (79.25 * GIB, "79.25 GiB"),
])
def test_bytes_in_words(count: float, text: str) -> None:
    assert size_text(count) == text


@every_row(("seconds", "text"), [
    (0, "0 s"), (0.0312, "0.031 s"), (4.26, "4.3 s"), (42.4, "42 s"), (61.7, "1 min 2 s"), (754, "12 min 34 s"),
    (3725, "1 h 2 min"), (359_999, "99 h 59 min"),
])
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(("written", "to_write"), [
    ("1e-6", "1.0e-6"), ("5E-7", "5.0e-7"), ("1.5e3", "1.5e+3"), ("2e5", "2.0e+5"), ("1.e5", "1.e+5"),
])
@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig])
def test_a_number_that_yaml_reads_as_text_is_refused_with_what_yaml_reads_as_that_number(
    written: str, to_write: str, config: type
) -> None:
    read = yaml.safe_load(f"learning_rate: {written}")
    assert isinstance(read["learning_rate"], str)
    with pytest.raises(ValueError, match=r"it must be 0 or above\. YAML reads it as text; write ") as refused:
        config(**read)
    assert str(refused.value).endswith(f"write {to_write}")
    assert yaml.safe_load(f"learning_rate: {to_write}") == {"learning_rate": float(written)}


@pytest.mark.parametrize(("option", "to_write"), [("reward_weights: [1e-1, 1.0]", "1.0e-1"), ("seed: 1e3", "1.0e+3"),
                                                  ("beta: 4e-2", "4.0e-2"), ("max_steps: 2e2", "2.0e+2")])
def test_every_option_that_wants_a_number_says_so(option: str, to_write: str) -> None:
    with pytest.raises(ValueError, match=r"must be a.*\. YAML reads it as text; write |must be.* YAML") as refused:
        GRPOConfig(**yaml.safe_load(option))
    assert str(refused.value).endswith(f"write {to_write}")


@pytest.mark.parametrize("option", ["beta", "learning_rate", "num_generations", "weight_decay", "min_p"])
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_numbers(option: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"^{option} is {value}; it must be "):
        GRPOConfig(**{option: value})
    with pytest.raises(ValueError, match="reward_weights"):
        GRPOConfig(reward_weights=[value, 1.0])


@pytest.mark.parametrize("value", [1e-300, 1e-7, -1, math.inf, math.nan, False])
def test_a_temperature_at_which_float32_logits_overflow_is_refused(value: float) -> None:
    for call in (GRPOConfig, SamplingParams, partial(AskBase, "Hello?", print)):
        with pytest.raises(ValueError, match=r"temperature is .* 1e-6 or above"):
            call(temperature=value)
    assert GRPOConfig(temperature=1e-6).temperature == SamplingParams(temperature=1e-6).temperature == 1e-6


def test_other_texts_are_refused_without_a_word_of_yaml() -> None:
    with pytest.raises(ValueError, match=r"^learning_rate is 'fast'; it must be 0 or above$"):
        GRPOConfig(learning_rate="fast")  # type: ignore[arg-type]


def test_settings_that_trls_parser_reads_of_such_a_file_have_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nlearning_rate: 1e-5\nbeta: 4e-2\nuse_cpu: true\n")
    (theirs,) = TrlParser((trl.GRPOConfig,)).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    ours = settings_of(theirs, GRPOConfig)
    assert (ours.learning_rate, ours.beta) == (1e-5, 0.04)


@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig, RLOOConfig, DPOConfig, ORPOConfig, KTOConfig])
def test_trls_scripts_read_their_command_line_into_our_settings(config: Any) -> None:
    """As they begin: TrlParser over the script's arguments, the settings and the model's, and LoRA of the last."""
    words = ("--dataset_name d --model_name_or_path m --use_peft --lora_r 8 --lora_target_modules all-linear "
             "--output_dir o --learning_rate 1e-5 --max_steps 3 --report_to none --logging_steps 2")
    given = words.split() + (["--scale_rewards", "False"] if config is GRPOConfig else [])
    script, settings, model = trl.TrlParser((trl.ScriptArguments, config, trl.ModelConfig)).parse_args_and_config(given)
    assert (script.dataset_name, model.model_name_or_path) == ("d", "m") and isinstance(settings, config)
    assert (settings.learning_rate, settings.max_steps, settings.report_to) == (1e-5, 3, ["none"])
    assert config is not GRPOConfig or settings.scale_rewards == "none"
    lora = trl.get_peft_config(model)
    assert lora is not None and check_plain(lora) is None  # which trainers take as it is


def test_what_trls_examples_write_on_their_command_lines_is_read(tmp_path: Path) -> None:
    def read(config: Any, words: str) -> Any:
        return TrlParser((config,)).parse_args_and_config(words.split())[0]

    for config in (GRPOConfig, SFTConfig, RLOOConfig, DPOConfig, ORPOConfig, KTOConfig):
        settings = read(config, "--gradient_checkpointing --fp16 --trust_remote_code false")
        assert (settings.gradient_checkpointing, settings.fp16) == (True, True)
        assert read(config, "--gradient_checkpointing False").gradient_checkpointing is False
        with pytest.raises(ValueError, match="trust_remote_code=True is not supported"):
            read(config, "--trust_remote_code")
    assert read(GRPOConfig, "--use_vllm --vllm_mode colocate --vllm_importance_sampling_correction").use_vllm
    with pytest.raises(ValueError, match="vllm_mode='server' is not supported"):
        read(GRPOConfig, "--vllm_mode server")
    (made,) = TrlParser((SFTConfig,)).parse_args_and_config(["--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'])
    assert made.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs is 'min_lr_rate=0\.1'; it must be a dict, or None"):
        read(SFTConfig, "--lr_scheduler_kwargs min_lr_rate=0.1")
    assert read(DPOConfig, "--loss_type sigmoid sft --loss_weights 1.0 0.5").loss_type == ["sigmoid", "sft"]
    assert read(SFTConfig, "--eos_token <|im_end|> --packing --dataset_num_proc 12").eos_token == "<|im_end|>"


@every_row(("text", "field", "words"), [
    (b"", "", "is no JSON"), (b'{"a": 1', "", "is no JSON"), (b"\xff\xfe{\x00}\x00", "", "utf-8"),
    (b'"\xed\xa0\x80"', "", "utf-8"),  # Python's json takes the bytes of a surrogate
    (b'{"m": [{"c": "a\\u0000"}]}', "m[0].c", "NUL at character 1"),
    (b'{"m": [{"c": "\\udc00 "}]}', "m[0].c", "half of a surrogate pair at character 0"),
    ('{"m": "\ud800"}', "m", "surrogate"), (b'{"a": {"\\ud800": 1}}', "a['\\ud800']", "surrogate"),
    (b'{"a b": [1, NaN]}', "['a b'][1]", "NaN, which is no finite number"), (b'[-Infinity]', "[0]", "no finite"),
    (b'{"a": 1e999}', "a", "no finite"), (b'{"a": 18446744073709551616}', "a", "2\\*\\*64 - 1"),
    (b'{"a": -9223372036854775809}', "a", "-2\\*\\*63"), (b'{"a": ' + b"9" * 5000 + b"}", "a", "99999"),
    (b'{"a": {"r": 1, "r": 2}}', "a", "the name 'r' twice"), (b'{"a":' * 900 + b"1" + b"}" * 900, "a.a.a.a", "deep"),
    (b"[" * 65 + b"]" * 65, "[0][0][0][0]", "64 levels"), (b"[" * 10**6, "", "64 levels"),
    (b" " * (MIB + 1), "", "has 1.0 MiB; at most 1.0 MiB"),
])
def test_json_that_could_harm_its_reader_is_refused_with_its_place(text: bytes | str, field: str, words: str) -> None:
    with pytest.raises(JsonError, match=words) as refused:
        read_json(text, most=MIB)
    assert refused.value.field == field and str(refused.value).startswith(field or "the text")


def test_what_is_no_file_or_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(3 * GIB)
    (tmp_path / "link").symlink_to(tmp_path / "large")
    (tmp_path / "good").write_bytes(b"{}")
    for name, words in (("pipe", "a pipe"), ("large", "3.00 GiB; at most 64.0 MiB"), ("link", "3.00 GiB"),
                        (".", "a folder")):
        with pytest.raises(ValueError, match=re.escape(words)):
            bytes_of(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        bytes_of(tmp_path / "none")
    assert bytes_of(tmp_path / "good") == b"{}"


@pytest.mark.parametrize("ascii_only", [True, False])
def test_other_json_is_read_as_pythons_json_reads_it(ascii_only: bool) -> None:
    value: list[object] = [{"a": [1, -0.5, True, None, 2**64 - 1, -(2**63)]}, "\U0001f600 \u00e9 \n", {"": {}}, 1e308]
    for _ in range(60):
        value = [value]
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_json(text) == read_json(text.encode("utf-8-sig")) == json.loads(text)
    assert read_json(b'"a\\u0000"', nul=True) == "a\0"


@pytest.mark.parametrize(("template", "message"), [
    ('Give JSON {"answer": 3}', 'has the field {"answer": 3}'), ("{prompt.upper}", "has the field {prompt.upper}"),
    ("{}", "has the field {}"), ("{prompt!r:>9}", "has the field {prompt!r:>9}"), ("a", "lacks the field {prompt}"),
    ("{prompt} }", "is '{prompt} }', which is no template (Single '}' encountered in format string)"),
])
def test_a_template_with_a_field_that_nobody_fills_in_is_refused(template: str, message: str) -> None:
    fix = "; its fields are {prompt}, {hint}. A brace that is text is written twice"
    with pytest.raises(ValueError, match=re.escape(f"my_template {message}{fix}")):
        check_template("my_template", template, ("prompt", "hint"), needed=("prompt",))


def test_a_template_may_leave_out_a_field_and_have_braces_that_are_text() -> None:
    check_template("my_template", "{prompt} {{x}}", ("prompt", "hint"), needed=("prompt",))
