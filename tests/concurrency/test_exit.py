"""A stuck job never keeps the interpreter alive: seen from outside, in a process of its own."""

import subprocess
import sys

import pytest

STUCK = """
import asyncio, threading
from kvtier.concurrency import Workers

async def main():
    workers = Workers("stuck", 1, job_seconds=0.01)
    begun = threading.Event()
    def job():
        begun.set()
        threading.Event().wait()
    task = asyncio.create_task(workers.run(job))
    await asyncio.to_thread(begun.wait)
    print("closed", await workers.aclose(0.01), flush=True)
    print("caller got", type((await asyncio.gather(task, return_exceptions=True))[0]).__name__, flush=True)

asyncio.run(main())
print("end of program", flush=True)
"""

LEFT_ALONE = """
import threading
from kvtier.concurrency.jobs import Job
from kvtier.concurrency import Workers
import asyncio

loop = asyncio.new_event_loop()
workers = Workers("left", 2)
begun = threading.Event()

def job():
    begun.set()
    threading.Event().wait()

task = loop.create_task(workers.run(job))
while not begun.is_set():
    loop.run_until_complete(asyncio.sleep(0))
task._log_destroy_pending = False
print("end of program", flush=True)
"""


@pytest.mark.parametrize(
    ("program", "lines"),
    [(STUCK, ["closed False", "caller got BackendTimeoutError", "end of program"]), (LEFT_ALONE, ["end of program"])],
    ids=["closed", "left alone"],
)
def test_the_interpreter_exits_with_a_job_stuck(program, lines):
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines() == lines, ended.stderr
    assert ended.returncode == 0
