"""The process that reads and tokenises large requests, beside the server's own. Started by server/preparer.py.

It does what its other end asks for over one of its connections, each served by a thread: one function of ours, with a
request's body and the model. It ends when a connection is closed, so that a dead server leaves nothing behind.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import server.chat_preparation  # noqa: F401  # most requests need it: it is loaded before the first one comes
from server.errors import ApiError
from server.ipc import receive_payload, send_payload
from server.log_lines import RequestContext, current_request
from server.logging_setup import configure_logging
from server.tokenizer import load_tokenizer
from server.value_codec import ValueCodec

logger = logging.getLogger("octavo.preparer")

READY = b"ready"
TOKENIZER = "tokenizer"  # its name on the way: each process has its own
_NICENESS = 10  # whoever waits for a token goes before a long prompt that has not begun


def answer(request: bytes, body: bytes, codec: ValueCodec) -> bytes:
    """Do what is asked, and put the result into words: ("done", value), ("refused", error) or ("failed", reason)."""
    try:
        try:
            module, name, model, request_context = codec.decode(request)
            current_request.set(None if request_context is None else RequestContext(*request_context))
            function: Callable[[bytes, Any], object] = getattr(import_module(module), name)
            return codec.encode(("done", function(body, model)))
        except ApiError as error:  # a refusal may fail to be put into words as a result may
            return codec.encode(("refused", type(error).__module__, type(error).__qualname__, vars(error)))
    except Exception as error:
        logger.exception("A request could not be prepared.")
        return codec.encode(("failed", type(error).__name__))


def _serve(connection: socket.socket, codec: ValueCodec, ended: "queue.SimpleQueue[None]") -> None:
    try:
        send_payload(connection, READY)
        while (request := receive_payload(connection)) is not None:
            body = receive_payload(connection)
            if body is None:
                return
            send_payload(connection, answer(request, body, codec))
    except ConnectionError:
        return
    finally:
        ended.put(None)


def main() -> None:
    """Serve the connections whose descriptors follow the model's path, the log's level and its format."""
    # When to stop is the decision of the server: closing the connections is its word.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    path, log_level, log_format, *descriptors = sys.argv[1:]
    configure_logging(log_level, log_format, "preparer")
    codec = ValueCodec({TOKENIZER: load_tokenizer(Path(path))})
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    for descriptor in descriptors:
        connection = socket.socket(fileno=int(descriptor))
        threading.Thread(target=_serve, args=(connection, codec, ended), daemon=True).start()
    ended.get()
    os._exit(0)  # whatever the other threads are at: nobody waits for it


if __name__ == "__main__":
    main()
