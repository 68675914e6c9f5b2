"""A server for the tests of peers.py: answers every request with as many words as asked for. Run as a program.

It counts a prompt's words as its tokens and remembers every system prompt, whose words are then cached ones.
"""

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    """Knows the paths that a benchmark asks. Ends an answer by closing the connection, as HTTP 1.0 has it."""

    delay = 0.0  # seconds before each word
    refuses_chats = False
    seen: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "1.2.3"},
            "/v1/models": {"data": [{"id": "a-model"}]},
        }
        self._send(json.dumps(answers[self.path]).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_chat = self.path == "/v1/chat/completions"
        if is_chat and self.refuses_chats:
            self.send_error(501, "no chats here")
            return
        if body["model"] != "a-model" or not body["stream"] or not body["ignore_eos"]:
            self.send_error(400)
            return
        num_cached = 0
        if is_chat:
            prompt = " ".join(message["content"] for message in body["messages"])
            system = body["messages"][0]["content"]
            num_cached = len(system.split()) if system in self.seen else 0
            self.seen.add(system)
        else:
            prompt = body["prompt"]
        self._answer(is_chat, len(prompt.split()), num_cached, body["max_tokens"])

    def _answer(self, is_chat: bool, num_prompt_tokens: int, num_cached: int, num_tokens: int) -> None:
        self._send(b"")
        for number in range(num_tokens):
            time.sleep(self.delay)
            text = f" word{number}"
            self._event({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """The tests read what a server that ended has printed, and that alone."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--refuse-chats", action="store_true")
    options = parser.parse_args()
    Handler.delay, Handler.refuses_chats = options.delay, options.refuse_chats
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
