"""Secrets show nowhere: not in reprs, errors, logs of errors, or the effective config."""

import traceback

import pytest

from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.options import Secret, SecretUrl, mask_url

WORD = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user:hunter2@host", "redis://user:***@host"),
        ("redis://user:hun/ter2@host", "redis://user:***@host"),
        ("redis://user:hunter2@@host", "redis://user:***@host"),
        ("https://hunter2@host/path", "https://***@host/path"),
        ("s3://bucket/x?secret_key=hunter2&region=eu", "s3://bucket/x?secret_key=***&region=eu"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock?password=***"),
    ],
)
def test_urls_show_all_but_the_secret(url, shown):
    secret = SecretUrl(url)
    assert str(secret) == shown
    assert repr(secret) == f"SecretUrl({shown!r})"
    assert secret.reveal() == url
    assert mask_url(f"cannot reach {url} today") == f"cannot reach {shown} today"


def test_a_secret_shows_only_that_there_is_one():
    secret = Secret(WORD)
    assert f"{secret} {secret!r} {[secret]}" == "*** Secret('***') [Secret('***')]"
    assert secret.reveal() == WORD
    assert secret == Secret(secret)
    assert secret != Secret("other")
    assert hash(secret) == hash(Secret(WORD))
    assert SecretUrl("REDIS://x").scheme == "redis"


GOOD = {"backend": "remote", "capacity": "1GiB", "url": f"redis://u:{WORD}@host", "password": WORD}


def test_neither_repr_nor_effective_config_show_it(remote):
    config = load_config({"tiers": [GOOD]})
    assert config.tiers[0].options["password"].reveal() == WORD
    for text in (repr(config), str(config), repr(config.effective()), repr(config.tiers[0].build_backend().__dict__)):
        assert WORD not in text
    assert config.effective()["tiers"][0]["url"] == "redis://u:***@host"


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": "x"},
        {"password": [WORD]},
        {"password": {"a": WORD}},
        {"pasword": WORD},
        {"secret": WORD},
        {"api_key": WORD},
        {"urll": f"redis://u:{WORD}@host"},
        {"url": [f"redis://u:{WORD}@host"]},
        {"extra": {"nested": {"password": WORD}}},
        {"extra": [f"redis://u:{WORD}@host"]},
        {"codecs": [{"name": "zstd", "token": WORD}]},
        {"backend": f"redis://u:{WORD}@host"},
    ],
)
def test_no_error_shows_it(remote, changes):
    with pytest.raises(ConfigError) as caught:
        load_config({"tiers": [GOOD | changes]})
    assert WORD not in "".join(traceback.format_exception(caught.value))
    seen: list[BaseException | None] = [caught.value]
    while seen[-1] is not None:  # not even where only a debugger looks
        seen.append(seen[-1].__cause__ or seen[-1].__context__)
    assert not any(WORD in repr(error) for error in seen)
