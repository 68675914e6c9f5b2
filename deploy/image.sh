#!/usr/bin/env bash
# Builds the image, without a model and with one, and tries in real containers what docs/deploy.md says of it.
#   deploy/image.sh [--keep]    --keep leaves the images there
# Prints a table; the exit code is 0 only if everything held. Takes Docker where its engine answers, else buildah and
# podman; deploy/image/offline_base.sh prepares a machine that reaches no registry. Variables:
#   IMAGE              name of the images, by default localhost/octavo; the tags are `check` and `check-model`
#   IMAGE_BUILD_FLAGS  more flags for the build, such as mounts of certificates
#   IMAGE_LOGS         folder for logs, by default one under /tmp that is named at the end
# shellcheck disable=SC2317 # the checks are called by their names
set -euo pipefail
cd "$(dirname "$0")/.."

keep=no
case "$*" in
  "") ;;
  --keep) keep=yes ;;
  *) echo "usage: deploy/image.sh [--keep]" >&2; exit 2 ;;
esac
image=${IMAGE:-localhost/octavo}
logs=${IMAGE_LOGS:-$(mktemp -d /tmp/octavo-image.XXXXXX)}
mkdir -p "$logs"
read -ra build_flags <<< "${IMAGE_BUILD_FLAGS:-}"
# Podman may answer to Docker's name, but would build without a health check then.
if command -v docker > /dev/null && [[ $(docker --version) != podman* ]] && docker info > /dev/null 2>&1; then
  engine=docker build=(docker build) strict=()
elif command -v buildah > /dev/null && command -v podman > /dev/null; then
  # Only Docker's format has a health check. Docker mounts no /tmp of its own into a read-only container, podman would.
  engine=podman build=(buildah build --format docker --layers) strict=(--read-only-tmpfs=false)
else
  echo "deploy/image.sh needs Docker, or buildah and podman." >&2
  exit 2
fi

run_id=octavo-check-$$
most_bytes=1200000000
failures=0
passed=0
num_checks=0
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port

remove_containers() {
  local names
  names=$("$engine" ps -aq --filter "name=$run_id" 2> /dev/null)
  [[ -z $names ]] || xargs "$engine" rm --force --volumes <<< "$names" > /dev/null 2>&1
}

clean_up() {
  local volumes
  remove_containers
  volumes=$("$engine" volume ls -q --filter "name=$run_id" 2> /dev/null)
  [[ -z $volumes ]] || xargs "$engine" volume rm --force <<< "$volumes" > /dev/null 2>&1
  [[ $keep == yes ]] || "$engine" rmi --force "$image:check" "$image:check-model" > /dev/null 2>&1 || true
}
trap clean_up EXIT

# Runs a check by its function's name; the last line that it prints tells what was found. `passed` says how it ended: were
# it the exit code, a condition would ask for it, and within conditions a function goes on after a command that failed.
check() {
  local what=$1 log result=ok start=$SECONDS
  shift
  log=$logs/$(printf '%02d' "$num_checks")-$1.log
  num_checks=$((num_checks + 1))
  set +e
  (set -e; "$@") > "$log" 2>&1
  passed=$(($? == 0))
  set -e
  if ((!passed)); then
    result=FAILED
    failures=$((failures + 1))
  fi
  printf '%-6s | %-42s | %5d s | %s\n' "$result" "$what" $((SECONDS - start)) "$(tail -n 1 "$log")"
}

# Starts a container as strictly as one can, and the only one: start NAME IMAGE_TAG [engine's flags] -- [server's flags]
start() {
  local name=$1 tag=$2 flags=()
  shift 2
  remove_containers
  while [[ $1 != -- ]]; do flags+=("$1"); shift; done
  shift
  "$engine" run --detach --name "$run_id-$name" --read-only "${strict[@]}" --cap-drop all \
    --security-opt no-new-privileges --memory 2g --publish "127.0.0.1:$port:8000" "${flags[@]}" "$image:$tag" "$@"
}

in_server() {
  local name=$1
  shift
  "$engine" exec "$run_id-$name" "$@"
}

