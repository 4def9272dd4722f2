"""Chunks and blobs: what their tensors look like, and the one container they are stored in."""
