"""The stages of the gate and their commands; bench.py holds the order in which they run.

The `least` of a piece is an estimate for an H200, made from the bytes and operations that it needs, the time that
libraries take to start, and rows of an H100. Most have not been measured yet.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.smoke.variants import VARIANTS

BENCH = Path(__file__).resolve().parents[1]
TESTS = BENCH.parent / "tests"
LONGEST = 600  # seconds that a piece may take at most
PATIENT = 3 * LONGEST  # on a pretend card, where a machine of two cores may have other work
CARD, PRETEND, CPU = "card", "pretend", "cpu"  # full size; full size only where memory is measured; tiny
# a test file that holds tests marked `gpu`, and one that holds some with vLLM
ON_A_CARD = re.compile(r"^from card import .*\b(gpu|DEVICES|on_both)\b|mark\.gpu", re.MULTILINE)
WITH_VLLM = re.compile(r"NEEDS_VLLM|mark\.vllm")
MEMORY_MODEL = ("--shape", "llama-3.1-8b", "--context", "20480")
WHOLE = ("--stage", "+ 8-bit optimizer", "--stage", "+ host embedding")
KERNEL_OPS = ("linear_logprobs", "linear_divergence", "nf4_linear", "nf4_dequantize", "fp8_linear", "fp8_dequantize",
              "rms_norm", "add_rms_norm", "rope", "swiglu", "geglu")
FEW_PROBLEMS = ("eval_problems=8", "train_size=16", "per_device_train_batch_size=8", "num_generations=4",
                "gradient_accumulation_steps=1")  # for runs that need not learn anything
LARGE = ("linear_logprobs", "nf4_linear", "fp8_linear")  # ops with many providers, or many shapes


@dataclass(frozen=True)
class Piece:
    """A command that runs in a separate process. It is skipped, with a reason, unless the facts meet its `needs`."""

    name: str
    command: tuple[str, ...]  # what follows the interpreter
    seconds: int = LONGEST
    least: int = 60  # seconds it is expected to take on a card; with less time left it is not begun
    needs: tuple[str, ...] = ()
    junit: bool = False  # pytest writes a report that decides whether it passed
    weighs: bool = False  # it measures the allocator's peaks
    sleeps: bool = False  # it measures the memory that vLLM frees when it sleeps


@dataclass(frozen=True)
class Setup:
    """The settings with which the pieces run."""

    form: str  # CARD, PRETEND or CPU
    out: Path  # logs, reports and the pieces' own results
    results: Path  # rows
    weights: Path  # made once, used by several stages
    run: str  # the same in all rows of one gate
    facts: dict[str, Any] = field(default_factory=dict)  # what environment.py found; empty before it has run

    @property
    def device(self) -> str:
        return "cpu" if self.form == CPU else "cuda"

    @property
    def shape(self) -> str:
        return "full" if self.form == CARD else "tiny"

    def sizes(self, shape: str) -> tuple[str, ...]:
        """Return the options for a device and for random weights: those of `shape` on a card, else tiny ones."""
        name = shape if self.form == CARD else self.shape
        return "--device", self.device, "--shape", name, "--weights", str(self.weights / name)

    def rows(self, name: str) -> tuple[str, str]:
        """Return the option for a results file."""
        return "--output", str(self.results / f"{name}.jsonl")


Stage = Callable[[Setup], list[Piece]]


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a module in bench/."""
    return ("-m", f"bench.{name}", *arguments)


def environment(setup: Setup) -> list[Piece]:
    """Return the piece that reports what this machine has, what works, and how fast it copies and multiplies."""
    small = ("--small",) if setup.form != CARD else ()
    return [Piece("environment", script("gate.environment", "--device", setup.device, *small,
                                        *setup.rows("environment")), 180 if setup.form == CARD else LONGEST, 20)]


