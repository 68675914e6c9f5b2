#!/usr/bin/env bash
# Checks a card in under 8 minutes: are the kernels right on it, and how near do they and the engine come to its limits?
#
#   benchmarks/gpu_check.sh [--dry-run] [PART ...]
#
# Needs python3 with torch, triton and numpy; a part that wants more says what is missing. Writes gpu-<date>.json, .md
# and .log to $OUT, or to benchmarks/results; a run of all parts starts them anew. A part that hangs is stopped, and
# keeps the numbers it had. --dry-run runs the code with tiny shapes on a CPU, under Triton's interpreter: its numbers
# mean nothing. Ends with 1 if anything was wrong or failed; a missed goal is neither.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly ALL_PARTS="checks memcheck kernel-tests attention engine operations transformers racecheck"
readonly TOTAL_SECONDS=465 # of 480: the rest is for the report
python=${PYTHON:-python3}
flags=()
unset TRITON_INTERPRET
if [ "${1:-}" = --dry-run ]; then
    shift
    flags=(--dry-run)
    export TRITON_INTERPRET=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
parts=${*:-$ALL_PARTS}
folder=${OUT:-benchmarks/results}
results="$folder/gpu-$(date -u +%F).json"
export PYTHONUNBUFFERED=1

wanted() { [[ " $parts " == *" $1 "* ]]; }

# run NAME SECONDS COMMAND...: one part, for so many seconds at most, and never past the end of all.
run() {
    local name=$1 limit=$2 left=$((TOTAL_SECONDS - SECONDS)) status=0 child
    shift 2
    if [ "$left" -lt 5 ]; then
        "$python" benchmarks/gpu_results.py "$results" --note "$name" "not run: no time was left"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    echo "== $name, $limit s at most, $SECONDS s so far"
    timeout --kill-after=5 "$limit" "$@" &
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    wait "$child" || status=$?
    case $status in
        0 | 3) ;; # 3: the part itself has written down what was wrong; 1 is a crash, of which nothing is written
        124 | 137) "$python" benchmarks/gpu_results.py "$results" --note "$name" "stopped after $limit s" ;;
        *) "$python" benchmarks/gpu_results.py "$results" --note "$name" "ended with status $status" ;;
    esac
}

# part NAME SECONDS SCRIPT [FLAG...]: one part of ours, if it is wanted.
part() {
    local name=$1 limit=$2 script=$3
    shift 3
    wanted "$name" || return 0
    run "$name" "$limit" "$python" "benchmarks/$script.py" "${flags[@]}" --results "$results" --name "$name" "$@"
}

# sanitize TOOL SECONDS: the checks at tiny shapes under one of compute-sanitizer's tools. Not without a card.
sanitize() {
    local tool=$1 limit=$2 sanitizer
    wanted "$tool" || return 0
    [ ${#flags[@]} -gt 0 ] && return
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [ -z "$sanitizer" ]; then
        echo "== $tool: skipped"
        "$python" benchmarks/gpu_results.py "$results" --skipped "$tool" "compute-sanitizer is not installed"
        return
    fi
    # Without torch's pool of memory each tensor is an allocation of its own, whose end the tool knows.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$tool" "$limit" \
        "$sanitizer" --tool "$tool" --error-exitcode 9 --report-api-errors no --print-limit 5 \
        "$python" benchmarks/gpu_checks.py --small --results "$results" --name "$tool"
}

all_parts() {
    # First what is right or wrong: nothing is timed yet, and most of it is compilation, so all at the same time.
    local share jobs=()
    for share in 1 2 3 4; do
        part checks 130 gpu_checks --share "$share/4" &
        jobs+=($!)
    done
    sanitize memcheck 130 &
    jobs+=($!)
    part kernel-tests 130 gpu_kernel_tests --seconds 110 & # it stops by itself, and counts what had run
    jobs+=($!)
    trap 'kill "${jobs[@]}" 2>/dev/null; exit 130' INT TERM
    wait "${jobs[@]}"

    # Then the numbers, each part alone on the card.
    part attention 110 gpu_attention
    part engine 110 gpu_engine
    part operations 50 gpu_operations
    part transformers 90 gpu_transformers
    sanitize racecheck 60

    echo "== $results after $SECONDS s"
    "$python" benchmarks/gpu_results.py "$results"
}

mkdir -p "$folder"
[ "$parts" = "$ALL_PARTS" ] && rm -f "$results" "${results%.json}.md"
for name in $parts; do
    if [[ " $ALL_PARTS " != *" $name "* ]]; then
        echo "there is no part $name; there are: $ALL_PARTS" >&2
        exit 2
    fi
done
all_parts 2>&1 | tee -i "${results%.json}.log"
exit "${PIPESTATUS[0]}"
