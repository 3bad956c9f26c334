#!/usr/bin/env bash
# The server's models, a chat answered as a whole, and the same chat streamed, with curl alone.
# Run: examples/curl.sh (SERVER_URL and SERVER_KEY say where the server is, and its key).
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

echo # one line of data for each delta, "data: [DONE]" at the end
echo "Stream:"
ask /v1/chat/completions --data "{$fields, \"stream\": true}"
