"""The tensors that one engine shares with the trainer's model for as long as the engine exists."""

import logging
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_grpo.engines.vllm import sampling_weights as adapters
from lowmem_grpo.engines.vllm.sampling_weights import AdapterCopy, Loras, Room, SamplingWeights, few_rows, lora_of
from lowmem_grpo.engines.vllm.shared_linear import (
    ADVICE,
    OTHER_ENGINE,
    Borrowed,
    BorrowedExperts,
    BorrowedLinear,
    BorrowError,
    same_tensors,
)
from lowmem_grpo.kernels.custom_op import matmul_fp32
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.memory.families import FAMILIES, FUSED_GATE_UP, family_of
from lowmem_grpo.memory.oom import is_out_of_memory
from lowmem_grpo.models.experts import RoutedBlock
from lowmem_grpo.models.trained_embedding import SharedRows, base_module

logger = logging.getLogger(__name__)


class WeightSharing:
    """The trainer's frozen tensors under the engine's names, and the engine's copy of the adapter.

    `base` is the base model with peft's layers injected. If `adapter` is None, the active adapter is used. `room`
    allocates dequantized weights for sampling; if it is None, sampling uses the quantized codes.
    """

    def __init__(self, base: Any, device: torch.device, adapter: str | None = None, room: Room | None = None) -> None:
        self.base, self.device, self.room = base, device, room
        self.wide: SamplingWeights | None = None
        self.dtype = base_module(base.get_input_embeddings()).weight.dtype  # the engine's compute dtype
        self.adapter = adapter or active_adapter(base)
        self.copy = AdapterCopy(loras_of(base, self.adapter), self.dtype, device)
        self.row = family_of(base.config)
        stored = () if self.row is None else self.row.buffers
        self.buffers = [name for name, _ in base.named_buffers() if name.rpartition(".")[2] in stored]
        self.blocks = {path: module for path, module in base.named_modules() if isinstance(module, RoutedBlock)}
        self.linears: dict[str, BorrowedLinear] = {}
        self.experts: dict[str, BorrowedExperts] = {}  # by the path of the trainer's block
        self.tables: dict[str, BorrowedTable] = {}  # embeddings and head, by the trainer's names
        self.others: dict[str, Tensor] = {}  # norms, by the trainer's names
        self.of_base = torch.zeros((), dtype=torch.bool, device=device)  # True while the base model is sampled

    # While the engine starts

    def linear(self, prefix: str, parts: dict[str, list[str]]) -> BorrowedLinear:
        """Return the trainer's modules behind the engine's linear layer `prefix`. `parts` is the engine's mapping of
        fused layers to their parts (packed_modules_mapping)."""
        parent, _, name = prefix.rpartition(".")
        # some of vLLM's model classes leave the fused gate_up layer out of their mapping
        known = parts if self.row is None else {FUSED_GATE_UP[0]: [*self.row.mlp.inner]} | parts
        names = known.get(name, [name]) if self.lacks(prefix) else [name]  # the trainer's layer may be fused as well
        shared = self.row is not None and self.row.attention.values_are_keys
        keys_twice = shared and names[-1:] == ["v_proj"] and self.lacks(f"{parent}.v_proj")
        modules = {path: self.module(path, prefix)
                   for path in (f"{parent}.{part}" for part in (names[:-1] if keys_twice else names))}
        loras = [lora_of(path, module, self.adapter) for path, module in modules.items()]
        self.linears[prefix] = BorrowedLinear(prefix, modules, self.copy.slot(prefix, loras), self.dtype, keys_twice)
        return self.linears[prefix]

    def routed(self, prefix: str) -> BorrowedExperts:
        """Return the trainer's experts behind the engine's experts or router; BorrowError if there are none."""
        path = prefix.rpartition(".")[0]
        if path not in self.blocks:
            lent = ", ".join(row.name for row in FAMILIES.values() if row.experts and row.vllm)
            raise BorrowError(f"{type(self.base).__name__} ({prefix}) is a mixture of experts that is not shared with "
                              f"vLLM, which would allocate its experts a second time, in 16 bits; those of {lent} are "
                              f"shared. {OTHER_ENGINE}")
        return self.experts.setdefault(path, BorrowedExperts(prefix, self.blocks[path]))

    def is_router(self, prefix: str) -> bool:
        """Return True if the engine's linear layer `prefix` is the router of an experts block."""
        parent, _, name = prefix.rpartition(".")
        return name == "gate" and parent in self.blocks

    def lacks(self, path: str) -> bool:
        parent, _, name = path.rpartition(".")
        return getattr(self.base.get_submodule(parent), name, None) is None

    def module(self, path: str, prefix: str) -> nn.Module:
        """Return the trainer's module at `path`, behind the engine's layer `prefix`; BorrowError if there is none."""
        try:
            return self.base.get_submodule(path)
        except AttributeError as error:
            raise BorrowError(f"{type(self.base).__name__} has no module {path}, which the engine's {prefix} stands "
                              f"for. {OTHER_ENGINE}") from error

    def embedding(self, prefix: str, head: bool) -> "BorrowedTable":
        """Return the trainer's embedding, or head, behind the engine's `prefix`; BorrowError if it has an adapter."""
        module: Any = self.base.get_output_embeddings() if head else self.base.get_input_embeddings()
        other = None if head or not prefix or self.lacks(prefix) else self.base.get_submodule(prefix)
        module = other if isinstance(other, nn.Embedding) else module  # some families have a second embedding
        name = next(path for path, own in self.base.named_modules() if own is module)
        if hasattr(module, "base_layer") or (prefix and not head and prefix != name):
            raise BorrowError(f"the engine's {prefix} is not the trainer's plain embedding {name} "
                              f"({type(module).__name__}). {OTHER_ENGINE}")
        self.tables[name] = BorrowedTable(name, module, self.adapter, self.of_base)
        return self.tables[name]

    def parameter(self, name: str, like: Tensor) -> Tensor:
        """Return the trainer's tensor of that name, to replace the engine's `like`; BorrowError if shape, dtype or
        device differ. A frozen vector that the engine wants in float32 (decays of a gated delta net) is copied."""
        theirs = tensor_at(self.base, name)
        if theirs is not None and theirs.ndim == 1 and like.dtype == torch.float32:
            self.others[name] = theirs.detach()
            theirs = theirs.detach().float()
        expected = (tuple(like.shape), like.dtype, like.device)
        got = None if theirs is None else (tuple(theirs.shape), theirs.dtype, theirs.device)
        if theirs is None or got != expected:
            raise BorrowError(f"{type(self.base).__name__}: the engine's parameter {name} {expected} has no "
                              f"counterpart in the trainer (there: {got}). {OTHER_ENGINE}")
        self.others.setdefault(name, theirs.detach())
        return theirs.detach()

    def check_complete(self) -> None:
        """Raise BorrowError if the trainer has weights that the engine did not ask for."""
        linears = tuple(f"{path}." for path in (*self.modules(), *self.experts, *self.tables))
        left = [name for name in (*dict(self.base.named_parameters()), *self.buffers)
                if name not in self.others and not name.startswith(linears)]
        if left:
            raise BorrowError(f"{type(self.base).__name__} has weights that the engine's model has no place for: "
                              f"{left[:5]}. {OTHER_ENGINE}")

    def widen(self) -> None:
        """Once all layers are known, dequantize their weights if that is wanted and memory has room."""
        if self.room is not None:
            products = [product for linear in self.linears.values() for product in linear.products]
            few = few_rows(self.base, self.device)
            self.wide = SamplingWeights(products, self.dtype, self.device, self.room, few)
            try:
                self.wide.fill()
            except (RuntimeError, MemoryError, BorrowError) as error:
                if not (isinstance(error, BorrowError) or is_out_of_memory(error)):
                    raise
                self.drop_weights()
                self.wide = None
                logger.warning("sampling with 4-bit weights: there is no room to dequantize them (%s)", error)

    # While the engine lives

    def check(self) -> None:
        """Raise BorrowError if the trainer's tensors are no longer those that the engine shares."""
        parts: list[BorrowedLinear | BorrowedTable] = [*self.linears.values(), *self.tables.values()]
        for part in parts:
            for path, module in part.modules.items():
                if self.module(path, part.name) is not module:
                    raise BorrowError(f"{path}: the trainer's module was replaced (an adapter was added or unloaded) "
                                      f"while an engine samples with it. {ADVICE}")
            part.check()
        for experts in self.experts.values():
            experts.check()
        for name, tensor in self.others.items():
            now = tensor_at(self.base, name)
            same_tensors(name, [tensor], [] if now is None else [now])
        adapters.check_same(self.copy.sampled, self.loras(self.adapter), str(self.adapter))

    def fill_weights(self) -> None:
        if self.wide is not None:
            self.wide.fill()

    def drop_weights(self) -> None:
        if self.wide is not None:
            self.wide.drop()

    def loras(self, name: str | None) -> Loras:
        return {prefix: [lora_of(path, module, name) for path, module in linear.modules.items()]
                for prefix, linear in self.linears.items()}

    def use_policy(self, base_model: bool) -> Hashable:
        """Make the engine compute with the current adapter or the base model; return a key for these weights."""
        name, off = adapters.active_in(self.modules())
        name = None if base_model or off else name
        tables = [table.use(name) for table in self.tables.values()]
        if name is None:
            self.copy.room.zero_()
            return "base"
        loras = self.loras(name)
        if name == self.adapter:
            return self.copy.use_adapter(loras), *tables
        adapters.check_fits(self.copy.sampled, loras, name)
        adapters.fill(self.copy.sampled, loras)
        return object()  # equal to no other identity, because these values are not tracked

    def modules(self) -> dict[str, nn.Module]:
        return {path: module for linear in self.linears.values() for path, module in linear.modules.items()}

    def close(self) -> None:
        self.drop_weights()
        self.wide = self.room = None
        parts: list[Any] = [*self.linears.values(), *self.experts.values(), *self.tables.values()]
        for part in parts:
            part.close()
        for held in (self.linears, self.experts, self.tables, self.others):
            held.clear()


