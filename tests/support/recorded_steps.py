"""What a CUDA graph does, on the CPU: a step is traced to torch's own operations, which then run without its Python."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lowmem_grpo.engines.fixed_cache import STEP
from lowmem_grpo.engines.transformers_engine import TransformersEngine


class Recorder:
    """Records steps of an engine, and counts how often it did and how often they ran."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.step, self.recorded, self.ran = engine.step, 0, 0
        engine.step.record, engine.step.block = self, STEP

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Tracing runs the work, which recording on a card does not, so that the place is set back."""
        assert work == self.step.step
        graph = make_fx(work)()
        self.step.at.sub_(1)
        self.step.positions.sub_(1)
        self.recorded += 1

        def run() -> Tensor:
            self.ran += 1
            with torch.no_grad():
                logits: Tensor = graph()
            return logits

        return run
