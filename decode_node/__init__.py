"""The decode engine: lands prefilled KV blocks and generates tokens by continuous batching."""
