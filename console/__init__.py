"""What a person types against a running server: commands that are clients of its HTTP API.

The command line calls them. They hold no model and no cluster, know a server only by its URL, and
work with any OpenAI-compatible server where they can.
"""
