"""What happens to a store when its process forks, and when it ends without closing it."""

import subprocess
import sys
import textwrap

PROLOGUE = """
import os, sys, threading, torch, kvtier
layout = kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
def store(**options):
    tier = {"backend": "local-disk", "path": sys.argv[1], "capacity": "16MiB"}
    config = {"chunk_tokens": 4, "tiers": [tier], **options}
    return kvtier.open_blocking(config, layout=layout, namespace=kvtier.Namespace(model="a/b", revision="1"))
def kv(n):
    return {name: torch.arange(n * 8, dtype=torch.float32).reshape(1, n, 1, 8) for name in "kv"}
"""


def run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROLOGUE + textwrap.dedent(code), str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_store_made_before_a_fork_opens_in_each_process_that_uses_it(tmp_path):
    code = """
    made = store()
    child = os.fork()
    tokens = list(range(8)) if child else list(range(100, 108))
    made.put(tokens, kv(8), wait="durable")
    assert made.get(tokens).num_tokens == 8
    made.close()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        print("both")
    """
    assert "both" in run(code, tmp_path).stdout


def test_a_store_that_was_open_before_a_fork_refuses_the_child(tmp_path):
    code = """
    made = store()
    made.put(list(range(8)), kv(8))
    pending = made.submit(kvtier.KVStore.exists, list(range(8)))
    child = os.fork()
    if not child:
        for call in (lambda: made.get([1] * 8), lambda: made.submit(kvtier.KVStore.exists, [1]), made.poll, made.close):
            try:
                call()
            except kvtier.ClosedError as exc:
                assert f"opened in process {os.getppid()}" in str(exc)
            else:
                os._exit(1)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert made.get(list(range(8))).num_tokens == 8
    print("refused")
    """
    assert "refused" in run(code, tmp_path).stdout


def test_a_process_that_ends_without_closing_flushes(tmp_path):
    run("store().put(list(range(400)), kv(400))", tmp_path)
    assert "400" in run("print(store().exists(list(range(400))))", tmp_path).stdout


def test_a_process_ends_though_its_loop_is_stuck(tmp_path):
    code = """
    made = store(close_seconds=0.2)
    async def block(store):
        threading.Event().wait()
    made.submit(block)
    made.get([1] * 8, deadline_seconds=0.2)
    print("ends")
    """
    assert "ends" in run(code, tmp_path).stdout
