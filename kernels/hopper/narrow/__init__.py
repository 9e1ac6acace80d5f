"""Products in bf16 with weights of four bits and FP8, which are read as they are stored."""