def tests(setup: Setup) -> list[Piece]:
    """Return pieces for all tests marked `gpu`, file by file: the package, vLLM (one engine at a time), kernels; and
    for a few steps of a trainer in every variant."""
    if setup.form == CPU:  # marked tests are skipped here; it is enough that they can be collected
        few = [smoke(setup, name, "--steps", "1") for name in ("vllm", "4-bit")]
        return [selected(setup, "kernels", "gpu", TESTS / "kernels" / "test_rms_norm.py"), *few]
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if ON_A_CARD.search(path.read_text())]
    kernels = [path for path in files if path.parent.name == "kernels"]
    package = [path for path in files if path not in kernels]
    bare, vllm = ("bitsandbytes",), ("bitsandbytes", "vllm")
    return [
        *(selected(setup, "vllm", "gpu and vllm", path, needs=vllm, least=120) for path in package
          if WITH_VLLM.search(path.read_text())),
        *(selected(setup, "package", "gpu and not vllm", path, needs=bare) for path in package
          if "vllm" not in str(path.relative_to(TESTS))),  # every test there needs vLLM
        *(smoke(setup, name) for name in VARIANTS if setup.form == CARD or "vllm" in name),  # see `rollout`
        *(selected(setup, "kernels", "gpu", path, workers=6 if setup.form == CARD else 0) for path in kernels),
    ]


def selected(
    setup: Setup, group: str, mark: str, path: Path, workers: int = 0, needs: tuple[str, ...] = (), least: int = 45
) -> Piece:
    """Return the piece that runs the tests in a file that have these marks."""
    file = ".".join(path.relative_to(TESTS).with_suffix("").parts).replace("test_", "")
    name = f"{group} {file.removeprefix('kernels.')}"
    options = ("-m", "pytest", "-m", mark, "-n", str(workers), "-p", "no:cacheprovider",
               f"--junitxml={setup.out / name}.xml")
    return Piece(f"tests/{name}", (*options, str(path)), least=least, needs=needs, junit=True)


def smoke(setup: Setup, variant: str, *options: str) -> Piece:
    """Return the piece that runs one variant of smoke/bench.py."""
    vllm = variant.startswith("vllm")
    command = ("--device", setup.device, "--variant", variant, *options, *setup.rows("card_smoke"))
    return Piece(f"tests/smoke {variant}", script("smoke.bench", *command), 300, 80 if vllm else 40,
                 ("bitsandbytes", *(("vllm",) if vllm else ())), sleeps=vllm)


def kernels(setup: Setup) -> list[Piece]:
    """Return pieces that measure each kernel, its reference and its peers; in float16 on a card without bfloat16."""
    common = ("--device", setup.device, "--shapes", setup.shape, *setup.rows("kernels"))
    if setup.form == CPU:
        quick = ("--ops", "rms_norm,nf4_linear", "--dtype", "float32", "--rounds", "2")
        return [Piece("kernels/all", script("kernels.bench", *common, *quick), needs=("bitsandbytes",))]
    dtype = () if setup.facts.get("bf16", True) else ("--dtype", "float16")
    return [
        Piece(f"kernels/{op}", script("kernels.bench", *common, "--ops", op, *dtype), least=60 if op in LARGE else 40,
              needs=("bitsandbytes",) if op.startswith("nf4") else ())
        for op in KERNEL_OPS
    ]


def memory(setup: Setup) -> list[Piece]:
    """Return pieces for a step of an 8B model in 16 and 24 GiB, its longest context there, and each feature alone."""
    rows, longest = setup.rows("memory"), setup.rows("longest_context")
    if setup.form == CPU:
        small = ("--shape", "qwen2.5-1.5b")
        return [
            Piece("memory/step", script("memory.bench", *small, "--context", "256", *WHOLE[:2], *rows)),
            Piece("memory/longest", script("memory.longest_context", *small, "--gib", "2", "--trials", "1", *longest)),
        ]

    def needs(gib: int) -> tuple[str, ...]:
        return "bitsandbytes", "bf16", f"card_gib:{gib}", "host_gib:14"

    steps = [
        Piece(f"memory/step-{gib}", script("memory.bench", "--device", "cuda", *MEMORY_MODEL, *WHOLE, "--gib", str(gib),
                                           *rows), least=90, needs=needs(gib), weighs=True) for gib in (16, 24)
    ]
    searches = [
        Piece(f"memory/longest-{gib}", script("memory.longest_context", "--device", "cuda", "--gib", str(gib),
                                              *longest),
              least=350, needs=(*needs(gib)[:3], "host_gib:48"), weighs=True) for gib in (16, 24)
    ]
    if setup.form == PRETEND:  # one trial: its host memory is real
        trial = script("memory.longest_context", "--device", "cuda", "--gib", "16", "--trials", "1", "--start", "8192",
                       *longest)
        return [*steps, Piece("memory/longest-16", trial, needs=needs(16), weighs=True)]
    ladder = script("memory.bench", "--device", "cuda", *MEMORY_MODEL, *rows)
    return [*steps, *searches, Piece("memory/features", ladder, least=200, needs=(*needs(40)[:3], "host_gib:56"))]


