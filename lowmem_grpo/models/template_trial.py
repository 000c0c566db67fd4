"""Tries the chat templates of a tokenizer, which others wrote, in a process of its own that the kernel ends: a template
is a program, and nothing can stop it in this process. A template may still take its time over other messages than the
tried ones, or over very many. Run as a program, this file reads an order and prints what is wrong, if anything is."""

import json
import subprocess
import sys
from datetime import datetime
from functools import lru_cache
from signal import Signals
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS, MEMORY = 1, 2**29  # of the processor, and bytes of address space
LETTERS = 2**20  # that a template may write for a tried conversation
LONGEST = 60  # seconds that are waited for the process
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "number", "description": "One number."}}, "required": ["a"]}}}
SYSTEM, USER, ASSISTANT = (dict[str, Any](role=role, content="Hello") for role in ("system", "user", "assistant"))
CALLING: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "name": "add", "content": "1", "tool_call_id": "call00001"}]
TALKS: list[dict[str, Any]] = [
    {"messages": messages, "tools": tools, "add_generation_prompt": messages[-1]["role"] != "assistant"}
    for tools in (None, [TOOL])
    for messages in ([USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT], [USER, ASSISTANT, USER], [USER, *CALLING])]


class ChatTemplateError(TemplateError, ValueError):
    """Raised where a chat template cannot write messages; the message has the template's own words."""


class Generation(Extension):
    """The tag that templates put around what the assistant writes."""

    tags = {"generation"}  # as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_templates(tokenizer: Any, where: str) -> None:
    """Raise ValueError, with where the tokenizer is from, if a chat template of it is none, or takes more time or
    memory for a short conversation than SECONDS and MEMORY, or writes more than LETTERS."""
    held = getattr(tokenizer, "chat_template", None) or {}
    tokens = {name: token for name, token in getattr(tokenizer, "special_tokens_map", {}).items()
              if isinstance(token, str)}
    for template in held.values() if isinstance(held, dict) else [held]:
        if why := fault_of(str(template), json.dumps(tokens)):
            raise ValueError(f"the chat template of {where} {why}. Put another in its place (chat_template.jinja, or "
                             "chat_template in tokenizer_config.json), or take an adapter's away for its base's")


@lru_cache(16)
def fault_of(template: str, tokens: str) -> str:
    """Return what is wrong with a template; "" if nothing is, or if it cannot be tried here."""
    try:
        run = subprocess.run([sys.executable, "-P", __file__], input=json.dumps([template, tokens]),
                             capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"takes longer than {LONGEST} seconds for a conversation of three lines"
    if run.returncode < 0:
        name = Signals(-run.returncode).name
        return (f"takes longer than {SECONDS} second for a conversation of three lines" if name == "SIGVTALRM" else
                f"ends the process that writes a conversation of three lines ({name})")
    return run.stdout.strip() if run.returncode == 0 else ""


def language() -> ImmutableSandboxedEnvironment:
    """Return the language of chat templates, as transformers has it."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))
    made.globals |= {"raise_exception": refused, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


def refused(message: str) -> None:
    raise TemplateError(message)


def fault(template: str, tokens: dict[str, str]) -> str:
    """Return what is wrong with a template, in this process. Errors in a conversation are none: the template may refuse
    it."""
    try:
        made = language().from_string(template)
        for talk in TALKS:
            try:
                written = made.render(tokens | talk)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001, a template may raise anything
                continue
            if len(written) > LETTERS:
                return f"writes {len(written):,} characters for a conversation of three lines"
    except MemoryError:
        return f"takes more than {MEMORY // 2**20:,} MiB for a conversation of three lines"
    except Exception as error:  # noqa: BLE001, as does a compiler
        return f"is no template ({type(error).__name__}: {str(error).splitlines()[0]:.200})"
    return ""


def main() -> None:
    template, tokens = json.load(sys.stdin)
    try:
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # until the kernel kills this process
    except (ImportError, OSError, ValueError):  # on systems without these limits only LONGEST holds
        pass
    print(fault(template, json.loads(tokens)))


if __name__ == "__main__":
    main()
