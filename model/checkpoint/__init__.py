"""The tensors that a folder and its adapters hold, checked against its config without torch."""
