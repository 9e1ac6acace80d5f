"""The prefill engine, which computes prompts in chunks and hands over their KV blocks."""