field() {
  "$engine" inspect --format "$2" "$run_id-$1"
}

until_ready() {
  local deadline=$((SECONDS + 180))
  until curl --silent --fail --max-time 5 --output /dev/null "$url/health/ready"; do
    if [[ $(field "$1" '{{.State.Running}}') != true ]] || ((SECONDS > deadline)); then
      "$engine" logs "$run_id-$1"
      echo "it did not become ready"
      return 1
    fi
    sleep 0.2
  done
}

# post PATH BODY [curl's flags]
post() {
  curl --silent --show-error --fail-with-body --max-time 120 "$url$1" --header 'Content-Type: application/json' \
    --data "$2" "${@:3}"
}

complete() {
  post /v1/completions "$@"
}

healthy() {
  if [[ $engine == podman ]]; then
    podman healthcheck run "$run_id-$1"
  else
    for _ in $(seq 60); do
      [[ $(field "$1" '{{.State.Health.Status}}') == healthy ]] && return
      sleep 1
    done
    return 1
  fi
}

build_image() {
  "${build[@]}" "${build_flags[@]}" --tag "$image:$1" "${@:2}" .
  echo "$image:$1"
}

image_size() {
  local size
  size=$("$engine" image inspect --format '{{.Size}}' "$image:check")
  echo "$((size / 1000000)) MB without a model, of $((most_bytes / 1000000))"
  ((size < most_bytes))
}

