"""The edge: HTTP, tokenising, detokenising, metrics, and the wiring of the engine process."""
