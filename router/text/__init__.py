"""Text to tokens and back: tokenizers, chat templates, stop strings, tool calls and grammars.

It knows neither nodes nor HTTP.
"""
