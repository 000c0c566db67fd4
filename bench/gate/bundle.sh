#!/usr/bin/env bash
# bundle.sh TOOLS OUT: what a GPU machine without a network lacks, packed into OUT: vLLM with its companions,
# bitsandbytes and datasets (TOOLS/offline_bundle.py), the peers that are pure Python, and the commit. Unsloth is left
# out: its wheels (30 MiB) do not fit, and they need an older TRL and datasets, xformers, torchao and diffusers.
# The bundle has parts of at most PART MiB. Fails where the tracked files, one part and the rest of OUT are together
# larger than LIMIT MiB, which is what can be copied at a time.
set -euo pipefail
tools=$1 out=$2
limit=${LIMIT:-64}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
if [ ! -f "$tools/offline_bundle.py" ]; then
    echo "no offline_bundle.py in $tools: name its folder, as in make gpu-bundle GPU_TOOLS=FOLDER" >&2
    exit 2
fi
mkdir -p "$out/wheels"
if [ ! -f "$out/parts/manifest.json" ]; then
    "$python" "$tools/offline_bundle.py" build --part-mib "${PART:-30}" --out "$out/parts"
fi
"$python" -m pip download --quiet --no-deps --dest "$out/wheels" \
    trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
cp "$tools/offline_bundle.py" "$out/"
changed=$(git status --porcelain -- lowmem_grpo)
if [ -n "$changed" ]; then
    echo "lowmem_grpo/ has uncommitted changes: what passes there will not be taken as done by the next call" >&2
fi
echo "$(git rev-parse --short=12 HEAD)${changed:++changes}" > "$out/commit"
bytes() { find "$@" -type f -print0 | xargs -0 cat | wc -c; }
beside=$(( $(git ls-files -z | xargs -0 cat | wc -c) + $(bytes "$out") - $(bytes "$out/parts") ))
for part in "$out"/parts/part*; do
    bytes=$(( beside + $(bytes "$part") ))
    echo "tracked files and bundle with $(basename "$part"): $(( (bytes + 1048575) / 1048576 )) MiB of $limit"
    if [ "$bytes" -gt $(( limit * 1048576 )) ]; then
        echo "remove $out/parts, and pack smaller ones with PART=MIB" >&2
        exit 1
    fi
done
