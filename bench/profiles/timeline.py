"""The arithmetic of a profile: what a device did when, from a plain list of events. Times are in microseconds."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

KERNEL, COPY, HOST, LAUNCH = "kernel", "copy", "host", "launch"  # copies between host and device; ops of the CPU
Span = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class Event:
    """Something that ran: on the device in a stream, or on the host in a thread."""

    start: float
    duration: float
    stream: str
    kind: str
    name: str

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True)
class Share:
    """All calls of one kernel, and their part of the time of all kernels."""

    name: str
    calls: int
    microseconds: float
    share: float


@dataclass(frozen=True)
class Gap:
    """Time in which no kernel ran, and the CPU's op that ran most of it."""

    start: float
    duration: float
    during: str


@dataclass(frozen=True)
class Summary:
    """A profile in numbers; counts are of all `steps` together."""

    steps: int
    span: float  # from the first kernel's begin to the last one's end
    busy: float  # of it, time in which some kernel ran
    kernels: int
    launches: int
    copy: float  # time in which a copy between host and device ran
    overlapped: float  # of it, time in which a kernel ran too
    top: list[Share] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span if self.span else 0.0

    @property
    def copy_overlap(self) -> float | None:
        """The part of the copies' time that kernels cover; None where nothing was copied."""
        return self.overlapped / self.copy if self.copy else None


def of_kind(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def union(spans: list[Span]) -> list[Span]:
    """The same time as spans that neither overlap nor touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(spans: list[Span]) -> float:
    """Time in which any of the spans holds."""
    return sum(end - begin for begin, end in union(spans))


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """Time that lies in both."""
    one, two, found = union(first), union(second), []
    place = other = 0
    while place < len(one) and other < len(two):
        begin, end = max(one[place][0], two[other][0]), min(one[place][1], two[other][1])
        if begin < end:
            found.append((begin, end))
        if one[place][1] <= two[other][1]:
            place += 1
        else:
            other += 1
    return found


def top_kernels(events: list[Event], count: int) -> list[Share]:
    """Those kernels that took the most time, by name; shares are of the time of all kernels, side by side or not."""
    calls: dict[str, list[float]] = defaultdict(list)
    for event in of_kind(events, KERNEL):
        calls[event.name].append(event.duration)
    whole = sum(map(sum, calls.values()))
    shares = [Share(name, len(times), sum(times), sum(times) / whole if whole else 0.0)
              for name, times in calls.items()]
    return sorted(shares, key=lambda share: (-share.microseconds, share.name))[:count]


def longest_gaps(events: list[Event], count: int) -> list[Gap]:
    """The longest times without a kernel between the first and the last, longest first."""
    kernels = union([event.span for event in of_kind(events, KERNEL)])
    found = sorted(((after[0] - before[1], before[1]) for before, after in pairwise(kernels)), reverse=True)
    return [Gap(start, duration, running(events, (start, start + duration))) for duration, start in found[:count]]


def running(events: list[Event], span: Span) -> str:
    """The host's op that covers most of a span; of those that cover as much, the innermost."""
    best = max(
        of_kind(events, HOST, LAUNCH), default=None,
        key=lambda event: (min(event.end, span[1]) - max(event.start, span[0]), -event.duration),
    )
    return best.name if best is not None and best.start < span[1] and best.end > span[0] else ""


def innermost(events: list[Event]) -> list[Event]:
    """Nested events of a stream as pieces that do not overlap: what each did itself, its inner ones left out."""
    pieces = []
    streams: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        streams[event.stream].append(event)
    for nested in streams.values():
        pieces += stream_pieces(sorted(nested, key=lambda event: (event.start, -event.duration)))
    return sorted(pieces, key=lambda event: event.start)


def stream_pieces(events: list[Event]) -> list[Event]:
    """The pieces of one stream, whose events come in order, outer ones first."""
    pieces: list[Event] = []
    stack: list[Event] = []
    now = 0.0

    def until(time: float) -> None:
        """What is open runs until then, innermost first."""
        nonlocal now
        while stack:
            end = min(stack[-1].end, time)
            if end > now:
                pieces.append(Event(now, end - now, stack[-1].stream, stack[-1].kind, stack[-1].name))
                now = end
            if stack[-1].end > time:
                return
            stack.pop()

    for event in events:
        until(event.start)
        now = max(now, event.start)
        stack.append(event)
    until(float("inf"))
    return pieces


def summarize(events: list[Event], steps: int, top: int = 15, gaps: int = 10) -> Summary:
    """All of it; `steps` is how many decode or training steps the events are of."""
    kernels = [event.span for event in of_kind(events, KERNEL)]
    copies = [event.span for event in of_kind(events, COPY)]
    span = max((end for _, end in kernels), default=0.0) - min((begin for begin, _ in kernels), default=0.0)
    return Summary(
        steps, span, length(kernels), len(kernels), len(of_kind(events, LAUNCH)), length(copies),
        length(common(copies, kernels)), top_kernels(events, top), longest_gaps(events, gaps),
    )
