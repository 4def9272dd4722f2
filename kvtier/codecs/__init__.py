"""Codecs: pure steps between a segment's bytes and what is stored of them."""
