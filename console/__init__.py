"""Commands with which a person uses a running server, as clients of its HTTP API.

The command line calls them. They hold no model and no cluster, know a server only by its URL, and
work with any OpenAI-compatible server if possible.
"""
