"""Landing: a decode node takes prompts over, each into blocks that it reserved for it.

`landings` finds the machine of a key, `handoff` is the machine of one prompt, `reads` its reads
under way, `lease` until when it may rely on what it has read. Pure, and used by the connector only.
"""
