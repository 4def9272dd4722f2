"""A backend in a dozen lines: values in a dict."""

from kvtier.backends.bytes_backend import BytesBackend


class DictBackend(BytesBackend):
    """Values live as long as the backend does."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    async def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    async def put(self, name: str, value: bytes, expires: float | None) -> None:
        self._values[name] = value

    async def delete(self, name: str) -> bool:
        return self._values.pop(name, None) is not None

    async def names(self) -> list[str]:
        return list(self._values)
