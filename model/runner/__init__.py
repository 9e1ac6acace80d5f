"""One rank: its memory, and the steps that it computes."""
