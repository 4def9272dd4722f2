"""What the tests of every folder share: real servers."""

from kvtier.testing.servers.fixtures import either_server, redis_server, server_folder, valkey

__all__ = ["either_server", "redis_server", "server_folder", "valkey"]
