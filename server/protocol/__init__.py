"""The bodies of requests and answers, in the shapes of OpenAI's API."""
