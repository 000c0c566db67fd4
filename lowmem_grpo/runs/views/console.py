"""Output of the views to a terminal or a notebook cell, in any encoding; and how answers and episodes look there."""

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lowmem_grpo.runs.accuracy import interval_text, wilson_interval
from lowmem_grpo.runs.trajectory import speaker
from lowmem_grpo.runs.views.chart import LINES, RIGHT, WRONG, verdict_text
from lowmem_grpo.runs.views.terminal import between_words
from lowmem_grpo.utils import visible

IN_A_CELL = "<pre style='line-height:1.3;overflow-x:auto'>{code}</pre>"
SAMPLED_SIGN, CONTEXT_SIGN = "\u25cf", "\u25cb"  # a full circle and an empty one


class AnyText:
    """A stream that writes to the current sys.stdout, and replaces characters that its encoding lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.find_stream(), name)

    def find_stream(self) -> Any:
        """Return sys.stdout, or the stream behind rich's proxy of it, which would call this object again."""
        stream = sys.stdout or io.StringIO()  # None where a program was started with its output closed
        return getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> Any:
        stream = self.find_stream()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        return stream.write(text.encode(encoding, "replace").decode(encoding))


class Shown:
    """What a console prints, with text that a terminal would obey made visible."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for part in console.render(self.inner, options):
            yield part if part.control else part._replace(text=visible(part.text))


class Safely(RenderHook):
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [Shown(each) for each in renderables]


def any_console(**options: Any) -> Console:
    """Return a console for texts of others: their markup means nothing, and they cannot steer the terminal."""
    file: Any = AnyText()
    console = Console(file=file, markup=False, emoji=False, **options)
    console.push_render_hook(Safely())
    return console


def print_line(console: Console, text: str | Text) -> None:
    """Print a paragraph: as one line if piped; wrapped only between words on a terminal, so that paths stay whole."""
    line = Text(text) if isinstance(text, str) else text
    if console.is_terminal:
        line = Text(between_words(line.plain, console.width), spans=line.spans)  # a break replaces a space
    console.print(line, soft_wrap=True, highlight=False)


class Cell:
    """A notebook output that is redrawn in place, with the interface of rich's Live."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.handle: Any = None

    def start(self) -> None:
        """Do nothing: the output appears with the first panel."""

    def update(self, panel: RenderableType, refresh: bool = True) -> None:
        from IPython.display import HTML, display

        recorded = Console(record=True, width=self.width, file=io.StringIO(), force_jupyter=False)
        recorded.print(panel)
        page = HTML(recorded.export_html(inline_styles=True, code_format=IN_A_CELL))
        if self.handle is None:
            self.handle = display(page, display_id=True)
        else:
            self.handle.update(page)

    def stop(self) -> None:
        """Do nothing: the last panel stays."""


def plain(value: Any) -> Text:
    """Return a model's text without markup, and with control characters replaced by a visible character."""
    return Text(visible(str(value)), overflow="fold")


def shortened(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}\n...\n{text[-half:]}"


def episode_lines(turns: Sequence[dict[str, Any]], most: int) -> list[Text]:
    """Return an episode with one line per message, cut in the middle to `most` lines; signs mark sampled messages."""
    lines = [line for number, turn in enumerate(turns, start=1) for line in turn_lines(number, turn)]
    half = most // 2
    return lines if len(lines) <= most else [*lines[: most - half - 1], Text("..."), *lines[-half:]]


def turn_lines(number: int, turn: dict[str, Any]) -> list[Text]:
    paid = "" if turn.get("reward") is None else f" (reward {turn['reward']:g})"
    said = [Text.assemble((f"{SAMPLED_SIGN} {number}.{paid} ", f"bold {LINES[0]}"), plain(on_one_line(turn["text"])))]
    said += [Text.assemble(f"{CONTEXT_SIGN} ", plain(on_one_line(f"{speaker(reply)}: {reply['content']}")), style="dim")
             for reply in turn.get("replies", ())]
    for line in said:
        line.no_wrap, line.overflow = True, "ellipsis"
    return said


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def verdict(right: bool | None) -> Text:
    if right is None:
        return Text()
    return Text.assemble((f"{verdict_text(right)}\n", f"bold {RIGHT if right else WRONG}"))


def answers_table(
    names: Sequence[str], rows: Iterable[tuple[str, Any, Sequence[tuple[str, bool | None]]]], longest: int = 10**6
) -> Table:
    """Return a table of prompts with expected answers, and of each model's answers and whether they are right."""
    table = Table(box=SIMPLE, show_lines=True, expand=True)
    for name in names:
        table.add_column(name, ratio=1, overflow="fold")
    for prompt, expected, answers in rows:
        asked = plain(shortened(prompt, longest))
        if expected is not None:
            asked = Text.assemble(asked, "\n\nexpected: ", plain(shortened(str(expected), longest)))
        table.add_row(asked, *(verdict(right) + plain(shortened(text, longest)) for text, right in answers))
    return table


def print_samples(console: Console, samples: Sequence[dict[str, Any]]) -> None:
    rows = [(str(sample.get("prompt", "")), sample.get("answer"),
             [(str(sample.get(when, "")), sample.get(f"right_{when}")) for when in ("before", "after")])
            for sample in samples]
    console.print(answers_table(("Problem", "Before", "After"), rows))


def print_accuracy(
    console: Console, before: float, after: float, problems: int, change: tuple[float, float] | None = None
) -> None:
    """Print the accuracy (0 to 1) before and after training, and the difference, whose interval is `change`."""
    for label, accuracy in (("before", before), ("after", after)):
        low, high = wilson_interval(accuracy, problems)
        interval = f"95% interval {low:.1%} to {high:.1%}"
        console.print(Text(f"accuracy {label:<6} {accuracy:6.1%}  ({interval})"), soft_wrap=True)
    sure = "" if change is None else f" ({interval_text(change)})"
    console.print(Text(f"change {100 * (after - before):+.1f} points{sure} on {problems} problems"), soft_wrap=True)


def print_kinds(console: Console, kinds: dict[str, dict[str, Any]]) -> None:
    """Print the accuracy on problems of each kind, those that changed most first."""
    table = Table(box=SIMPLE)
    for name in ("Kind", "Problems", "Before", "After"):
        table.add_column(name, justify="left" if name == "Kind" else "right")
    for kind, found in sorted(kinds.items(), key=lambda each: each[1]["before"] - each[1]["after"]):
        table.add_row(plain(kind), str(found["problems"]), f"{found['before']:.0%}", f"{found['after']:.0%}")
    console.print(table)
