"""What prefill and decode nodes share: sequences, blocks, plans, the loop, and compute.

The host-only half (block_pool, prefix_cache, sequence, plan, loop, executor) never imports torch;
the other half (worker, runner, models, layers, attention) is reached only through an `Executor`.
"""
