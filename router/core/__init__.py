"""The router without text or HTTP: where requests go, and what becomes of them.

It takes token ids and returns token ids. `request.py` and `lifecycle.py` are pure; `router_core.py`
carries out what they decide.
"""
