"""What a Hugging Face folder says of its model, read and checked before torch is imported."""
