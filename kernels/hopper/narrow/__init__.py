"""Products in bf16 with weights of four and eight bits, which are read as they are stored."""
