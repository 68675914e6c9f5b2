"""Forms in which models write tool calls: how each is read from a stream of text, and the grammar that enforces it."""
