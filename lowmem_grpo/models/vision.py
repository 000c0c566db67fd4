"""Images as inputs of a text decoder: features of a frozen tower, and RoPE positions of three rows.

A prompt holds one `ImageToken` for each feature of an image. Its vision tower makes the features once for each distinct
image, and they stay on the host, so that all completions, micro-batches and passes read the same. Positions (time,
height, width) follow Qwen2-VL (arXiv 2409.12191, section 2.1): text has its index in all three, an image of h x w
features has (p, p + row, p + column), where p is its first position, and the text after it goes on at p + max(h, w).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowmem_grpo.types import ImageToken, MicroBatch

HELD_BYTES = 2 << 30  # of features and pictures on the host, beyond those that the current pass needs


class ImageName(str):
    """The name of an image by its content, with the user's picture, from which a dropped image is read again."""

    picture: Any

    @classmethod
    def of(cls, name: str, picture: Any) -> "ImageName":
        made = cls(name)
        made.picture = picture
        return made


@dataclass(frozen=True)
class PatchedImage:
    """An image as the tower reads it."""

    name: str  # by its content
    patches: Tensor  # (t h w, values) of the image processor; empty once the features are known
    grid: tuple[int, int, int]  # (t, h, w), in patches


@dataclass
class ImageStore:
    """The images of a run by name, with their features once these are known. Those that were used least recently are
    dropped first; a dropped image that is needed again is read again, by an `ImageName`."""

    pictures: OrderedDict[str, PatchedImage] = field(default_factory=OrderedDict)
    features: dict[str, Tensor] = field(default_factory=dict)  # (1 + levels, n, D) of an image, on the host
    encoded: int = 0  # images that the tower has read
    read: Callable[[Any], Any] | None = None  # puts in a user's picture

    def put(self, picture: PatchedImage) -> None:
        self.pictures.setdefault(picture.name, picture)
        self.pictures.move_to_end(picture.name)
        self.trim([picture.name])

    def get(self, name: str) -> PatchedImage:
        if name not in self.pictures and self.read is not None and isinstance(name, ImageName):
            self.read(name.picture)
        if name not in self.pictures:
            raise LookupError(f"the image {name} is not held any more, and its row has another now; begin a new run")
        self.pictures.move_to_end(name)
        return self.pictures[name]

    def trim(self, needed: Iterable[str]) -> None:
        """Drop the images that were used least recently, until the others take HELD_BYTES or only `needed` are left."""
        keep, total = set(needed), sum(map(self.nbytes, self.pictures))
        for name in list(self.pictures):
            if total <= HELD_BYTES:
                return
            if name not in keep:
                total -= self.nbytes(name)
                del self.pictures[name]
                self.features.pop(name, None)

    def nbytes(self, name: str) -> int:
        return self.pictures[name].patches.nbytes + (self.features[name].nbytes if name in self.features else 0)


@dataclass(frozen=True)
class ImageSpan:
    """The places of one image in a sequence."""

    start: int
    name: str
    size: int


def spans_of(ids: Iterable[Any]) -> list[ImageSpan]:
    """Return the images in a list of token ids, in order."""
    spans, place = [], 0
    for name, same in groupby(ids, lambda token: token.image if isinstance(token, ImageToken) else None):
        size = len(list(same))
        spans += [] if name is None else [ImageSpan(place, name, size)]
        place += size
    return spans


STORES: WeakKeyDictionary[nn.Module, ImageStore] = WeakKeyDictionary()


def store_of(base: nn.Module) -> ImageStore:
    """Return the images of a model, which all its policies and encoders share."""
    return STORES.setdefault(base, ImageStore())


def whole_of(base: Any) -> Any:
    """Return the part of a model with tower and decoder; None for a model of text."""
    whole = getattr(base, base.base_model_prefix)
    return whole if hasattr(whole, "visual") and hasattr(whole, "language_model") else None


