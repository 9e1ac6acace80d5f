"""The numbers by which tokens are drawn, on every device.

The engine's torch sampler and the compiled CPU kernel share them: a change of one of them changes
the tokens that a seed gives, and nodes of two versions then disagree. Imports nothing.
"""

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea, Flood 2014)
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MIN_TEMPERATURE = 1e-5  # a lower temperature means greedy
WEIGHT_SCALE = float(1 << 36)  # the largest weight; the sum of 2**27 of them still fits 63 bits
LARGEST_UNIFORM = 1.0 - 2.0**-24
