"""`kvtier doctor`: a config looked at as a whole, then tier by tier; one small module per kind of check."""
