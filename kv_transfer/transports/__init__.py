"""Ways to read bytes from another process's pool: shm and cuda_ipc on one host, nixl beyond it."""
