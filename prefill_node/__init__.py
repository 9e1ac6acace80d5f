"""The prefill engine: computes prompts in chunks and hands their KV blocks to a decode node."""
