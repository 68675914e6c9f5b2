"""Public clients of the OpenAI and Anthropic APIs against the real server: `make clients`."""
