"""What the tests of every folder share: real servers, and Ctrl-C."""

import signal
import threading

from kvtier.testing.servers.fixtures import either_server, redis_server, server_folder, valkey

__all__ = ["either_server", "redis_server", "server_folder", "valkey"]

# A shell that starts the tests in its background has them ignore it, and so would every program that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
