"""The engine's messages reach the edge whole and in order, however slowly it reads, and never hold up the engine."""

import socket
import threading
import time

import pytest

from server.engine_process import Outbox
from server.ipc import MessageCodec
from server.messages import EngineFailure, EngineMessage

NUM_MESSAGES = 200


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        yield ours, theirs


def messages():
    """Small ones, and ones that fit no buffer."""
    return [EngineFailure(f"{number} " + "x" * (100_000 if number % 50 == 7 else 10)) for number in range(NUM_MESSAGES)]


def test_an_edge_that_does_not_read_holds_up_nobody_and_gets_all_later(connection):
    ours, theirs = connection
    outbox = Outbox(ours, MessageCodec(None))
    sending = threading.Thread(target=lambda: [outbox.send(message) for message in messages()], daemon=True)
    sending.start()
    sending.join(timeout=10)
    assert not sending.is_alive(), "the sender waits for the reader"
    codec = MessageCodec(EngineMessage)
    assert [codec.receive(theirs) for _ in range(NUM_MESSAGES)] == messages()
    outbox.close()


def test_what_is_sent_while_the_rest_of_another_waits_does_not_overtake_it(connection):
    """The reader takes a little at a time: messages go directly, and by the thread, in turns."""
    ours, theirs = connection
    outbox = Outbox(ours, MessageCodec(None))
    received = []

    def read():
        codec = MessageCodec(EngineMessage)
        while len(received) < NUM_MESSAGES:
            received.append(codec.receive(theirs))
            time.sleep(0.0002 * (len(received) % 5))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for message in messages():
        outbox.send(message)
        time.sleep(0.0002)
    reading.join(timeout=20)
    assert received == messages()
    outbox.close()


def test_an_edge_that_is_gone_is_no_error(connection):
    ours, theirs = connection
    outbox = Outbox(ours, MessageCodec(None))
    theirs.close()
    for message in messages():
        outbox.send(message)
    outbox.close()
