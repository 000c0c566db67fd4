"""A check of how much a run has to learn from, by the rules of thumb that guides to GRPO give."""

from collections.abc import Iterator

from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding

USUAL_STEPS, USUAL_ROWS = 300, 500


def small_scale(subject: Subject) -> Iterator[Finding]:
    """Few steps or rows: good to know where a run shows no progress, and no mistake."""
    few = [f"{found} {what} (from {usual} on is usual)" for found, usual, what in (
        (subject.state.max_steps, USUAL_STEPS, "steps"), (subject.sample.total, USUAL_ROWS, "rows")) if found < usual]
    if few:
        yield Finding("note", "", f"the run has {' and '.join(few)}", "judge a reward by more than that")
