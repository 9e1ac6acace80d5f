"""Landing: a decode node reads each prompt into blocks that it has reserved for it.

`landings` finds the machine of a key, `handoff` is the machine of one prompt, `reads` keeps its
reads, and `lease` says until when it may rely on what it has read. All of it is pure, and only the
connector uses it.
"""
