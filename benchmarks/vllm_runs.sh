#!/bin/bash
# Variants of vllm_hisparse.py in a row on one H200, each under a time limit.
#   bash benchmarks/vllm_runs.sh swap|graph|eager|ops|large|capacity OUT_FOLDER
# Engine starts take half a minute; the first one also waits a minute for DeepGEMM's kernels. CASES (graph, ops) and LARGE
# are lists of REQUESTSxCONTEXT[xRUNS], EQUALITY the case of which tokens are compared, LAYERS those of `large`, and ONLY a
# list of names to run. Exit code: of the last run. See pack_vllm.py for PYTHONPATH.
set -u
part=$1 out=$2
cases=${CASES:-32x20000,16x60000,8x20000x3}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_USE_FLASHINFER_SAMPLER=0 TQDM_DISABLE=1
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
mkdir -p "$out"

run() { # name, seconds, arguments
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then return 0; fi
  timeout -k 5 "$limit" python3 benchmarks/vllm_hisparse.py "$@" --out "$out/$name.json" >"$out/$name.out" 2>"$out/$name.err"
  local status=$?
  echo "== $name: exit code $status, $((SECONDS - begin)) s"
  grep -h "^CASE\|^EQUALITY\|^NOTHING\|host pool\|device KV\|blocks left" "$out/$name.err"
  if [ $status -ne 0 ]; then grep -v "^\s*$" "$out/$name.err" | tail -n 12 | cut -c1-300; fi
  return $status
}

same() { echo "--equality ${EQUALITY:-4x12000}"; }

case $part in
  swap)
    timeout 60 python3 benchmarks/vllm_swap.py --requests 8,64 --context 60000 --hit-rate 0.9 "$out/swap.json" ;;
  graph)
    run native 180 native --cases "$cases" $(same) --profile
    run native-hisparse 120 native-hisparse --cases "$cases" $(same) --profile --compare "$out/native.json"
    run ours 120 ours --cases "$cases" $(same) --profile --compare "$out/native.json"
    run ours-hisparse 120 ours-hisparse --cases "$cases" $(same) --profile --compare "$out/native-hisparse.json"
    run ours-hisparse-overlap 120 ours-hisparse-overlap --cases "$cases" $(same) --profile --compare "$out/native-hisparse.json" ;;
  eager)
    for variant in native native-hisparse ours ours-hisparse; do
      run "$variant-eager" 120 "$variant" --cases 8x20000 --eager --profile
    done ;;
  ops)
    cases=${CASES:-8x20000x6}
    run native 180 native --cases "$cases" $(same) --profile
    for variant in ours ours-off ours-portable ours-index; do
      run "$variant" 110 "$variant" --cases "$cases" $(same) --profile --compare "$out/native.json"
    done
    run native-hisparse 110 native-hisparse --cases "$cases" $(same) --profile --compare "$out/native.json"
    for switched in "" -attention-off -mirror-off -pool-off -swap-off; do
      variant=ours-hisparse$switched
      run "$variant" 110 "$variant" --cases "$cases" $(same) --profile --compare "$out/native-hisparse.json"
    done ;;
  large)
    for variant in native ours native-hisparse ours-hisparse ours-hisparse-overlap; do
      run "$variant-large" 240 "$variant" --cases "${LARGE:-16x20000,64x20000,128x20000,32x60000}" --layers "${LAYERS:-4}"
    done ;;
  capacity)
    run capacity-native 75 native --cases "" --gpu-kv-gib 4 --capacity-context 60000
    run capacity-hisparse 75 ours-hisparse --cases "" --gpu-kv-gib 4 --host-kv-gib 24 --capacity-context 60000 ;;
  *) echo "unknown part $part" >&2; exit 2 ;;
esac