def rollout(setup: Setup) -> list[Piece]:
    """Return pieces that compare our engine on the trainer's weights with vLLM: speed, bytes, agreement, sleep."""
    seconds = {"lowmem_grpo": 150, "vllm_bf16_lora": 120, "vllm_bnb_lora": 120, "lowmem_grpo_eager": 120,
               "transformers": 300}  # the first one makes the weights
    # from a pretend card, our own engine reads that no row has ended: no piece that samples with it can finish there
    left_out = ("transformers",) if setup.form == PRETEND else ()
    chosen = [name for name in seconds if name not in left_out] if setup.form != CPU else ["lowmem_grpo"]
    return rollouts_of(setup, {name: seconds[name] for name in chosen})


def rollouts_of(setup: Setup, seconds: dict[str, int], stage: str = "rollout", shape: str = "full") -> list[Piece]:
    """Return pieces for providers of the rollout benchmark; `seconds` is the time that each takes at least."""
    common = (*setup.sizes(shape), "--run", setup.run, "--rounds", "1", *setup.rows("rollout"))
    needs = ("bitsandbytes", "bf16", "vllm")
    room = (f"card_gib:{40}", "disk_gib:20", "host_gib:20") if setup.form == CARD else ()
    return [Piece(f"{stage}/{name}", script("rollout.bench", *common, "--provider", name), least=least,
                  needs=(*needs, *(("vllm_bnb",) if name == "vllm_bnb_lora" else ()), *room), sleeps=True)
            for name, least in seconds.items()]


def switches(setup: Setup) -> list[Piece]:
    """Return pieces that measure the switches of docs/rollouts.md: the KV cache in 8 bits on the shape of the rollouts;
    training while sampling with the model in the package; CUDA graphs of our own engine on a tiny shape."""
    quick = () if setup.form == CARD else ("--rounds", "1")
    small = ("--prompts", "8", "--tokens", "64") if setup.form == CPU else ()
    overlap = {"overlap": (), "overlap chains": ("--mixture", "chains"), "overlap vllm": ("--engine", "vllm")}
    sampled = rollouts_of(setup, {"lowmem_grpo_fp8_cache": 130}, "switches")
    graphs = Piece("switches/graphs", script(
        "rollout.bench", "--device", setup.device, "--shape", "tiny", "--weights", str(setup.weights / "tiny"),
        "--provider", "transformers", "--provider", "transformers_eager", *(("--rounds", "2") if quick else ()),
        *setup.rows("rollout")), least=90, needs=("bitsandbytes", "bf16"))
    chosen = {CPU: ["overlap chains"], PRETEND: ["overlap vllm"]}.get(setup.form, [*overlap])
    return [*sampled, *([] if setup.form == PRETEND else [graphs]), *(  # see `rollout`
        Piece(f"switches/{name}", script("loop.overlap", *words, *quick, *small, *setup.rows("overlap")), least=90,
              needs=("bf16", "vllm") if "vllm" in words else ())
        for name, words in overlap.items() if name in chosen)]


def loop(setup: Setup) -> list[Piece]:
    """Return pieces that time a step of the whole loop and its parts, and two ranks that share the card."""
    ranks = script("ranks", "scaling", "--rounds", "1", *setup.rows("ranks_scaling"))
    shared = [] if setup.form == PRETEND else [Piece("loop/ranks", ranks, least=60)]
    return [loop_piece(setup, "loop", "lowmem_grpo", 175), *shared]


def rivals(setup: Setup) -> list[Piece]:
    """Return pieces for a step of a 3B model, 8 prompts x 8 completions of 202 tokens: ours with vLLM, with our own
    engine in 16 bits, and peers with micro-batches of 8; then sampling alone."""
    seconds = {"lowmem_grpo": 60, "trl": 140, "lowmem_grpo_16bit": 50, "trl_nf4": 140, "unsloth": 130}
    chosen = {CPU: ["lowmem_grpo_16bit"], PRETEND: [name for name in seconds if name != "lowmem_grpo_16bit"]}
    many = ("--prompts", "8", "--peer-batch", "8", "--steps", "2") if setup.form != CPU else ("--steps", "1")
    steps = [loop_piece(setup, "rivals", name, seconds[name], "3b", *many) for name in chosen.get(setup.form, seconds)]
    sampling = {"vllm_bf16_lora": 80, "lowmem_grpo": 50} if setup.form == CARD else {}
    return [*steps, *rollouts_of(setup, sampling, "rivals/sampling", "3b")]


