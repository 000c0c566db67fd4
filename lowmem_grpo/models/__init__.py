"""The trained model: layers on our kernels, packed micro-batches in, log-probabilities out."""

import logging

BITSANDBYTES = logging.getLogger("bitsandbytes.backends.cpu.ops")


def is_asked_for(record: logging.LogRecord) -> bool:
    """Return False for bitsandbytes' warning, at its import, that it lacks a kernel for a layout of 4-bit weights that
    is never used here. Whoever has lowered the level of its logger, or of the root, sees it."""
    return "kernels-community" not in str(record.msg) or BITSANDBYTES.getEffectiveLevel() < logging.WARNING


BITSANDBYTES.addFilter(is_asked_for)
