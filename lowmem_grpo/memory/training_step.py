"""The bytes of a training step at its peak moments: the tensors alive while a layer's MLP, attention or the head runs.

T packed tokens of a micro-batch, A padded tokens in attention, D hidden size, I inner size, R rows of an MLP tile; 16
bits per number, or 32 if `ModelShape.word` says so. A moment maps rows of a plan to the bytes alive beside weights,
adapters, gradients and optimizer.
"""

from dataclasses import dataclass

from lowmem_grpo.memory.cutting import mask_numbers
from lowmem_grpo.memory.families import FUSED
from lowmem_grpo.memory.layer_forms import BITS_16, ExpertForm
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import EMBEDDING, HEAD, RunSettings

BAND_BYTES = 64 * 2**20  # dequantized weights held at a time
PIECE = 2048  # rows of one expert that are computed together
GROUPED_ROWS = 64  # most rows per expert, on average, for which all experts are computed together
PAGE_BYTES = 4 * 2**20  # a page of host memory
RESIDENT = 2  # layer inputs on the device while the others are on the host; one if attention runs by groups of heads
FEATURES = "image features"
INPUTS, LAYER, TILE, CHUNK = "layer inputs", "layer recompute", "MLP tile", "logits chunk"
STATES, WORKSPACE, EXPERTS = "U and hidden states", "attention workspace", "experts at work"
GRADIENT = "matrix gradient"
CARD_ONLY = (WORKSPACE, EXPERTS)  # allocated within one operation, so not visible with fake tensors
NOTES = {
    INPUTS: "one of each layer", LAYER: "of the layer at work, or of all that keep everything",
    TILE: "gate, up, their gradients, a band of weights",
    FEATURES: "of a micro-batch's images, for the first layers",
    STATES: "of the trained tokens", CHUNK: "float32, of some tokens",
    GRADIENT: "of the head or the embedding, before it is added to that of earlier micro-batches",
    WORKSPACE: "fused attention's gradients in float32, of {} (estimated)",
    EXPERTS: "one expert dequantized, a piece of its rows, sums in float32 (estimated)",
}
Moment = dict[str, int]


