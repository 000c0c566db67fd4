# A GRPO notebook as people write it for Unsloth and TRL, its cells one after the other.
import re

from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported
from vllm import SamplingParams

max_seq_length = 1024  # longer for longer reasoning
lora_rank = 32  # larger is smarter, and slower

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="Qwen/Qwen2.5-3B-Instruct", max_seq_length=max_seq_length, load_in_4bit=True, fast_inference=True,
    max_lora_rank=lora_rank, gpu_memory_utilization=0.6,
)

model = FastLanguageModel.get_peft_model(
    model, r=lora_rank, lora_alpha=lora_rank, use_gradient_checkpointing="unsloth", random_state=3407,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)

SYSTEM_PROMPT = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""


def extract_xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def extract_hash_answer(text: str) -> str | None:
    if "####" not in text:
        return None
    return text.split("####")[1].strip()


def get_gsm8k_questions(split="train") -> Dataset:
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(lambda x: {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
        "answer": extract_hash_answer(x["answer"]),
    })


dataset = get_gsm8k_questions()


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    q = prompts[0][-1]["content"]
    extracted_responses = [extract_xml_answer(r) for r in responses]
    print("-" * 20, f"Question:\n{q}", f"\nAnswer:\n{answer[0]}", f"\nResponse:\n{responses[0]}",
          f"\nExtracted:\n{extracted_responses[0]}")
    return [2.0 if r == a else 0.0 for r, a in zip(extracted_responses, answer)]  # noqa: B905


def int_reward_func(completions, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    extracted_responses = [extract_xml_answer(r) for r in responses]
    return [0.5 if r.isdigit() else 0.0 for r in extracted_responses]


def strict_format_reward_func(completions, **kwargs) -> list[float]:
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    responses = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, r) for r in responses]
    return [0.5 if match else 0.0 for match in matches]


max_prompt_length = 256

training_args = GRPOConfig(
    learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1,
    lr_scheduler_type="cosine", optim="adamw_8bit", logging_steps=1, bf16=is_bfloat16_supported(),
    fp16=not is_bfloat16_supported(), per_device_train_batch_size=1, gradient_accumulation_steps=1,
    num_generations=4, max_prompt_length=max_prompt_length, max_completion_length=24, max_steps=2, save_steps=250,
    max_grad_norm=0.1, report_to="none", output_dir="outputs",
)

trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, args=training_args, train_dataset=dataset,
    reward_funcs=[strict_format_reward_func, int_reward_func, correctness_reward_func],
)
trainer.train()

text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Calculate pi."}], tokenize=False, add_generation_prompt=True)

sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
output = model.fast_generate([text], sampling_params=sampling_params, lora_request=None)[0].outputs[0].text
print("before:", output)

model.save_lora("grpo_saved_lora")

text = tokenizer.apply_chat_template([
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": "Calculate pi."},
], tokenize=False, add_generation_prompt=True)

output = model.fast_generate(text, sampling_params=sampling_params,
                             lora_request=model.load_lora("grpo_saved_lora"))[0].outputs[0].text
print("after:", output)
