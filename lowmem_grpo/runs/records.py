"""The run's records on disk: metrics.jsonl, completions.jsonl and summary.json, in whole lines. Earlier runs in the
same directory are moved to `earlier/1`, `earlier/2` ..., and never deleted."""

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_grpo.runs.files import flush, free_bytes, move, refused, write_whole
from lowmem_grpo.runs.trajectory import content_text, episode_fields
from lowmem_grpo.utils import MIB, bytes_of, is_number, size_text

if TYPE_CHECKING:
    from lowmem_grpo.types import RolloutGroup  # needs torch, which reports do without

logger = logging.getLogger(__name__)
METRICS, COMPLETIONS, SUMMARY, REPORT = "metrics.jsonl", "completions.jsonl", "summary.json", "report.html"
FINAL, NONFINITE, EARLIER, PAIRS = "adapter", "nonfinite.jsonl", "earlier", "pairs.jsonl"
TENSORBOARD, PICTURES = "tensorboard", "pictures"  # folders
PICTURE = re.compile("[0-9a-f]{32}")  # the name of an image
LONGEST = 64 * MIB  # bytes of a line
DEEPEST = 200  # levels of a record: what reads it recurses over them
LAST_STEP = 2**53  # the largest exact integer in JavaScript
OF_A_RUN = (COMPLETIONS, PICTURES, REPORT, NONFINITE, PAIRS, FINAL, TENSORBOARD, METRICS, SUMMARY)  # and checkpoints


class RecordError(RuntimeError):
    """Raised if a record cannot be read or written, or would overwrite another run; the message says what to do."""


class LostLinesError(RecordError):
    """Raised if lines that a run wrote are gone."""


