"""An OpenAI-compatible server over `dsv4.engine`: `dsv4 serve MODEL`.

The app, chat templates, parsers and event builders are those of transformers' own server.
"""
