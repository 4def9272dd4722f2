"""What a store counts, for monitoring systems. Each module needs its own client and names it where it is missing."""