class RunRecords:
    """The append-only records in a run directory."""

    writes = True  # whether this process writes the files of the run

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.lines: Counter[str] = Counter()  # lines of each file that this run wrote or kept
        self.sizes: dict[str, int] = {}  # bytes of each file, after it was last written

    def start_run(self) -> Path | None:
        """Move a previous run's files into a new folder in `earlier`; return that folder, or None without files."""
        self.lines.clear()
        self.sizes.clear()
        earlier = self.run_dir / EARLIER
        moving = earlier / ".moving"
        names = [name for name in [*self.checkpoints(), *OF_A_RUN] if os.path.lexists(self.run_dir / name)]
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if names in ([], [TENSORBOARD]) and not moving.exists():
                return None  # a trainer that has only evaluated writes no more than that
            moving.mkdir(parents=True, exist_ok=True)
            for name in names:
                move(self.run_dir / name, moving / name)
            numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
            kept = earlier / str(max(numbers, default=0) + 1)
            move(moving, kept)
            return kept
        except OSError as error:
            raise RecordError(refused(moving, error, 0, free_bytes(earlier))) from error

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.run_dir.glob("checkpoint-*"))

    def refuse_another_run(self) -> None:
        """Raise RecordError if the directory holds a run."""
        held = [name for name in (METRICS, COMPLETIONS, SUMMARY) if (self.run_dir / name).exists()]
        held += self.checkpoints()
        if held:
            raise RecordError(f"{self.run_dir} already holds a run ({', '.join(held[:4])}). Choose another output_dir, "
                              f"go on with it (resume=true), or move it to {self.run_dir / EARLIER} and begin a new "
                              "one (overwrite_output_dir=true)")

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines after `step`, and return the metrics that stay. RecordError, before anything is dropped, for a
        damaged line that would stay."""
        held = {name: kept_lines(self.run_dir / name, step) for name in (METRICS, COMPLETIONS)
                if os.path.lexists(self.run_dir / name)}
        for name, kept in held.items():
            replace_text(self.run_dir / name, "".join(map(to_line, kept)))
            self.lines[name] = len(kept)
            self.sizes[name] = (self.run_dir / name).stat().st_size
        return held.get(METRICS, [])

    def missing(self, written: dict[str, int] | None) -> list[str]:
        """Return a message for each file with fewer lines than a checkpoint counted (`written`)."""
        return [f"{self.run_dir / name} has {self.lines[name]} of the {count} lines that it had"
                for name, count in (written or {}).items() if name != NONFINITE and self.lines[name] < count]

    def flush(self) -> None:
        """Fsync the records before a checkpoint, which must not survive a power cut without its lines."""
        for name in (METRICS, COMPLETIONS):
            if (self.run_dir / name).exists():
                flush(self.run_dir / name)

    def metrics(self, metrics: dict[str, Any]) -> None:
        self.append(METRICS, [metrics])

    def completions(self, step: int, groups: list["RolloutGroup"]) -> None:
        self.append(COMPLETIONS, completion_lines(step, groups))

    def picture(self, name: str, make: Callable[[], bytes]) -> None:
        """Write the small JPEG file of an image, once in a run; RecordError if the disk refuses."""
        path = self.run_dir / PICTURES / f"{name}.jpg"
        if not self.writes or path.exists() or not (data := make()):
            return
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise RecordError(refused(path, error, len(data), free_bytes(path))) from error

    def summary(self, summary: dict[str, Any]) -> None:
        replace_text(self.run_dir / SUMMARY, json.dumps(finite(self.known() | summary), indent=2) + "\n")
        self.check_lines()

    def check_lines(self) -> None:
        """Raise LostLinesError if lines of this run are lost: a file or the folder was moved, deleted or cut."""
        for name, size in self.sizes.items():  # not NONFINITE, which no resume needs
            path = self.run_dir / name
            try:
                left = path.stat().st_size if path.is_file() else 0
            except OSError as error:
                raise RecordError(refused(path, error, size, None)) from error
            if left < size:
                raise LostLinesError(
                    f"{path} lost lines that this run wrote: the file or its folder was deleted, moved or cut while "
                    "the run went on. Put it back, or begin a new run in another output_dir")

    def known(self) -> dict[str, Any]:
        """Return the content of summary.json. A broken file does not stop the run: it is renamed, with a warning."""
        path = self.run_dir / SUMMARY
        if not os.path.lexists(path):
            return {}
        try:
            return json_object(bytes_of(path))
        except (OSError, ValueError) as error:
            broken = path.with_name(f"{SUMMARY}.broken-{os.getpid()}")
            logger.warning("%s cannot be read (%s); it is renamed to %s, a new one begins", path, error, broken.name)
            with suppress(OSError):  # if the disk is at fault, writing the new file reports it
                move(path, broken)
            return {}

    def append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines; if the disk refuses, cut the file back to its former length and raise RecordError."""
        path, texts = self.run_dir / name, [to_line(line) for line in lines]
        text, free = "".join(texts).encode(), free_bytes(path)
        self.check_lines()
        length = path.stat().st_size if path.exists() else 0
        try:
            refuse_pipe(path)
            with path.open("ab", buffering=0) as file:
                written = 0
                while written < len(text):
                    written += file.write(text[written:])
        except OSError as error:
            with suppress(OSError):  # on a disk that turned read-only
                if path.is_file():
                    os.truncate(path, length)
            raise unwritten(path, len(text), free, error) from error
        self.lines[name] += len(texts)
        if name != NONFINITE:
            self.sizes[name] = length + len(text)


class NoRecords(RunRecords):
    """The records of a process that writes none, because another process does."""

    writes = False

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    start_run = flush = summary = append = ignore

    def rewind(self, step: int) -> list[dict[str, Any]]:
        return []

    def known(self) -> dict[str, Any]:
        return {}

    def missing(self, written: dict[str, int] | None) -> list[str]:
        return []


def unwritten(path: Path, needed: int, free: int | None, error: OSError) -> RecordError:
    """Return the error for `needed` bytes that could not be written to `path`; `free` bytes were free before."""
    return RecordError(f"{refused(path, error, needed, free)}. What was written before is whole; afterwards go on with "
                       "trainer.train(resume_from_checkpoint=True)")


def completion_lines(step: int, groups: list["RolloutGroup"]) -> list[dict[str, Any]]:
    """Return the lines of completions.jsonl for a step."""
    return [
        {"step": step, "prompt": prompt_text(rollout.opening or group.row.get("prompt")), "completion": rollout.text,
         **({} if rollout.turns else chat_fields(group.row.get("prompt"))),
         "rewards": rollout.rewards, "reward": rollout.reward, "advantage": rollout.advantage,
         "tokens": len(rollout.completion_ids), "finish_reason": rollout.finish_reason, **episode_fields(rollout),
         **({"seed": group.row["seed"]} if rollout.turns and "seed" in group.row else {}),
         **({"images": names} if (names := images_of(group.prompt_ids)) else {}),
         **({"extra": rollout.extras} if rollout.extras else {}),
         **({"replayed_from": rollout.policy_version} if group.replayed else {})}
        for group in groups
        for rollout in group.rollouts
    ]


