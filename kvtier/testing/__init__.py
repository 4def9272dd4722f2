"""The conformance kit: what a backend, codec or policy of your own must pass, and the faults to try it with."""
