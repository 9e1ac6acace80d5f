"""The platforms that run a cluster: each renders its files, or starts and ends its processes."""
