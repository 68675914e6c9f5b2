"""docs/api.md: every field of OpenAI's description with our verdict, and what this server takes besides.

`python -m tests.api_reference` writes the page; tests/server/test_api_reference.py holds it to the server's answers.
"""