image_description() {
  local found
  found=$("$engine" image inspect "$image:check" | python3 -c '
import json, sys
image = json.load(sys.stdin)[0]
config = {**image, **image["Config"]}  # podman has the health check outside
assert config["User"] == "10001:10001", config["User"]
assert config["StopSignal"] == "SIGTERM", config["StopSignal"]
assert config["Entrypoint"][-2:] == ["octavo", "serve"], config["Entrypoint"]
assert list(config["Volumes"]) == ["/cache"], config["Volumes"]
assert config["Healthcheck"]["Test"][-1].endswith("healthcheck.py"), config["Healthcheck"]
print(config["Labels"]["org.opencontainers.image.version"])')
  echo "user 10001, SIGTERM, health check, volume /cache, version $found"
}

packages_fit() {
  "$engine" run --rm --interactive --network none --entrypoint python "$image:check" -I -c '
import pkgutil, server, scheduler, paged_cache, kernels, models, sys
import importlib, importlib.metadata
names = [module.name for package in (server, scheduler, paged_cache, kernels, models)
         for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
names = [name for name in names if "triton" not in name and not name.endswith("._paged_attention")]
for name in names:
    importlib.import_module(name)
pins = {line.strip() for line in sys.stdin}
found = {f"{each.name.lower().replace(chr(95), chr(45))}=={each.version}" for each in importlib.metadata.distributions()}
loose = {each.partition("+")[0] for each in found if not each.startswith("octavo==")} - pins
assert not loose, f"not pinned: {loose}"
print(len(names), "modules can be imported;", len(found) - 1, "packages, all pinned")' < deploy/image/constraints.txt
}

refusal_without_model() {
  local code=0
  "$engine" run --rm --network none --read-only "${strict[@]}" "$image:check" > "$logs/refusal.txt" 2>&1 || code=$?
  tail -n 1 "$logs/refusal.txt"
  [[ $code == 2 ]] && grep -q 'could not be downloaded' "$logs/refusal.txt"
}

refusal_of_settings() {
  local code=0
  "$engine" run --rm --network none "$image:check" --max-num-seqs none > "$logs/refusal.txt" 2>&1 || code=$?
  grep -- --max-num-seqs "$logs/refusal.txt"
  [[ $code == 2 ]]
}

# ---- The server with its own model, in a fresh volume.

# With memory left beside the KV cache, for the inspector.
first_start() {
  start first check-model --memory 3g --volume "$run_id:/cache" \
    --env OCTAVO_OTLP_TRACES_ENDPOINT=http://127.0.0.1:4318 -- --kv-cache-memory 256MiB
  until_ready first
  echo "ready, with the model of the image and an empty cache"
}

completion() {
  complete '{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}' \
    | python3 -c '
import json, sys
answer = json.load(sys.stdin)
assert answer["usage"]["completion_tokens"] == 8, answer
assert "Paris" in answer["choices"][0]["text"], answer
print(repr(answer["choices"][0]["text"]))'
}

stream() {
  complete '{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0,
             "stream": true}' --no-buffer | python3 -c '
import json, sys
events = [line.removeprefix("data: ").strip() for line in sys.stdin if line.startswith("data: ")]
assert events[-1] == "[DONE]", events
text = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
assert "Paris" in text, text
print(len(events), "events:", repr(text))'
}

# What is imported or read only when somebody asks for it.
seldom_used() {
  local form='{"type": "json_schema", "json_schema": {"name": "form", "schema":
    {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"], "additionalProperties": false}}}'
  post /v1/chat/completions "{\"messages\": [{\"role\": \"user\", \"content\": \"Is it sunny?\"}], \"max_tokens\": 40,
    \"temperature\": 0, \"response_format\": $form}" | python3 -c '
import json, sys
content = json.load(sys.stdin)["choices"][0]["message"]["content"]
assert set(json.loads(content)) == {"sunny"}, content'
  post /v1/embeddings '{"input": "a sentence"}' | python3 -c '
import json, sys
[embedded] = json.load(sys.stdin)["data"]
assert len(embedded["embedding"]) == 576, embedded'
  post /dashboard/data/inspector '{"prompt": "a sentence", "max_tokens": 2}' | tail -c 500
  curl --silent --fail --output /dev/null "$url/dashboard/"
  printf '\n%s\n' "a grammar, an embedding, the dashboard and its inspector"
}

# To a collector in the container, which takes one delivery. There was none for the requests before.
spans() {
  local pid deadline=$((SECONDS + 60))
  in_server first python -I -u -c '
from http.server import BaseHTTPRequestHandler, HTTPServer
class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        print("a collector gets", len(body), "bytes of spans at", self.path)
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", 4318), Collector)
server.timeout = 60
print("listens")
server.handle_request()' > "$logs/spans.txt" &
  pid=$!
  until grep --quiet listens "$logs/spans.txt"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.1
  done
  complete '{"prompt": "The capital of France is", "max_tokens": 2}' > /dev/null
  wait "$pid"
  tail -n 1 "$logs/spans.txt"
  grep --quiet 'spans at /v1/traces' "$logs/spans.txt"
}

is_confined() {
  [[ $(in_server first id -u) == 10001 ]]
  in_server first python -I -c '
import os
from pathlib import Path
status = dict(line.split(":", 1) for line in Path("/proc/1/status").read_text().splitlines())
assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, status["CapEff"]
assert status["NoNewPrivs"].strip() == "1"
for folder in ("/", "/opt/octavo", "/etc", "/tmp", "/home"):
    try:
        Path(folder, "written").touch()
    except OSError:
        continue
    raise SystemExit(f"{folder} can be written to")
assert os.access("/cache", os.W_OK)
writable = [path for path in Path("/opt/octavo").rglob("*") if not path.is_symlink() and os.access(path, os.W_OK)]
assert not writable, writable[:3]
print("uid 10001, no capabilities, nothing writable but /cache")'
}

health_check() {
  healthy first
  in_server first python -I /opt/octavo/healthcheck.py
}

drain() {
  local pid deadline=$((SECONDS + 60))
  : > "$logs/drained.txt"
  complete '{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": true,
             "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}' --no-buffer \
    > "$logs/drained.txt" &
  pid=$!
  until (($(grep -c '^data: ' "$logs/drained.txt") >= 3)); do
    ((SECONDS < deadline)) || { echo "no token came"; return 1; }
    sleep 0.05
  done
  "$engine" stop --time 60 "$run_id-first"
  wait "$pid"
  [[ $(field first '{{.State.ExitCode}}') == 0 ]]
  python3 - "$logs/drained.txt" << 'END'
import json
import sys

events = [line.removeprefix("data: ").strip() for line in open(sys.argv[1]) if line.startswith("data: ")]
assert events[-1] == "[DONE]", events[-1]
usage = [usage for event in events[:-1] if (usage := json.loads(event).get("usage"))][-1]
assert usage["completion_tokens"] == 600, usage
print("the stream got all 600 tokens, then exit code 0")
END
}

# The file has the number that it had: it was not made again. It has another time: it was read.
second_start() {
  local describe="stat --format '%i %s %y' /cache/octavo/packed/*" before after number size
  before=$("$engine" run --rm --volume "$run_id:/cache" --entrypoint sh "$image:check-model" -c "$describe")
  start second check-model --volume "$run_id:/cache" --
  until_ready second
  completion
  after=$(in_server second sh -c "$describe")
  printf '%s\n' "$before" "$after"
  read -r number size _ <<< "$after"
  echo "took over the packed weights, $size bytes"
  [[ $before == "$number $size "* && $before != "$after" ]]
}

kv_blocks() {
  curl --silent --fail "$url/metrics" | sed -n 's/^vllm:cache_config_info{.*num_gpu_blocks="\([0-9]*\)".*/\1/p'
}

# Also as a user whom the image does not know, in the group 0, as OpenShift starts containers.
memory_limit() {
  local large small pids=()
  start large check-model --memory 3g --
  until_ready large
  large=$(kv_blocks)
  start small check-model --memory 1g --user 123456:0 --volume "$run_id-other:/cache" --
  until_ready small
  small=$(kv_blocks)
  for topic in $(seq 8); do
    complete "{\"model\": \"smollm2\", \"prompt\": \"$topic $(printf 'word %.0s' $(seq 1000))\", \"max_tokens\": 200,
               \"ignore_eos\": true}" --output /dev/null &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  [[ $(field small '{{.State.OOMKilled}} {{.State.Running}}') == "false true" ]]
  echo "$small KV blocks in 1 GiB, $large in 3 GiB; 8 prompts of 1000 words in the former, as user 123456"
  ((small > 0 && small < large))
}

keys() {
  local code
  start keys check-model --env OCTAVO_API_KEY=alice:secret --env OCTAVO_ADMIN_API_KEY=admin-secret --
  until_ready keys
  healthy keys
  code=$(curl --silent --output /dev/null --write-out '%{http_code}' "$url/v1/models")
  echo "healthy with keys; $code without one"
  [[ $code == 401 ]]
}

other_port() {
  remove_containers
  "$engine" run --detach --name "$run_id-port" --read-only "${strict[@]}" --memory 2g \
    --publish "127.0.0.1:$port:9000" "$image:check-model" --port 9000
  until_ready port
  healthy port
  echo "healthy with --port 9000"
}

early_stop() {
  start early check-model --
  "$engine" stop --time 20 "$run_id-early"
  echo "exit code $(field early '{{.State.ExitCode}}') when stopped while it loads"
  [[ $(field early '{{.State.ExitCode}}') == 0 ]]
}

printf '%-6s | %-42s | %7s | %s\n' result check time found
check "build" build_image check
((passed)) && check "build with a model" build_image check-model --build-arg MODELS=smollm2
if ((passed)); then
  check "size" image_size
  check "description" image_description
  check "all modules" packages_fit
  check "no model and no network: one sentence" refusal_without_model
  check "wrong setting: one sentence" refusal_of_settings
  check "start, read-only, without capabilities" first_start
  if ((passed)); then
    check "completion" completion
    check "streamed completion" stream
    check "what is seldom used" seldom_used
    check "spans" spans
    check "confined" is_confined
    check "health check" health_check
    check "SIGTERM while a request streams" drain
    check "start with a used cache" second_start
  fi
  check "memory limit" memory_limit
  check "keys" keys
  check "another port" other_port
  check "SIGTERM while it loads" early_stop
fi

echo "Logs are in $logs."
exit $((failures > 0))
