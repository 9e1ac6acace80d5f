"""Products that give a row the same result in every batch, examined when a rank loads."""
