"""The decode engine, which receives KV blocks and generates tokens by continuous batching."""
