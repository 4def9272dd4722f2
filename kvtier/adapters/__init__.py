"""Bridges to engines, one module each; none is imported unless asked for by name."""
