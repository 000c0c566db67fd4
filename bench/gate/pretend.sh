#!/usr/bin/env bash
# pretend.sh TOOLS BUNDLE DIR: an environment of Python 3.12 with a CUDA build of torch (several GB) and a pretend card
# (TOOLS/null_cuda) in DIR. DIR/run PROGRAM runs a program there, with the package of the tree that it is called in.
# It holds torch 2.11 and what BUNDLE packs beside it, or where BUNDLE is "pip", what `pip install ".[vllm,rewards]"` brings.
set -euo pipefail
tools=$1 bundle=$2 dir=$3
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON312:-python3.12}
export PYENV_VERSION=${PYENV_VERSION:-3.12}  # where pyenv stands in for Python, it must be told which
mkdir -p "$dir"
dir=$(cd "$dir" && pwd) site=$dir/site
packages=$dir/env/lib/python3.12/site-packages
[ -x "$dir/env/bin/python" ] || "$python" -m venv "$dir/env"
tests="pytest pytest-timeout pytest-xdist hypothesis"
if [ ! -f "$dir/env/ready" ] && [ "$bundle" = pip ]; then
    "$dir/env/bin/pip" install --quiet "$here/../..[vllm,rewards]" $tests trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
    "$dir/env/bin/pip" uninstall --quiet --yes lowmem-grpo  # PYTHONPATH names the tree that is run
    touch "$dir/env/ready"
elif [ ! -f "$dir/env/ready" ]; then
    "$dir/env/bin/pip" install --quiet torch==2.11.0 transformers==5.17.0 peft accelerate click rich $tests \
        pyarrow pandas xxhash aiohttp cloudpickle prometheus-client protobuf \
        sentencepiece tiktoken pillow requests psutil einops setuptools uvloop ninja py-cpuinfo jsonschema \
        narwhals torchvision==0.26.0
    touch "$dir/env/ready"
fi
if [ ! -f "$dir/device/ready" ]; then
    "$dir/env/bin/pip" install --quiet --no-deps "nvidia-cuda-crt==13.0.*"  # headers
    mkdir -p "$site"
    if [ "$bundle" != pip ]; then
        "$dir/env/bin/python" "$bundle/offline_bundle.py" install --parts "$bundle"/parts/part* --site "$site"
        "$dir/env/bin/pip" install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$bundle"/wheels/*.whl
    fi
    cp -r "$tools/null_cuda" "$dir/source" && chmod -R u+w "$dir/source"
    renamed() {  # FILE MORE NAME...: FILE with these names renamed, then MORE, which defines them
        { for name in "${@:3}"; do echo "#define $name replaced_$name"; done; cat "$1" "$2"; } > "$1.new"
        mv "$1.new" "$1"
    }
    renamed "$dir/source/runtime.c" "$here/more_runtime.c" cudaMemcpy cudaMemcpyAsync
    renamed "$dir/source/driver.c" "$here/more_driver.c" cuGetErrorString cuMemUnmap
    "$dir/env/bin/python" "$dir/source/build.py" --site "$packages" "$site" --out "$dir/device" \
        --cuda-include "$packages/nvidia/cu13/include"
    # vLLM's sleep mode opens the runtime by its path, and must find the pretend one there, torchvision's copy too
    for copy in "$packages"/nvidia/cu13/lib/libcudart.so.13 "$packages"/torchvision.libs/libcudart.*.so.13; do
        ln -sf "$dir/device/libcudart.so.13" "$copy"
    done
    touch "$dir/device/ready"
fi
cat > "$dir/run" <<END
#!/usr/bin/env bash
source "$dir/device/env.sh"
export PYTHONPATH="\$PWD:$site" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_V2_MODEL_RUNNER=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
null_cuda "$dir/env/bin/python" "\$@"
END
chmod +x "$dir/run"
