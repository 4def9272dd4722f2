"""One tier: a backend, a codec chain, a policy and a capacity, with books that always balance."""