def images_of(prompt_ids: Iterable[int]) -> list[Any]:
    """Return the names of a prompt's images in order, each once."""
    return list(dict.fromkeys(token.image for token in prompt_ids if hasattr(token, "image")))


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; a chat of several messages has the role above each message."""
    if not isinstance(prompt, list):
        return "" if prompt is None else str(prompt)
    if len(prompt) == 1:
        return content_text(prompt[0])
    return "\n\n".join(f"[{message['role']}]\n{content_text(message)}" for message in prompt)


def chat_fields(prompt: Any) -> dict[str, Any]:
    """Return what a chat's text does not tell: the role of its only message, or else its messages if they are texts."""
    if not isinstance(prompt, list) or not all(isinstance(message.get("content"), str | None) for message in prompt):
        return {}
    alone = len(prompt) == 1 and prompt[0].keys() == {"role", "content"}
    return {"role": prompt[0]["role"]} if alone else {"messages": prompt}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without an unfinished last line; ValueError for a damaged line."""
    records = []
    for record, fault in records_of(path):
        if fault:
            raise ValueError(fault)
        records.append(record)
    return records


def kept_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the records up to `step`; RecordError for a damaged line among them. Damage after them is ignored."""
    kept: list[dict[str, Any]] = []
    damage = ""
    try:
        for record, fault in records_of(path):
            damage = damage or fault
            if fault or record["step"] > step:
                continue
            if damage:
                raise RecordError(f"{damage}; mend the line, or delete it, then resume")
            kept.append(record)
    except ValueError as error:
        raise RecordError(f"{error}; mend the line, or delete it, then resume") from error
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}" if error.strerror else str(error)
        raise RecordError(f"{why}; move it away, or mend it") from error
    return kept


def records_of(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the record of each line and "", or for a damaged one {} and what is wrong. An unfinished last line is left
    out. OSError, before it is opened, for what is no file; ValueError for a line longer than any record."""
    refuse_pipe(path)
    with path.open("rb") as file:
        for number in count(1):
            if not (line := file.readline(LONGEST)):
                return
            if len(line) == LONGEST:
                raise ValueError(f"{path}, line {number} has {size_text(LONGEST)} or more, which no record has")
            try:
                if line.strip():
                    yield step_record(line), ""
            except ValueError as error:
                if line.endswith(b"\n"):
                    yield {}, f"{path}, line {number} {error}"


def refuse_pipe(path: Path) -> None:
    """Raise OSError for what is there and is no file; a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is a folder, a pipe or a device; a file is needed")


def step_record(line: bytes) -> dict[str, Any]:
    """Parse a line. The message of a ValueError is meant to follow "FILE, line N"."""
    try:
        record = json_object(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if "step" not in record:
        raise ValueError(f"has no step: {line.strip()[:80].decode(errors='replace')}")
    step = record["step"]
    if not is_number(step) or not 0 <= step <= LAST_STEP or step % 1:
        raise ValueError(f"has the step {step!r:.80}; a step is a whole number from 0 to 2**53")
    return record | {"step": int(step)}


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object, with NaN, infinity and numbers beyond a float's as None; ValueError for anything else, and
    for more than DEEPEST levels."""
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_int=partial(number_of, int),
                           parse_float=partial(number_of, float))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} where an object should be")
    if levels_of(value) > DEEPEST:
        raise ValueError("it is nested too deeply")
    return value


def number_of(kind: type, digits: str) -> Any:
    return kind(digits) if math.isfinite(float(digits)) else None


def levels_of(value: Any) -> int:
    """Return how deep lists and objects are nested, without recursion."""
    level, levels = [value], 0
    while level := [inner for held in level if isinstance(held, dict | list)
                    for inner in (held.values() if isinstance(held, dict) else held)]:
        levels += 1
    return levels


def to_line(record: dict[str, Any]) -> str:
    """Return a line of JSON, with NaN and infinity as null, and lone surrogates, which UTF-8 lacks, as "?"."""
    line = json.dumps(finite(record), ensure_ascii=False) + "\n"
    return line.encode(errors="replace").decode()


def finite(value: Any) -> Any:
    """Return `value` as JSON values, with NaN and infinity as None, and unknown types as text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def replace_text(path: Path, text: str) -> None:
    """Write a file as `write_whole` does, and make its folder. RecordError if the disk refuses."""
    free = free_bytes(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise unwritten(path, len(text.encode()), free, error) from error
