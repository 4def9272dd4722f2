"""Storage media: each moves named bytes in batches and knows nothing of tiers, codecs, policies or each other."""
