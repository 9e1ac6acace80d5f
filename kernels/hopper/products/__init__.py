"""Products in bf16 whose bits do not depend on the number of rows."""