class ImageInputs:
    """Makes the inputs of a decoder that reads text and images; see `models.policy.TextInputs`."""

    def __init__(self, whole: Any, store: ImageStore) -> None:
        """`whole` is transformers' model with its tower `visual` and its decoder `language_model`."""
        self.tower, self.embed = whole.visual, whole.language_model.embed_tokens
        self.layers = whole.language_model.layers
        self.merge: int = whole.config.vision_config.spatial_merge_size
        self.store = store
        known = (getattr(whole.config, name, None) for name in ("image_token_id", "video_token_id"))
        self.never = torch.tensor([token for token in known if token is not None], device=self.device)

    @property
    def device(self) -> torch.device:
        """The decoder's device, where the embedding and the tower may not be."""
        return next(self.layers.parameters()).device

    # Positions

    def size_of(self, name: str) -> tuple[int, int, int]:
        """Return (t, h, w) of an image, in features."""
        t, h, w = self.store.get(name).grid
        return t, h // self.merge, w // self.merge

    def shift_after(self, span: ImageSpan) -> int:
        """Return by how much the positions after an image lie behind the tokens' indices."""
        t, h, w = self.size_of(span.name)
        if t * h * w != span.size:
            raise ValueError(f"an image of {t * h * w} features has {span.size} tokens in a prompt")
        return max(h, w) - span.size

    def shifts(self, prompts: Sequence[list[int]], device: torch.device) -> Tensor:
        """Return what is added to the index of a token after each prompt to get its position, (B,)."""
        return torch.tensor([sum(map(self.shift_after, spans_of(ids))) for ids in prompts], device=device)

    def positions(self, offsets: Tensor, spans: list[ImageSpan], shift: int = 0) -> Tensor:
        """Return positions (3, n) of n tokens in order, whose indices are `offsets` (n,), after a `shift`."""
        rows = (offsets + shift).expand(3, -1).clone()
        for span in spans:
            end, start = span.start + span.size, rows[0, span.start].clone()
            t, h, w = self.size_of(span.name)
            rows[:, end:] += self.shift_after(span)
            grid = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
            rows[:, span.start : end] = start + torch.stack(grid).flatten(1)
        return rows

    # Features

    def features(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the features (1 + levels, n, D) of images, on the host; the tower reads those that are not known."""
        needed, made = dict.fromkeys(names), dict[str, Tensor]()
        with nullcontext() if self.store.features.keys() >= needed.keys() else self.tower_at_hand():
            for name in needed:
                if name not in self.store.features:
                    self.encode(self.store.get(name))
                made[name] = self.store.features[name]
        self.store.trim(made)
        return made

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Encode the images of prompts, so that the tower may leave before a cache grows."""
        self.features(span.name for ids in prompts for span in spans_of(ids))

    def wait_on_host(self, waits: bool) -> None:
        """Let the tower lie on the host until an image is to be encoded, or else beside the decoder."""
        self.tower.to("cpu" if waits else self.device)

    @contextmanager
    def tower_at_hand(self) -> Iterator[None]:
        """Return a context in which the tower lies beside the decoder."""
        waits = next(self.tower.parameters()).device != self.device  # on the host
        if waits:
            self.wait_on_host(False)
        try:
            yield
        finally:
            if waits:
                self.wait_on_host(True)

    @torch.no_grad()
    def encode(self, picture: PatchedImage) -> None:
        """Compute the features of a picture, alone: in a pass with others they would be rounded otherwise, and a run
        that is resumed encodes its images in another order."""
        weight = next(self.tower.parameters())
        patches, grid = picture.patches.to(weight.device, weight.dtype), torch.tensor([picture.grid]).to(weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            out = self.tower(patches, grid_thw=grid)
        made = torch.stack([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])])
        self.store.features[picture.name] = made.cpu()
        self.store.pictures[picture.name] = replace(picture, patches=picture.patches[:0].clone())
        self.store.encoded += 1

    # Inputs

    def of_batch(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the decoder's arguments for a packed batch."""
        features, at = self.features(token.image for token in batch.images.values()), 0
        first = first_rows(features)
        positions, rows = list[Tensor](), list[Tensor]()
        for prompt, *completions in batch.prompts:
            start = shift = 0  # of a part's first token: its index in the sequence, and how far its position is off
            for part, size in enumerate((prompt, *completions)):
                spans = spans_of(batch.images.get(place) for place in range(at, at + size))
                positions.append(self.positions(torch.arange(start, start + size), spans, shift))
                rows.append(places_of(size, spans, first))
                if part == 0:
                    start, shift = prompt, sum(map(self.shift_after, spans))
                at += size
        return self.arguments(batch.input_ids[None], torch.cat(positions, 1)[:, None], torch.cat(rows)[None], features)

    def of_rows(self, ids: Tensor, offsets: Tensor, prompts: Sequence[list[int]] = ()) -> dict[str, Any]:
        """Return the decoder's arguments for tokens (B, Q): parts of whole `prompts`, or sampled ones without any, for
        which `offsets` (B, Q) are positions."""
        if not prompts:
            return {"input_ids": ids, "position_ids": offsets.expand(3, *offsets.shape)}
        spans = [spans_of(prompt) for prompt in prompts]
        features = self.features(span.name for own in spans for span in own)
        lengths, at = torch.arange(max(map(len, prompts))), offsets.cpu()
        positions = torch.stack([self.positions(lengths, own) for own in spans], 1)
        rows = torch.stack([places_of(len(lengths), own, first_rows(features)) for own in spans])
        return self.arguments(ids, positions.gather(2, at.expand(3, *at.shape)), rows.gather(1, at), features)

    def arguments(self, ids: Tensor, positions: Tensor, rows: Tensor, features: dict[str, Tensor]) -> dict[str, Any]:
        """Return the decoder's arguments for tokens (B, Q) at `positions` (3, B, Q), which read `rows` (B, Q) of all
        features in order, or their own embedding where that is -1."""
        embeds: Tensor = self.embed(ids)
        given = {"inputs_embeds": embeds, "position_ids": positions.to(ids.device)}
        seen = rows >= 0
        if not features or not seen.any():
            return given
        # (1 + levels, m, D)
        read = torch.cat(list(features.values()), 1)[:, rows[seen]].to(embeds.device, embeds.dtype)
        mask = seen.to(ids.device)
        given["inputs_embeds"] = embeds.masked_scatter(mask[..., None], read[0])
        return given if len(read) == 1 else given | {"visual_pos_masks": mask, "deepstack_visual_embeds": [*read[1:]]}


def first_rows(features: dict[str, Tensor]) -> dict[str, int]:
    """Return the index of each image's first feature among all features in order."""
    ends = accumulate((made.shape[1] for made in features.values()), initial=0)
    return dict(zip(features, ends, strict=False))


def places_of(size: int, spans: list[ImageSpan], first: dict[str, int]) -> Tensor:
    """Return for each of `size` tokens the row of its feature among all features, (size,); -1 for text."""
    rows = torch.full((size,), -1)
    for span in spans:
        rows[span.start : span.start + span.size] = torch.arange(span.size) + first[span.name]
    return rows