@dataclass(frozen=True)
class StepShape:
    """The shape of one micro-batch, and the complete settings that determine its memory."""

    model: ModelShape
    settings: RunSettings
    tokens: int  # T
    area: int = 0  # A; 0 for a single sequence, which attention takes without padding

    @property
    def word(self) -> int:
        return self.model.word

    @property
    def by_groups(self) -> bool:
        """True if attention saves only q, k and v, and recomputes each group of heads for its gradient."""
        return (self.settings.head_groups or 1) > 1

    @property
    def group(self) -> float:
        """The share of the heads that is in the largest group; groups consist of whole key heads."""
        heads = self.model.kv_heads
        return -(-heads // min(self.settings.head_groups or 1, heads)) / heads

    @property
    def hidden(self) -> int:
        """The bytes of hidden states (T, D)."""
        return self.word * self.tokens * self.model.hidden

    @property
    def queries(self) -> int:
        """The bytes of queries (T, H K)."""
        return self.word * self.tokens * self.model.queries

    @property
    def keys(self) -> int:
        """The bytes of keys (T, H_kv K)."""
        return self.word * self.tokens * self.model.keys

    @property
    def laid(self) -> int:
        """The bytes of q, k, v, output and log-sums that attention saves: padded, unless there is a single sequence."""
        token = 2 * self.word * (self.model.queries + self.model.keys) + 4 * self.model.heads
        if self.by_groups:  # no log-sums; the packed output is saved by the next layer
            token -= 4 * self.model.heads + (self.word * self.model.queries if self.area else 0)
        return token * (self.area or self.tokens)

    @property
    def whole_layers(self) -> int:
        """The number of layers that keep all they compute. Backward begins with them, so the step's peak is in them."""
        return self.settings.kept_layers or 0 if self.settings.checkpointing else self.model.layers

    @property
    def tile(self) -> int:
        """The tokens in a tile of the MLP at the peak; 0 without tiles, or if some layers keep all they compute."""
        return 0 if self.settings.checkpointing and self.settings.kept_layers else self.settings.mlp_tile or 0

    @property
    def angles(self) -> int:
        """The bytes that all layers share: cosines and sines (T, K) of the positions, and the sliding-window mask."""
        return self.word * (self.tokens * self.model.for_all_layers + mask_numbers(self.model.window, self.tokens))

    def trains(self, name: str) -> bool:
        """Return whether the embedding or the head is trained whole; a tied matrix is both."""
        return bool(self.settings.modules_to_save) if self.model.tied else name in self.settings.modules_to_save

    def moments(self) -> dict[str, Moment]:
        """Return the live bytes at each moment that may be the peak of a step."""
        moments = {"MLP backward": self.mlp(), "attention backward": self.attention(),
                   "attention forward": self.attention_forward(), "head": self.head()}
        if self.trains(EMBEDDING) and (self.model.tied or not self.settings.host_embedding):
            moments["embedding backward"] = {LAYER: 2 * self.hidden + self.angles}
        for name, moment in moments.items():  # of a tied matrix, the head's gradient waits for the embedding's
            of_head = self.trains(HEAD) and (name == "head" or self.model.tied)
            if count := of_head + (name == "embedding backward"):
                moment[GRADIENT] = count * self.settings.saved_itemsize * self.model.vocabulary * self.model.hidden
        return moments

    def inputs(self) -> int:
        """Return the bytes of the inputs of recomputed layers that are kept on the device."""
        recomputed = self.model.layers - self.whole_layers
        if not recomputed or self.settings.checkpointing != "offload":
            return self.hidden * recomputed
        return self.hidden * (1 if self.by_groups else RESIDENT)

    def host(self) -> int:
        """Return the bytes of layer inputs on the host, in whole pages, with the final norm's saved tensors."""
        if self.settings.checkpointing != "offload" or self.whole_layers == self.model.layers:
            return 0
        pages = -(-self.hidden // PAGE_BYTES)
        return (self.model.layers - self.whole_layers + 2) * pages * PAGE_BYTES

    def attention_saved(self) -> int:
        """Return the bytes that attention saves: normed input, q, k, v, output; with padding also the packed output."""
        kept = self.hidden + self.laid + (self.queries if self.area else 0)
        alone = not self.area and not self.by_groups
        if mask_numbers(self.model.window, self.tokens) and alone:  # outputs by block, and concatenated
            kept += self.word * self.model.queries * (self.area or self.tokens)
        if self.model.per_layer:  # Gemma 4: inputs of the norms after attention and MLP, and per-layer embeddings
            kept += 2 * self.hidden + 3 * self.word * self.tokens * self.model.per_layer
        if self.model.family.attention.norm:
            kept += self.queries + self.keys + 4 * self.tokens * (self.model.heads + self.model.kv_heads)
        if self.model.family.attention.inner == FUSED and not self.area:
            kept += (1 if self.by_groups else 2) * self.queries + self.keys  # v holds all of q, k, v; output copied
        return kept

    def attention_waits(self) -> int:
        """Return the part of `attention_saved` that is alive during the backward pass of what follows attention.
        Attention by groups of heads computes q, k and v again, so it does not count them."""
        if not (self.by_groups and self.model.family.attention.lean):
            return self.attention_saved()
        others = 2 * self.hidden + 3 * self.word * self.tokens * self.model.per_layer if self.model.per_layer else 0
        return self.hidden + self.queries + others  # normed input, output

    def saved(self) -> int:
        """Return the bytes that a layer saves for its backward pass besides its input."""
        mlp = 0 if self.tile else 2 * self.word * self.tokens * self.model.inner  # gate and up
        if self.model.experts is not None:  # probabilities, gate values, their sum, ids twice
            mlp = self.tokens * (4 * self.model.experts.count + (4 + 4 + 8 + 8) * self.model.experts.taken)
        net, delta = 0, self.model.delta
        if delta is not None:  # its normed input, three of the convolution, and the gated norm's
            net = self.hidden + self.tokens * (3 * self.word * delta.mixed + (3 * 4 + 2 * self.word) * delta.values)
        return max(self.attention_waits(), net) + 2 * self.hidden + mlp

    def layers_kept(self) -> int:
        """Return the bytes saved by all layers that keep everything, or else by the one that is being recomputed."""
        return self.whole_layers * (self.saved() + self.hidden) if self.whole_layers else self.saved()

    def mlp(self) -> Moment:
        """Return the moment of an MLP's backward pass: a tile's gate, up and shared gradient, or experts' workspace."""
        if self.model.experts is not None:
            pairs = (4 + self.word) * self.expert_pairs()  # gradients in float32, and copies
            grads = 2 * self.hidden + max(self.hidden, pairs)  # the router's gradient of x comes later
            return {INPUTS: self.inputs(), LAYER: self.layers_kept() + grads + self.angles,
                    EXPERTS: self.at_experts(self.model.experts)}
        rows = min(self.tile or self.tokens, self.tokens)
        inner, row_hidden = self.word * rows * self.model.inner, self.word * rows * self.model.hidden
        lora = 4 * self.settings.lora_rank * 3 * (self.model.inner + self.model.hidden)
        at_work = (3 if self.tile else 1) * inner + 2 * row_hidden  # without tiles, gate and up are saved anyway
        grads = self.hidden * (2 if self.tile else 1)  # the output's, and with tiles the input's as it fills
        tile = at_work + lora + self.band()
        return {INPUTS: self.inputs(), LAYER: self.layers_kept() + grads + self.angles, TILE: tile}

    def expert_pairs(self) -> int:
        """Return the numbers of LoRA on all experts of a layer."""
        stacks = (linear for linear in self.model.linears() if linear.experts > 1 and self.settings.expert_lora)
        return self.settings.lora_rank * sum(stack.experts * (stack.rows + stack.columns) for stack in stacks)

    def at_experts(self, experts: ExpertForm) -> int:
        """Return the bytes of `routed_experts` in its backward pass. Expert by expert, these are float32 sums, the
        order of rows, a dequantized expert, and gate, up and gradients for a piece of its rows. Grouped, on a GPU, they
        are gate, up and gradients for all rows. LoRA adds two copies of B by expert, of one in 16 bits."""
        rows, hidden, inner = min(PIECE, self.tokens), self.model.hidden, experts.inner
        sums = self.tokens * (4 * hidden + 3 * 8 * experts.taken)
        rank = self.settings.lora_rank * self.settings.expert_lora
        sums += (4 + self.word) * experts.count * rank * (2 * inner + hidden)
        one_by_one = sums + 3 * self.word * hidden * inner + rows * (5 * self.word * inner + 3 * self.word * hidden)
        places = self.tokens * experts.taken
        if places > GROUPED_ROWS * experts.count:
            return one_by_one
        return max(one_by_one, places * (3 * 8 + 8 * self.word * inner + self.word * hidden))

    def attention(self) -> Moment:
        """Return the moment of attention's backward pass: gradients of its output, q, k and v; on a GPU first in
        float32, for all query heads."""
        of_laid = 2 * self.word * (self.model.queries + self.model.keys) * (self.area or self.tokens)
        grads = self.hidden + of_laid - (self.queries if self.area else 0)  # the packed output has been freed
        mlp_done = self.saved() - self.attention_waits()
        again = self.attention_saved() - self.attention_waits()
        queries = self.word * self.model.queries * (self.area or self.tokens)
        shared, masked = self.model.heads != self.model.kv_heads, mask_numbers(self.model.window, self.tokens)
        workspace = ((6 if masked else 4) if shared else 2) * queries  # masked: copies of k and v for all heads
        if self.by_groups:  # the output has been freed; a group has its own output and gradients
            grads += int(self.group * of_laid) - (0 if self.area else self.queries)
            workspace = int(self.group * workspace)
        return {INPUTS: self.inputs(), LAYER: self.layers_kept() - mlp_done + again + grads + self.angles,
                WORKSPACE: workspace}

    def attention_forward(self) -> Moment:
        """Return the moment of attention while its layer is recomputed: packed q, k and v beside the padded ones."""
        packed = self.queries + 2 * self.keys if self.area else 0
        if self.model.family.attention.inner == FUSED and self.area:
            packed += self.queries + self.keys  # copies of q and k after RoPE
        others = self.layers_kept() - self.saved()
        kept = others + self.attention_saved() + packed + 2 * self.hidden  # the residual, and the output projection
        features = {FEATURES: self.features()} if self.model.vision is not None else {}
        return {INPUTS: self.inputs(), LAYER: kept + self.angles, TILE: self.band(), **features}

    def features(self) -> int:
        """Return the bytes of the features of a micro-batch's images, which its forward pass looks up."""
        levels = 1 + (self.model.vision.levels if self.model.vision is not None else 0)
        prompts = max(1, self.tokens // self.settings.context)
        return levels * self.word * self.model.hidden * min(self.tokens, prompts * self.settings.image_tokens)

    def head(self) -> Moment:
        """Return the moment of the output head: trained hidden states, U, and a chunk of logits in float32. If the head
        is trained, its backward pass has a float32 gradient in place of U, and logits and gradient of a tile of it."""
        chunk = min(self.settings.chunk_rows or self.tokens, self.tokens)
        logits = 4 * chunk * self.model.vocabulary * self.settings.logits
        kept = self.angles + (self.layers_kept() if self.whole_layers else 0)
        if not self.trains(HEAD):
            return {INPUTS: self.inputs(), LAYER: kept, STATES: 2 * self.hidden, CHUNK: logits}
        rows = min(self.settings.chunk_rows or self.tokens, self.tokens + self.model.hidden)
        tile = max(4 * rows * self.model.vocabulary, self.hidden)  # at the end hidden's gradient is rounded
        states = (self.settings.saved_itemsize + 4) * self.hidden // self.word
        return {INPUTS: self.inputs(), LAYER: kept, STATES: states, CHUNK: tile}

    def band(self) -> int:
        """Return the most bytes of weights that are dequantized at a time."""
        form = self.settings.form
        largest = self.word * max(sum(linear.weights for linear in group if linear.form_in(form) != BITS_16)
                                  for group in self.model.groups())
        return largest // max(1, -(-largest // BAND_BYTES))
