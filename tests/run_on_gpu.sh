#!/usr/bin/env bash
# Runs a GPU bundle (`./dsv4 gpu-bundle`) on a machine with a GPU and the CUDA toolkit: tests, sanitizers, benchmarks.
# Logs go to $OUT, or to the folder `out` beside this script; one line a step and a summary to the terminal.
#
#   run.sh [tests] [golden] [sanitizer] [bench] [sass]     some of the steps; by default all
set -u
cd "$(dirname "${BASH_SOURCE[0]}")"
out="${OUT:-$PWD/out}"
mkdir -p "$out"
cuda="${CUDA_HOME:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" PATH="$PATH:$cuda/bin"
steps=("$@")
((${#steps[@]})) || steps=(tests golden sanitizer bench sass)
failed=0

# step NAME SECONDS COMMAND...: runs the command with a limit, its output to NAME.log.
step() {
  local name="$1" limit="$2" start=$SECONDS status
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  ((status == 0)) || failed=1
  printf '%-24s %-7s %4d s   %s\n' "$name" "$( ((status == 0)) && echo passed || echo "FAILED $status")" \
    $((SECONDS - start)) "$(grep -E '^\[  (PASSED|FAILED)|ERROR SUMMARY|RACECHECK SUMMARY|bounds hold|kernels wait' \
      "$out/$name.log" | tail -n 1)"
}

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader
for wanted in "${steps[@]}"; do
  case "$wanted" in
    tests) step gpu_tests 300 ./gpu_tests ;;
    golden)
      step ops_golden 60 ./ops_golden --device=cuda --file=tests/data/ops_golden.safetensors
      ;;
    sanitizer)
      # Calls that fail on purpose are no errors. Without the tests that take minutes under a sanitizer: 34 GB caches, every shape, own processes.
      filter='-*PastTwoToTheThirtyOne*:*ForEveryShape*:*LazyLoading*'
      export DSV4_UNDER_COMPUTE_SANITIZER=1
      step memcheck 300 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 ./gpu_tests --gtest_filter="$filter"
      step racecheck 300 compute-sanitizer --tool racecheck --error-exitcode 9 ./gpu_tests --gtest_filter="$filter"
      unset DSV4_UNDER_COMPUTE_SANITIZER
      ;;
    bench)
      for bench in ./*_bench; do step "$(basename "$bench")" 120 "$bench"; done
      ;;
    sass) step sass 120 python3 check_sass.py gpu_tests ;;
    *) printf '%s: there is no such step\n' "$wanted" && failed=1 ;;
  esac
done
grep -hE '^\[  FAILED  \]|Failure$' "$out"/*.log | sort | uniq -c | sort -rn | head -n 20
exit $failed
