"""Replays traces of requests through the real scheduler and block manager, against a model of what a step costs."""
