"""The decode engine, which lands KV blocks and generates tokens by continuous batching."""
