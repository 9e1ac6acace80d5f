"""The layers of a decoder, and the interface to the device that computes them."""
