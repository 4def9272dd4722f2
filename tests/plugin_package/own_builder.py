"""A PEP 517 builder for one pure module: what a wheel is, without any build tool."""

import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).parent


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    entry_points = ""
    for group, entries in project["entry-points"].items():
        entry_points += f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
    contents = {
        "kvtier_dict_backend.py": (HERE / "kvtier_dict_backend.py").read_text(encoding="utf-8"),
        f"{stem}.dist-info/METADATA": "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".format(**project),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": entry_points,
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{stem}.dist-info/RECORD"))
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for path, text in {**contents, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel
