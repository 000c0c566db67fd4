"""A loop through the server is the same loop as in the process, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_chat import until
from served import MODEL, HeldUp, Serving, tinker_client
from tinker_server import same

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.server.openai.request_queue import EngineCall
from lowmem_grpo.server.tinker.adapters import Adam, LoraSettings
from lowmem_grpo.server.tinker.datum import Datum, Pass

tinker: Any = pytest.importorskip("tinker", reason="the client `tinker` is not installed: pip install tinker==0.38.0")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
STEPS, COUNT, TOKENS, RATE, LOSS = 2, 4, 8, 0.01, "importance_sampling"
Sampled = list[tuple[list[int], list[float]]]  # of a prompt: tokens and log-probabilities
Row = tuple[list[int], list[int], list[float], list[float]]  # ids, targets, log-probabilities, advantages


@contextmanager
def begun_together(served: HeldUp) -> Iterator[None]:
    """Start the samples of the block once all of them wait: which of them are decoded together, and so their last bits,
    depends on nothing else."""
    with served.held_up():
        yield
        until(lambda: sum(map(len, served.model.worker.waiting.lines.values())) == COUNT)


class OverHttp:
    """The verbs of the real client."""

    def __init__(self, client: Any, served: HeldUp) -> None:
        self.served = served
        self.training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()

    def sample(self, prompt: list[int], seed: int) -> Sampled:
        params = tinker.SamplingParams(max_tokens=TOKENS, seed=seed, temperature=1.0)
        sampler = self.training.save_weights_and_get_sampling_client().result()
        with begun_together(self.served):
            found = sampler.sample(
                prompt=tinker.ModelInput.from_ints(prompt), num_samples=COUNT, sampling_params=params)
        return [(list(one.tokens), list(one.logprobs)) for one in found.result().sequences]

    def train(self, data: Sequence[Row]) -> list[Any]:
        given = [tinker.Datum(model_input=tinker.ModelInput.from_ints(ids), loss_fn_inputs={
            "target_tokens": targets, "logprobs": logprobs, "advantages": advantages})
            for ids, targets, logprobs, advantages in data]
        passed = self.training.forward_backward(given, LOSS)
        stepped = self.training.optim_step(tinker.AdamParams(learning_rate=RATE))
        found = passed.result()
        return [found.metrics["loss:sum"], stepped.result().metrics["grad_norm"],
                *(one["logprobs"].to_torch().tolist() for one in found.loss_fn_outputs)]


class InProcess:
    """The verbs that the server calls, in this process: no requests, no request store, no client."""

    def __init__(self, served: HeldUp, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.do("create", "mine", LoraSettings(rank=8, seed=1))

    def do(self, verb: str, *given: Any) -> Any:
        return self.served.model.worker.run(
            lambda: getattr(self.served.model.training.adapters, verb)(*given)).result()

    def sample(self, prompt: list[int], seed: int) -> Sampled:
        folder = self.folder / f"at-{seed}"
        self.do("snapshot", "mine", folder)
        with begun_together(self.served):
            futures = [self.served.model.worker.submit(EngineCall(prompt, SamplingParams(
                max_tokens=TOKENS, seed=seed + place), folder)) for place in range(COUNT)]
        return [(turn.completion_ids, turn.logprobs) for turn in (one.result() for one in futures)]

    def train(self, data: Sequence[Row]) -> list[Any]:
        asked = Pass([Datum(ids, torch.tensor(targets), {"logprobs": torch.tensor(logprobs),
                                                         "advantages": torch.tensor(advantages)})
                      for ids, targets, logprobs, advantages in data], LOSS, {}, False)
        logprobs, metrics = self.do("run", "mine", asked)
        stepped = self.do("optim_step", "mine", Adam(learning_rate=RATE))
        return [metrics["loss:sum"], stepped["grad_norm"], *(one.tolist() for one in logprobs)]


def loop(verbs: "OverHttp | InProcess") -> list[Any]:
    """A few steps of a small GRPO, and all that it saw on the way."""
    seen = list[Any]()
    for step in range(STEPS):
        data = []
        for number, prompt in enumerate(PROMPTS):
            group = verbs.sample(prompt, 1000 * step + 100 * number)
            rewards = torch.tensor([float(len(set(tokens))) for tokens, _ in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for (tokens, logprobs), advantage in zip(group, advantages.tolist(), strict=True):
                ids, before = [*prompt, *tokens], [0.0] * (len(prompt) - 1)
                data.append((ids[:-1], ids[1:], [*before, *logprobs], [*before, *[advantage] * len(tokens)]))
            seen.append(group)
        seen.append(verbs.train(data))
    return seen


def test_samples_losses_and_adapters_are_those_of_the_loop_in_the_process(
    served: Serving, start: Any, tmp_path: Path
) -> None:
    with tinker_client(served) as client:
        remote, local = OverHttp(client, served), InProcess(start(), tmp_path)
        assert loop(remote) == loop(local)
        over_http = served.model.worker.run(
            lambda: served.model.training.adapters.state(remote.training.model_id)).result()
    in_process = local.do("state", "mine")
    assert same(over_http, in_process)
    assert any(one.abs().sum() > 0 for name, one in in_process.items() if "lora_B" in name)
