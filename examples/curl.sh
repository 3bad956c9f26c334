#!/usr/bin/env bash
# The models of the server, a chat answered in one piece, and the same chat streamed, with curl.
# Run: examples/curl.sh (SERVER_URL is the address of the server, SERVER_KEY its API key).
set -euo pipefail

url=${SERVER_URL:-http://127.0.0.1:8000}
key=${SERVER_KEY:-none}

ask() {
    local path=$1
    shift
    curl --silent --show-error --fail-with-body --no-buffer "$url$path" "$@" \
        --header "Authorization: Bearer $key" --header "Content-Type: application/json"
}

fields='"messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0, "max_tokens": 40'

echo "Models:"
ask /v1/models

echo # a request may leave out "model"
echo "Answer:"
ask /v1/chat/completions --data "{$fields}"

echo # one "data:" line for each delta, "data: [DONE]" at the end
echo "Stream:"
ask /v1/chat/completions --data "{$fields, \"stream\": true}"
