"""The command line: one module per command. Needs the extra `cli`; nothing else in the package imports it."""
