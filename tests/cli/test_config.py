"""`kvtier config`: shown, written, described."""

import tomllib

from kvtier.config import load_config


def test_shows_every_option_with_its_default(kvtier, on_disk):
    said = kvtier("config", "show")
    assert said.status == 0
    shown = tomllib.loads(said.out)
    assert shown["deadline_seconds"] == 5.0
    assert [tier["capacity"] for tier in shown["tiers"]] == ["64MiB", "1GiB"]
    assert kvtier("config", "--json").json == shown


def test_what_it_shows_is_a_config(kvtier, on_disk, tmp_path):
    (tmp_path / "again.toml").write_text(kvtier("config").out)
    assert load_config(tmp_path / "again.toml") == load_config(tmp_path / "kvtier.toml")


def test_secrets_are_masked(kvtier, write_config):
    write_config(
        """
        [[tiers]]
        backend = "redis"
        url = "redis://me:hunter2@127.0.0.1:1/0"
        sentinel_password = "hunter3"
        capacity = "1GiB"
        """
    )
    said = kvtier("config", "show")
    assert said.status == 0
    assert "hunter" not in said.text
    assert "redis://me:***@127.0.0.1:1/0" in said.out


def test_without_a_file_it_is_the_default(kvtier, tmp_path):
    said = kvtier("config", "show")
    assert "no config file: the default" in said.out
    assert tomllib.loads(said.out)["tiers"][1]["path"] == str(tmp_path / "default")


def test_a_mistake_is_one_line_and_status_2(kvtier, write_config):
    write_config('[[tiers]]\nbackend = "local-disk"\npaht = "x"\ncapacity = "1GiB"')
    said = kvtier("config", "show")
    assert said.status == 2
    assert "tiers[0].paht" in said.err
    assert "did you mean 'path'" in said.err
    assert "Traceback" not in said.err


def test_file_that_is_not_there(kvtier, tmp_path):
    (tmp_path / "kvtier.toml").touch()
    said = kvtier("ls", "--config", "kvteir.toml")
    assert said.status == 2
    assert "kvtier.toml" in said.err


def test_init_writes_what_loads(kvtier, tmp_path):
    said = kvtier("config", "init", "--path", tmp_path / "kv")
    assert said.status == 0
    config = load_config(tmp_path / "kvtier.toml")
    assert [tier.name for tier in config.tiers] == ["pinned-cpu", "local-disk"]
    assert config.tiers[1].options["path"] == tmp_path / "kv"
    assert config.namespace.revision is None, "one that is made up would let checkpoints share keys"
    assert "name your model and its revision" in said.out


def test_init_with_a_model_is_ready_for_use(kvtier, tmp_path):
    said = kvtier("config", "init", "--model", "org/mine", "--revision", "1a2b3c4")
    namespace = load_config(tmp_path / "kvtier.toml").namespace
    assert (said.status, namespace.model, namespace.revision) == (0, "org/mine", "1a2b3c4")
    assert "name your model" not in said.out
    assert kvtier("config", "init", "-", "--revision", '1"').status == 2


def test_init_lines_in_comments_are_valid_too(kvtier, tmp_path):
    """Somebody will take the "#" away."""
    text = kvtier("config", "init", "-").out
    lines = [line.removeprefix("# ") if "=" in line or "[[" in line else line for line in text.splitlines()]
    (tmp_path / "all.toml").write_text("\n".join(lines))
    assert [tier.name for tier in load_config(tmp_path / "all.toml").tiers] == [
        "pinned-cpu",
        "local-disk",
        "redis",
        "s3",
    ]


def test_init_writes_over_nothing_unless_forced(kvtier, tmp_path):
    (tmp_path / "kvtier.toml").write_text("mine")
    said = kvtier("config", "init")
    assert (said.status, (tmp_path / "kvtier.toml").read_text()) == (2, "mine")
    assert "--force" in said.err
    assert kvtier("config", "init", "--force").status == 0


def test_schema_knows_the_backends(kvtier):
    said = kvtier("config", "schema")
    titles = [tier["title"] for tier in said.json["properties"]["tiers"]["items"]["oneOf"]]
    assert {"backend local-disk", "backend pinned-cpu"} <= set(titles)
    assert said.err == ""
