"""Talk to a model for `upcycle chat`: load it as transformers does, and stream its answers.

No code in a model's folder runs unless the user writes trust_remote_code=true. The modelling file of an `upcycled`
folder must equal the one that we ship, byte for byte, and then our own copy runs.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

from upcycle import plugin
from upcycle.arch import registry
from upcycle.arch.targets.upcycled import MODELING
from upcycle.cli import frame
from upcycle.config.values import at_least, check_values, finite, one_of, seed, share_of_one
from upcycle.io import strict
from upcycle.io.checkpoint import Checkpoint, downloaded, hub_match
from upcycle.text import templates
from upcycle.text import tokens as text

DTYPES = ("float32", "bfloat16", "float16")
LARGE = 2e9  # loading shows its progress from this many bytes of weights
CHECKPOINTS = "checkpoints"  # a folder that each training run has
RESET = "/reset"


@dataclass(frozen=True)
class ChatConfig:
    model: str = ""  # the first word: a folder, a hub id, or a training run's folder, which stands for its export
    prompt: str = ""  # ask this and end; "": ask what standard input holds, or talk on a terminal
    system: str = ""  # the system message, which comes before the conversation
    tokens: int = 512  # tokens of an answer, at most
    temperature: float | None = None  # 0: always take the likeliest token; null: as generation_config.json says
    # draw from the likeliest tokens of this total probability; null: as generation_config.json says
    top_p: float | None = None
    seed: int | None = None  # seed of the draws; null: another one each time
    device: str = ""  # cuda | cpu; "": cuda if there is one
    dtype: str = ""  # float32 | bfloat16 | float16; "": float32 on a CPU, bfloat16 on a GPU
    # run code from the model's folder; read it first, because a stranger may have written it
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        rules = {"tokens": at_least(1), "temperature": finite(), "top_p": share_of_one(), "seed": seed()}
        check_values(self, "", rules | {"dtype": one_of(("", *DTYPES))})


def read_config(words: Sequence[str]) -> ChatConfig:
    """Read `MODEL key=value ...`; take the texts of prompt and system as they are."""
    texts = [word.partition("=")[::2] for word in words if word.startswith(("prompt=", "system="))]
    others = [word for word in words if not word.startswith(("prompt=", "system="))]
    return frame.named(ChatConfig, others, "model", values=texts)


def chat(config: ChatConfig) -> None:
    """Answer the prompt or the text of standard input; on a terminal, answer line after line."""
    on_terminal = not config.prompt and sys.stdin is not None and sys.stdin.isatty()
    prompt = config.prompt or ("" if on_terminal or sys.stdin is None else sys.stdin.read())
    if not on_terminal and not prompt.strip():
        raise ValueError('prompt is empty and so is standard input; write prompt="...", or start chat on a terminal')
    talk = Talk(config)
    print(talk.about + f"; {RESET} starts over, Ctrl-D leaves" * on_terminal, file=sys.stderr)
    if on_terminal:
        converse(talk)
    else:
        talk.answer(prompt)


def converse(talk: Talk) -> None:
    """Answer each line of a terminal. Ctrl-C ends an answer; Ctrl-C or Ctrl-D at the prompt leaves."""
    import readline  # noqa: F401  gives input() editing and a history

    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == RESET:
            talk.reset()
        elif line:
            try:
                talk.answer(line)
            except KeyboardInterrupt:  # the part that was printed stays in the conversation
                continue
            except ValueError as error:
                print(f"{frame.NAME}: {frame.printable(str(error))}", file=sys.stderr)


class Talk:
    """Hold a model, its tokenizer, and the conversation so far."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.device = device_of(config.device)
        self.dtype = config.dtype or ("float32" if self.device.type == "cpu" else "bfloat16")
        self.folder = folder_of(config.model)
        self.model, self.tokenizer = load(self.folder, config, self.device, getattr(torch, self.dtype))
        self.has_template = bool(self.tokenizer.chat_template)
        if config.system and not self.has_template:
            raise ValueError(
                f"{self.folder} has no chat template, and system= needs one; write the text in front of the prompt "
                "instead"
            )
        if config.seed is not None:
            torch.manual_seed(config.seed)
        self.reset()

    @property
    def about(self) -> str:
        """Return one line about the model that was loaded."""
        name, count = frame.printable(self.config.model), sum(p.numel() for p in self.model.parameters())
        of = "" if str(self.folder) == self.config.model or hub_match(self.config.model) else f" (its {self.folder})"
        how = "chat template" if self.has_template else "no chat template, so it continues what you write"
        kind = f"{self.model.config.model_type}, {count / 1e6:,.1f} M parameters"
        return f"{name}{of}: {kind}, {self.dtype} on {self.device}, {how}"

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [{"role": "system", "content": self.config.system}] if self.config.system else []

    def answer(self, prompt: str) -> str:
        """Print the answer word by word, and return it; forget a prompt that cannot be answered."""
        inputs = self.encode([*self.messages, {"role": "user", "content": prompt}])
        length = inputs["input_ids"].shape[1]
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = self.config.tokens if context is None else context - length
        if room < 1:
            raise ValueError(
                f"this is {length} tokens with the conversation so far, and the model's context is {length + room}; "
                "write "
                f"less, or {RESET}"
            )
        streamer: Any = Printer(self.tokenizer)
        try:
            with torch.inference_mode():
                found = self.model.generate(
                    **inputs, **self.options(), max_new_tokens=min(self.config.tokens, room), streamer=streamer
                )
        except KeyboardInterrupt:
            streamer.end()
            self.keep(prompt, "".join(streamer.said))
            raise
        said = str(self.tokenizer.decode(found[0, length:], skip_special_tokens=True))
        self.keep(prompt, said)
        return said

    def keep(self, prompt: str, said: str) -> None:
        """Add a question and its answer to the conversation."""
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]

    def encode(self, messages: list[dict[str, str]]) -> Any:
        """Return the tokens of a conversation, by the tokenizer's chat template if it has one."""
        if self.has_template:
            try:
                with templates.bounded(f"the chat template of {self.folder}"):
                    said = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except TemplateError as error:
                raise ValueError(f"the chat template of {self.folder} refuses this conversation: {error}") from None
        else:
            said = "".join(
                "\n" * (number > 0 and m["role"] == "user") + m["content"] for number, m in enumerate(messages)
            )
        with text.explained(self.folder):
            found = self.tokenizer(said, add_special_tokens=not self.has_template, return_tensors="pt")
        most, embeddings = int(found["input_ids"].max()), self.model.get_input_embeddings().num_embeddings
        if most >= embeddings:
            raise ValueError(
                f"the tokenizer of {self.folder} gives id {most}, and the model has {embeddings} embeddings"
            )
        return found.to(self.device)

    def options(self) -> dict[str, Any]:
        """Return the settings that replace the model's generation settings."""
        asked = {"temperature": self.config.temperature, "top_p": self.config.top_p}
        given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if self.config.temperature == 0:
            given = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        elif given:
            given["do_sample"] = True
        settings = self.model.generation_config
        if settings.eos_token_id is None:
            given["eos_token_id"] = self.tokenizer.eos_token_id
        if settings.pad_token_id is None:
            given["pad_token_id"] = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        return {"num_beams": 1, **given}  # beams cannot be streamed


