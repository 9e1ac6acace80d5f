"""Ways to read bytes from another process's pool: shm on one host, nixl between hosts and GPUs."""
