"""Eviction policies: who leaves a tier when room is needed."""