class Printer(TextStreamer):
    """Print text as it comes, without the characters that control a terminal."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.said: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece, and end the line after the last one."""
        self.said.append(text)
        shown = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        print(shown, end="\n" if stream_end else "", flush=True)


# ---- find and load the model


def device_of(name: str) -> torch.device:
    """Return the device of that name; for "", the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device is {name!r}; write device=cpu, or device=cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r} and torch finds no GPU; write device=cpu")
    return device


def folder_of(source: str) -> Path:
    """Return the folder in Hugging Face layout that a word names; for a run, its last export."""
    path = Path(source)
    if (path / CHECKPOINTS).is_dir() or path.parent.name == CHECKPOINTS:
        from training.checkpoint import standalone  # this import takes as long as all others together

        run, _ = standalone.training_run(path)
        if run is not None:
            return export_of(source, standalone.settings_of(run))
    with Checkpoint.open(source) as checkpoint:  # read every header, and check it against its file
        hub_id = hub_match(source) if checkpoint.config.get("auto_map") else None
        return downloaded(hub_id, ["*.py"]) if hub_id else checkpoint.folder


def export_of(source: str, settings: Mapping[str, Any]) -> Path:
    """Return the folder that the run's settings export to."""
    export = settings.get("export")
    if isinstance(export, str) and (Path(export) / "config.json").is_file():
        return folder_of(export)
    raise ValueError(
        f"{source} is a training run without an exported model; write upcycle export {source} FOLDER, then "
        "upcycle chat FOLDER"
    )


def load(folder: Path, config: ChatConfig, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model and its tokenizer; read the tokenizer first, because that fails fastest."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) < LARGE:
        logging.disable_progress_bar()
    trusted = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    config_class, model_class = classes(folder, config)
    settings = config_class.from_pretrained(folder, **trusted)
    if (folder / "tokenizer.json").is_file():
        text.load_tokenizer(folder)  # refuses files that would crash transformers
    with text.explained(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, config=settings, **trusted)
    model, found = model_class.from_pretrained(
        folder, config=settings, dtype=dtype, use_safetensors=True, output_loading_info=True, **trusted
    )
    if lacks := sorted(found["missing_keys"]):
        raise ValueError(f"{folder} lacks {len(lacks)} tensors of its model, the first is {strict.short(lacks[0])}")
    try:
        return model.to(device).eval(), tokenizer
    except torch.OutOfMemoryError:
        raise ValueError(f"{folder} does not fit on {device}; write dtype=bfloat16, or device=cpu") from None


def classes(folder: Path, config: ChatConfig) -> tuple[Any, Any]:
    """Return the classes of the config and of the model: transformers' own, or those that we ship."""
    settings = strict.read_object(folder / "config.json")
    kind, code = settings.get("model_type"), settings.get("auto_map")
    if settings.get("quantization_config") and kind in plugin.names(registry.TARGETS):
        raise ValueError(
            f"{config.model} is quantised, and transformers does not read the scales of quantised experts; serve "
            "it with vLLM, or give the model that it was made from"
        )
    if config.trust_remote_code or not code or kind in transformers.CONFIG_MAPPING:
        return AutoConfig, AutoModelForCausalLM
    hint = "read the code in the folder, and write trust_remote_code=true to run it"
    if kind != "upcycled":
        raise ValueError(f"{config.model} is a {strict.short(kind)}, which only the folder's own code can load; {hint}")
    file = folder / MODELING.name
    if not file.is_file() or file.read_bytes() != MODELING.read_bytes():
        raise ValueError(f"{file} is not the file that this version of upcycle ships; {hint}")
    from upcycle.arch.remote.modeling_upcycled import UpcycledConfig, UpcycledForCausalLM

    return UpcycledConfig, UpcycledForCausalLM
