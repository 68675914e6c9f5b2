"""Sends load to a server that speaks OpenAI's API, and reports what its clients would have seen: `octavo load-test`.

Stands by itself: knows nothing of the server beside it but HTTP, so that any server can be measured.
"""
