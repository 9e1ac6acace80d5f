"""Ways to read bytes from another process's pool: shm, nixl, and faulty around either."""
