"""A process of its own with a store above the bucket that its tests use: told what to do line by line."""

import asyncio
import json
import sys

from kvtier.store import open_chunks


async def main(config):
    loop = asyncio.get_running_loop()
    async with open_chunks(config) as store:
        print(json.dumps("open"), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, *arguments = json.loads(line)
            match verb, arguments:
                case "put", [key, text]:
                    await store.put(key, text.encode(), wait="durable", deadline_seconds=60)
                    answer = True
                case "get", [key]:
                    value = await store.get(key, deadline_seconds=60)
                    answer = None if value is None else bytes(value).decode()
                case "delete", [key]:
                    answer = await store.delete(key, deadline_seconds=60)
            print(json.dumps(answer), flush=True)


asyncio.run(main(json.loads(sys.argv[1])))
