#!/usr/bin/env bash
# Collect the kernels that benches compare with in a folder for DSV4_PEERS, about 60 MB:
#     scripts/peers.sh FOLDER [PYTHON_VERSION]
# FlashMLA and DeepGEMM are vLLM's copies. SGLang's kernels bring the modules that they import.
set -euo pipefail
target=${1:?usage: scripts/peers.sh FOLDER [PYTHON_VERSION]}
folder=$(mkdir -p "$target" && cd "$target" && pwd)
version=${2:-3.12}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
abi=cp${version/./}
platforms=()
for name in manylinux_2_34 manylinux_2_28 manylinux2014 manylinux_2_17; do
    platforms+=(--platform "${name}_x86_64")
done
pip download --quiet --no-deps --dest "$wheels" --python-version "$version" --implementation cp \
    --abi "$abi" --abi abi3 --abi none --only-binary=:all: "${platforms[@]}" --platform any \
    vllm==0.26.0 sglang==0.5.23 apache-tvm-ffi==0.1.11 ipython==9.18.1 traitlets==5.16.1 \
    pyzmq==27.3.0 msgspec==0.22.0 orjson==3.13.0 pybase64==1.5.1 starlette==1.10.0 \
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
cd "$wheels"
unzip -qo vllm-*.whl vllm/_flashmla_C.abi3.so 'vllm/third_party/deep_gemm/*' -d "$folder"
find "$folder/vllm" -name '_C.cpython-*.so' ! -name "*cpython-${version/./}-*" -delete
unzip -qo sglang-*.whl 'sglang/*.py' '*.cuh' '*.h' '*.dist-info/METADATA' -d "$folder"
(
    cd "$folder/sglang"
    rm -rf multimodal_gen test benchmark kernels/kda_kernels
    find srt -mindepth 1 -maxdepth 1 -type d \( -false $(printf -- '-o -name %s ' arg_groups \
        compilation distributed elastic_ep layers model_executor observability platforms plugins \
        utils) -o -exec rm -rf {} + \)
    find srt/layers -type f ! -name __init__.py ! -path '*/dsa/utils.py' ! -name dp_attention.py \
        ! -name mqa_logits_utils.py -delete
    find kernels/jit/csrc -type f ! -path '*/deepseek_v4/*' ! -path '*/occupancy/*' -delete
    find kernels/ops -mindepth 2 -type f ! -name __init__.py ! -path '*/attention/dsv4/*' \
        ! -path '*/kvcache/*' ! -path '*/memory/*' ! -path '*/communication/*' -delete
)
for wheel in *.whl; do
    case $wheel in
        vllm-* | sglang-*) ;;
        *) said=$(unzip -qo "$wheel" -d "$folder" -x '*/tests/*' '*/licenses/*' 2>&1) || {
            echo "scripts/peers.sh: $wheel was not unpacked: $said" >&2
            exit 1
        } ;;
    esac
done
rm -rf "$folder"/tvm_ffi/{3rdparty/libbacktrace,src,cython,share}
du -sh "$folder"
