"""The run's records on disk: metrics.jsonl, completions.jsonl and summary.json, whole lines only."""

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowmem_grpo.types import RolloutGroup

METRICS, COMPLETIONS, SUMMARY, REPORT = "metrics.jsonl", "completions.jsonl", "summary.json", "report.html"


class RecordError(RuntimeError):
    """A record cannot be written or would overwrite another run; the message says what to do."""


class RunRecords:
    """Append-only records in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def begin(self, overwrite: bool) -> None:
        """Make the directory ready for a new run; RecordError if it holds another one, unless `overwrite`."""
        for name in [*self.held(overwrite), REPORT]:
            path = self.run_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def held(self, overwrite: bool) -> list[str]:
        """What the directory holds of another run; RecordError if it holds any, unless `overwrite`."""
        held = [name for name in (METRICS, COMPLETIONS, SUMMARY) if (self.run_dir / name).exists()]
        held += sorted(path.name for path in self.run_dir.glob("checkpoint-*"))
        if held and not overwrite:
            raise RecordError(
                f"{self.run_dir} already holds a run ({', '.join(held[:4])}). Choose another output_dir, go on with it "
                "(resume=true on the command line, trainer.train(resume_from_checkpoint=True) in Python), or allow its "
                "loss (overwrite_output_dir=true on the command line, overwrite_output_dir=True in Python)"
            )
        return held

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`, and a half-written last line: they will be made again."""
        for name in (METRICS, COMPLETIONS):
            path = self.run_dir / name
            if path.exists():
                kept = [line for line in read_lines(path) if line["step"] <= step]
                replace_text(path, "".join(to_line(line) for line in kept))

    def metrics(self, metrics: dict[str, Any]) -> None:
        self.append(METRICS, [metrics])

    def completions(self, step: int, groups: list[RolloutGroup]) -> None:
        """One line for each completion of a step."""
        self.append(COMPLETIONS, completion_lines(step, groups))

    def summary(self, summary: dict[str, Any]) -> None:
        """Merge into summary.json."""
        path = self.run_dir / SUMMARY
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        replace_text(path, json.dumps(finite(known | summary), indent=2) + "\n")

    def append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Append whole lines; if the disk is full, the file is cut back to its last whole line."""
        path = self.run_dir / name
        text = "".join(to_line(line) for line in lines).encode()
        length = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                written = 0
                while written < len(text):
                    written += file.write(text[written:])
        except OSError as error:
            if path.is_file():
                os.truncate(path, length)
            raise full_disk(path, len(text), error) from error


def full_disk(path: Path, needed: int, error: OSError) -> RecordError:
    """The error for `needed` bytes that could not be written to `path`."""
    free = shutil.disk_usage(path.parent).free
    return RecordError(
        f"cannot write {path}: {error.strerror} ({needed:,} bytes needed, {free:,} free). What was written before is "
        "whole; make room, then go on with trainer.train(resume_from_checkpoint=True)"
    )


def completion_lines(step: int, groups: list[RolloutGroup]) -> list[dict[str, Any]]:
    """What completions.jsonl holds of a step."""
    return [
        {
            "step": step, "prompt": prompt_text(group.row.get("prompt")), "completion": rollout.text,
            "rewards": rollout.rewards, "reward": rollout.reward, "advantage": rollout.advantage,
            "tokens": len(rollout.completion_ids), "finish_reason": rollout.finish_reason,
            **({"extra": rollout.extras} if rollout.extras else {}),
            **({"replayed_from": rollout.policy_version} if group.replayed else {}),
        }
        for group in groups
        for rollout in group.rollouts
    ]


def prompt_text(prompt: Any) -> str:
    """A prompt as a reader and a judge see it: a text as it is, a chat with the role above each message, and of a chat
    with one message only its text."""
    if not isinstance(prompt, list):
        return str(prompt)
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file. A last line without an end is still being written, so it is left out."""
    records = []
    *complete, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*complete, last], start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line, parse_constant=lambda _: None))  # NaN and infinity become gaps
        except ValueError as error:
            if number <= len(complete):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def to_line(record: dict[str, Any]) -> str:
    """One line of JSON, NaN and infinities as null, a question mark for each lone surrogate (no UTF-8 has it)."""
    line = json.dumps(finite(record), ensure_ascii=False) + "\n"
    return line.encode(errors="replace").decode()


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as null, which JSON can hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def replace_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text, "utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise full_disk(path, len(text), error) from error
