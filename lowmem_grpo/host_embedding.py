"""The input embedding looked up on the host: of a matrix (V, D) a step needs T rows; the rest need not be on a card.

For Llama-3.1-8B that is 1.05 GB less on the card, against 8 KB copied for each token. A matrix that is also the output
head is needed on the card anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HostEmbedding(nn.Module):
    """A frozen embedding whose rows are gathered in host memory and sent to the device of the ids."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        on_card = embedding.weight.is_cuda
        weight = embedding.weight.detach().to("cpu")
        self.weight = nn.Parameter(weight.pin_memory() if on_card else weight, requires_grad=False)
        scale = getattr(embedding, "embed_scale", None)  # Gemma's
        self.scale = None if scale is None else float(scale.to(weight.dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        """ids (...) -> (..., D) on their device."""
        rows = F.embedding(input_ids.to(self.weight.device), self.weight)
        rows = rows if self.scale is None else rows * self.scale
        if input_ids.is_cuda:
            rows = rows.pin_memory()  # the copy then need not wait for the device's other work
        return rows.to(input_ids.device, non_blocking=True)


def embed_on_host(model: Any) -> int:
    """Put the model's input embedding on the host; the bytes that this frees on its device. ValueError where the output
    head needs the same matrix."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and head.weight.data_ptr() == embedding.weight.data_ptr():
        raise ValueError(
            f"offload_embedding=True: {type(model).__name__} ties its input embedding to its output head, which is "
            "needed on the device; nothing would be saved. Leave it out"
        )
    if embedding.weight.requires_grad:
        raise ValueError("offload_embedding=True: the input embedding is trained; only a frozen one can be on the host")
    freed = int(embedding.weight.nbytes)
    model.set_input_embeddings(HostEmbedding(embedding))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return freed
