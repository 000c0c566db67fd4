"""Which judge scores trajectories: one at a URL by its name, one that is given, or the base model of a run itself."""

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from lowmem_grpo.agents.progress import described
from lowmem_grpo.rewards.judge.hidden import is_address
from lowmem_grpo.rewards.judge.judge import Judge, Round
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.rewards.judge.self_judge import SelfJudge
from lowmem_grpo.rewards.judge.url_judge import UrlJudge
from lowmem_grpo.service.call import Call

SELF = "self"
OPENAI = "openai"
AT_AN_ADDRESS = ("hosted_vllm", "openrouter", "anthropic", "gemini", "groq", "together_ai", "mistral", "deepseek",
                 "xai")  # LiteLLM's names of providers, which stand before the model's own
ADDRESSES = ("base_url", "api_base")  # names of one argument
OF_THE_JUDGE = {"num_retries": "retries", "max_retries": "retries", "timeout": "timeout"}
KEPT = 32  # judges by name, with what each has judged

made: OrderedDict[str, Judge] = OrderedDict()
OPEN: list[Any] = []  # the runs that are open: each has a `name` and a `judge()`


def judge_of(named: Any, params: Mapping[str, Any] | None) -> Judge:
    """The judge of this name, the same one for the same name and parameters. Raises ValueError and TypeError for what
    is no judge."""
    options = dict(params or {})
    if isinstance(named, Judge):
        if options:
            raise ValueError(f"extra_litellm_params ({', '.join(options)}) are not for a judge that is made already; "
                             "give them to it: UrlJudge(..., options={...})")
        return named
    if not isinstance(named, str) or not named:
        raise TypeError(f"judge_model is {described(named)}; it must be a name such as 'openai/gpt-4o-mini', an "
                        "address that begins with http, or a judge: rewards.UrlJudge(...), model.judge()")
    if named == SELF:
        return judge_of_run()
    key = repr((named, sorted(options.items(), key=str)))
    if key not in made:
        made[key] = url_judge(named, options)
    made.move_to_end(key)
    while len(made) > KEPT:
        made.popitem(last=False)
    return made[key]


def judge_of_run() -> Judge:
    """The base model of the one model that is in training. ValueError if there is none, or more than one."""
    if len(OPEN) != 1:
        names = ", ".join(run.name for run in OPEN) or "register one first"
        raise ValueError(f"the judge 'self' is the base model of the model in training, and there are {len(OPEN)} "
                         f"({names}): give judge_model=model.judge()")
    judge: Judge = OPEN[0].judge()
    return judge


def url_judge(named: str, options: dict[str, Any]) -> UrlJudge:
    """A judge at a URL, as LiteLLM's names and parameters say it. A key goes only to the address it is given for."""
    address = next((options.pop(name) for name in ADDRESSES if options.get(name)), None)
    key, model = options.pop("api_key", None), options.pop("model", None)
    if is_address(named):
        address, named = named, model or ""
        if not named:
            raise ValueError('a judge at an address needs the name of its model: extra_litellm_params={"model": "..."}')
    elif model is not None:
        raise ValueError('extra_litellm_params names a "model"; judge_model is its place')
    provider, _, rest = named.partition("/")
    if provider == OPENAI or (provider in AT_AN_ADDRESS and address):
        named = rest
    elif address is None and rest:
        raise ValueError(f"the address of {provider!r} is not known here: give it, with its key, extra_litellm_params="
                         '{"base_url": "https://...", "api_key": "..."}')
    if address is not None and key is None:
        raise ValueError(f"{named!r} at an address of its own needs a key, extra_litellm_params={{'api_key': ...}}; a "
                         "server of yours takes any text. OPENAI_API_KEY is sent to OpenAI only")
    settings = {ours: options.pop(name) for name, ours in OF_THE_JUDGE.items() if name in options}
    return UrlJudge(address, named, key, options=options or None, **settings)


class DeskJudge(SelfJudge):
    """The base model, asked through the desk that owns the engine: its replies are decoded between the turns of
    rollouts, with the adapter off."""

    after_sampling = False
    rate: Any

    def __init__(self, desk: Any, model: Any, **options: Any) -> None:
        """`model` is what FastLanguageModel returned, `desk` the one that serves it; see SelfJudge for the options."""
        loaded = copy.copy(model.loaded)
        loaded.tokenizer = copy.deepcopy(loaded.tokenizer)  # it is used in other threads
        super().__init__(SimpleNamespace(loaded=loaded, inner=model.inner), **options)
        self.desk, self.lock = desk, threading.Lock()

    async def rate(self, questions: list[Question]) -> Round:  # type: ignore[no-redef]
        """Ratings of the questions that the base model could answer. A failure of judging raises no error."""
        return await asyncio.to_thread(super().rate, questions)

    def encode(self, question: Question, fault: str | None, now: Round) -> list[int] | None:
        with self.lock:
            return super().encode(question, fault, now)

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        futures = [self.desk.submit(Call(ids, params, adapter=None)) for ids in prompts]
        return [[future.result()] for future in futures]
