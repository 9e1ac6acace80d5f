"""What strikes a simulated cluster: each kind of fault is a function in a row of `schedule`.

A strike lasts until what it broke works again, so the next one of its lane begins after it.
"""
