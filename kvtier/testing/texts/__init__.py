"""Texts whose KV codecs are judged on: a handbook, source code, a chat, and German prose."""
