"""The APIs: the bodies that clients send, and the documents and events that they get.

Every API's body becomes the same request, and every response is made from the same deltas.
"""
