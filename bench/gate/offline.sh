#!/usr/bin/env bash
# offline.sh [OPTIONS OF bench.py]: on a GPU machine without a network that has torch, unpack the bundle beside its
# packages (SITE, 5 s) and run the gate. Where only a part of the bundle has been copied, unpack it, name the parts that
# are missing, and exit with 3. The archive gate.tgz of an earlier call, if it is here, is unpacked first.
set -euo pipefail
cd "$(dirname "$0")/../.."
bundle=.gpu-bundle site=${SITE:-/tmp/lowmem_grpo_site}
python=${PYTHON:-python3}
if [ ! -f "$site/ready" ]; then
    "$python" $bundle/offline_bundle.py install --complete --parts $bundle/parts/part* --site "$site"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" $bundle/wheels/*.whl
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . ||
        echo "the package could not be installed (see above): it is used from here, by PYTHONPATH" >&2
    touch "$site/ready"
fi
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
[ ! -f gate.tgz ] || tar xzf gate.tgz
exec "$python" -m bench.gate.bench --pack gate.tgz "$@"
