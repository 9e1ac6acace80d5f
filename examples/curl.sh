#!/bin/sh
# Ask a server without a client.
set -eu
url=${BATON_URL:-http://127.0.0.1:8000}
json='Content-Type: application/json'

curl -fsS "$url/health"
echo
curl -fsS "$url/v1/completions" -H "$json" -d '{"prompt": "What is 17 + 25?", "max_tokens": 8}'
echo
curl -fsSN "$url/v1/chat/completions" -H "$json" -d '{
  "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8, "stream": true}'