class BorrowedTable(Borrowed):
    """The trainer's embedding or head behind an engine's. An adapter may train a copy of it, or rows, which are in the
    base's matrix. CUDA graphs freeze the addresses of a lookup, so tokens are looked up in both matrices, and the flag
    `of_base` selects. Logits are computed outside of graphs."""

    def __init__(self, name: str, module: Any, adapter: str | None, of_base: Tensor) -> None:
        self.name, self.modules, self.adapter, self.of_base = name, {name: module}, adapter, of_base
        self.base, self.copies = base_module(module), getattr(module, "modules_to_save", {})
        self.copy: Any = dict(self.copies).get(adapter)
        self.active = self.base  # or `copy`
        self.held = [weight.detach() for weight in self.tensors()]

    def tensors(self) -> list[Tensor]:
        return [module.weight for module in (self.base, self.copy) if module is not None]

    def use(self, adapter: str | None) -> tuple[int, int]:
        """Compute with this adapter, which is active, or with the base model (None); return what identifies the values
        that are trained. BorrowError for an adapter with a copy of its own, other than the engine's."""
        if adapter != self.adapter and adapter in self.copies:
            raise BorrowError(f"{self.name}: adapter {adapter!r} has a copy of its own, which an engine that started "
                              f"with {self.adapter!r} does not know. Pass model.load_lora(FOLDER) to fast_generate")
        self.of_base.fill_(adapter != self.adapter)
        self.active = self.base if adapter != self.adapter or self.copy is None else self.copy
        layer = getattr(self.modules[self.name], "token_adapter", None)
        if layer is not None:
            layer.restore() if adapter is None else layer.get_merged_weights(None)
        trained = self.active.weight if layer is None or layer.rows is None else layer.rows.values
        return trained.data_ptr(), trained._version

    def embed(self, ids: Tensor) -> Tensor:
        """Look up tokens (...), to (..., D) in the base's dtype."""
        rows = F.embedding(ids, self.base.weight)
        return rows if self.copy is None else torch.where(
            self.of_base, rows, F.embedding(ids, self.copy.weight).to(rows.dtype))

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (N, V) float32 of hidden states (N, D)."""
        weight, own = self.active.weight, getattr(self.active, "bias", None)
        logits = matmul_fp32(x.to(weight.dtype), weight.T)
        return logits if own is None else logits + own

    def close(self) -> None:
        self.base = self.copy = self.active = None
        self.modules, self.copies, self.held = {}, {}, []


def active_adapter(base: nn.Module) -> str | None:
    """Return the name of a model's active adapter, even while it is disabled; None if there is none."""
    modules = {path: module for path, module in base.named_modules() if hasattr(module, "base_layer")}
    return adapters.active_in(modules)[0]


def loras_of(base: nn.Module, name: str | None) -> list[LoRA]:
    """Return a model's LoRAs of that name; BorrowError if it has an adapter of another kind."""
    loras = [lora_of(path, module, name) for path, module in base.named_modules()
             if hasattr(module, "base_layer") and not isinstance(module, SharedRows)]
    return [lora for lora in loras if lora is not None]


def tensor_at(base: nn.Module, name: str) -> Tensor | None:
    """Return the parameter (possibly tied to another) or buffer of that name; None if there is none."""
    for get in (base.get_parameter, base.get_buffer):
        with suppress(AttributeError):
            return get(name)
    return None
