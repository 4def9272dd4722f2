"""Keys: what a prompt's chunks are called, equal in every process that computes them."""

from kvtier.keys.block_hashes import BlockHashes
from kvtier.keys.chain import ChunkKeys, group_key, salt_text
from kvtier.keys.file_digests import user_cache_folder
from kvtier.keys.hint import Hint
from kvtier.keys.names import check_key, key_of, name_of
from kvtier.keys.namespace import Namespace, NamespaceDigest
from kvtier.keys.prefix import Prefix, PrefixLike, chunk_keys
from kvtier.keys.tokens import TokenSource
from kvtier.keys.wire import SCHEME

__all__ = [
    "SCHEME",
    "BlockHashes",
    "ChunkKeys",
    "Hint",
    "Namespace",
    "NamespaceDigest",
    "Prefix",
    "PrefixLike",
    "TokenSource",
    "check_key",
    "chunk_keys",
    "group_key",
    "key_of",
    "name_of",
    "salt_text",
    "user_cache_folder",
]
