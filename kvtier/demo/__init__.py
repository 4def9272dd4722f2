"""`python -m kvtier.demo`: a chat on a real model whose prompts are loaded, not recomputed, also after a restart."""