def peers(setup: Setup) -> list[Piece]:
    """Return pieces for the same step by installed peers; those without vLLM, which take minutes a step, come last."""
    chosen = {CPU: ["trl_transformers"], PRETEND: [name for name in PEERS if name != "lowmem_grpo_transformers"]}
    return [loop_piece(setup, "peers", name, 450 if name.endswith("transformers") else 220)
            for name in chosen.get(setup.form, PEERS)]  # see `rollout`


def loop_piece(setup: Setup, stage: str, provider: str, least: int, shape: str = "full", *options: str) -> Piece:
    """Return the piece for one provider's steps of the whole loop, by default one. The provider stops before the piece
    is stopped, and leaves the row of the steps that it has made."""
    common = (*setup.sizes(shape), "--run", setup.run, *(options or ("--steps", "1")), *setup.rows("loop"))
    room = ("card_gib:24", "disk_gib:20", "host_gib:20") if setup.form == CARD else ()
    limit = {CARD: min(LONGEST, 100 + 2 * least), PRETEND: PATIENT, CPU: LONGEST}[setup.form]
    return Piece(f"{stage}/{provider}", script("loop.bench", *common, "--time-limit", str(limit - 30), "--provider",
                                               provider),
                 min(limit, LONGEST), least, needs=("bf16", *(PEERS | OURS)[provider], *room))


OURS = {"lowmem_grpo": ("bitsandbytes", "vllm"), "lowmem_grpo_16bit": ("bitsandbytes",)}
PEERS = {"trl": ("trl", "vllm"), "trl_nf4": ("trl", "vllm", "bitsandbytes", "vllm_bnb"), "unsloth": ("unsloth",),
         "trl_transformers": ("trl",), "lowmem_grpo_transformers": ("bitsandbytes",)}


def learner(setup: Setup) -> list[Piece]:
    """Return pieces in which the embedded model learns two recipes with NF4, CUDA graphs, offload and packing."""
    engine = "transformers" if setup.form == CPU else "vllm"
    words = ("gpu=cpu", "load_in_4bit=true", f"engine={engine}", "gradient_checkpointing_mode=offload",
             "save_strategy=no", *(FEW_PROBLEMS if setup.form != CARD else ()))
    command = ("--runs", str(setup.out / "learner"), *(word for given in words for word in ("--option", given)),
               *(("--must-rise",) if setup.form == CARD else ("--steps", "2")), *setup.rows("card_learning"))
    needs = ("bitsandbytes", "datasets", "bf16") + (("vllm",) if setup.form != CPU else ())
    return [Piece(f"learner/{recipe}", script("learning.recipe_runs", *command, "--recipes", recipe), least=250,
                  needs=needs) for recipe in ("arithmetic", "proximity")[: 1 if setup.form == CPU else 2]]


def profile(setup: Setup) -> list[Piece]:
    """Return pieces that profile a training step and decoding: kernels, idle gaps, and copies that overlap kernels."""
    options = setup.sizes("full")
    needs = ("bitsandbytes", "bf16") + (("vllm",) if setup.form != CPU else ())
    def piece(name: str, *parts: str) -> Piece:
        chosen = [word for part in parts for word in ("--part", part)]
        return Piece(f"profile/{name}", script("profiles", *options, *chosen, "--output",
                                               str(setup.out / "profile")), needs=needs)

    host = [Piece("profile/host", script("rollout.host", "--engine", "vllm"), needs=("vllm",))]
    return [piece("both")] if setup.form == CPU else [*(piece(part, part) for part in ("decode", "train")),
                                                      *(host if setup.form == CARD else [])]


STAGES: dict[str, Stage] = {
    "environment": environment, "rivals": rivals, "kernels": kernels, "memory": memory, "rollout": rollout,
    "loop": loop, "switches": switches, "profile": profile, "learner": learner, "peers": peers, "tests": tests,
}
