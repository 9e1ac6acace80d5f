"""The router's HTTP side: OpenAI's endpoints, probes, metrics and the status page, on aiohttp.

It uses aiohttp's public interface only. It knows requests and their streams, and never nodes.
"""
