"""Turn conversations into tokens, and mark which are learned.

The tokenizer's chat template renders a conversation in transformers' sandbox, and its text is tokenised as transformers
does it. The assistant's words are learned and the rest is read. Templates with {% generation %} marks define them: a
token is learned if one of its characters is between the marks. For other templates, the messages before an answer are
rendered with the template's generation prompt, and the messages up to the answer without it. If the first text begins
the second, and the second begins the whole, the answer lies between their ends. Otherwise (templates that render a turn
differently once another follows) the conversation is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from training.data.batch import Longs
from training.data.shards import Flags
from upcycle.io import strict
from upcycle.text import templates
from upcycle.text import tokens as text
from upcycle.text.growth import check_growth

LOSSES = ("assistant", "all")
COLUMNS = ("messages", "conversations", "prompt", "completion", "tools")  # columns of a row
ROLES = {  # values of `from`
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
LONG = 1 << 22  # characters of a conversation that are read, because a tokenizer takes 50 bytes for each
Span = tuple[int, int]


class Refused(Exception):
    """The template refuses this conversation."""


@dataclass(frozen=True)
class Talk:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    given: int  # messages of the prompt, which are not learned
    where: str


@dataclass(frozen=True)
class Tokens:
    """A tokenised conversation."""

    ids: Longs
    scored: Flags
    bytes: int  # of the text of scored tokens
    cut: bool


# ---- reading a row


def talk(row: Any, column: str, where: str) -> Talk:
    """Return the conversation in a row: messages of {role, content} or {from, value} under `column` (else `messages` or
    `conversations`), or a prompt and its completion. Raise a ValueError if there is none."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {strict.short(row)}; it must have keys, one of them messages")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise ValueError(f"{where} has tools {strict.short(tools)}; they must be a list of JSON schemas")
    found = [name for name in (column,) if name] or [c for c in COLUMNS[:2] if row.get(c) is not None]
    if found:
        return Talk(messages(row.get(found[0]), f"{where}, {found[0]},"), tools or None, 0, where)
    if row.get("prompt") is None or row.get("completion") is None:
        raise ValueError(
            f"{where} has no messages, conversations or prompt with completion, only "
            f"{', '.join(map(str, row)) or 'nothing'}; name the conversation's column, FILE#COLUMN, or leave kind=chat "
            "out where it is plain text"
        )
    parts = {"prompt": row["prompt"], "completion": row["completion"]}
    first, then = (
        [{"role": role, "content": value}] if isinstance(value, str) else messages(value, f"{where}, {name},")
        for role, (name, value) in zip(("user", "assistant"), parts.items(), strict=True)
    )
    return Talk([*first, *then], tools or None, len(first), where)


def messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {strict.short(value)}; it must be a list of messages")
    return [message(each, f"{where} message {number}") for number, each in enumerate(value, 1)]


def message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {strict.short(value)}; it must be {{role, content}} or {{from, value}}")
    said = {key: each for key, each in value.items() if each is not None}  # parquet stores every key in every message
    if "role" not in said and "from" in said:
        role = said.pop("from")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where} is from {strict.short(role)}; it must be one of {', '.join(ROLES)}")
        said = {"role": ROLES[role], "content": said.pop("value", None), **said}
    if not isinstance(said.get("role"), str):
        raise ValueError(f"{where} has no role; it must be {{role, content}} or {{from, value}}")
    if not isinstance(said.get("content"), str) and not ("content" not in said and said.get("tool_calls")):
        raise ValueError(f"{where} has content {strict.short(said.get('content'))}; it must be text")
    return said


# ---- rendering


@dataclass(frozen=True)
class Renderer:
    folder: Path  # the tokenizer's folder
    loss: str  # assistant | all
    sequence: int  # longest conversation in tokens

    @cached_property
    def tokenizer(self) -> Any:
        """Load the tokenizer with transformers, without code of the folder."""
        from transformers import AutoTokenizer

        with text.explained(self.folder):
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def backend(self) -> Any:
        found = self.tokenizer.backend_tokenizer
        check_growth(found, self.folder / "tokenizer.json")
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def template(self) -> str:
        try:
            found: str = self.tokenizer.get_chat_template()
        except ValueError:
            raise ValueError(
                f"the tokenizer of {self.folder} has no chat template; give that of a chat model, or add a "
                "chat_template.jinja whose special tokens it has"
            ) from None
        return found

    @cached_property
    def marked(self) -> bool:
        return MARK.search(self.template) is not None

    def check(self) -> None:
        """Raise a ValueError if the template is missing or invalid."""
        from jinja2 import TemplateSyntaxError

        try:
            self.rendered(Talk([{"role": "user", "content": ""}], None, 0, ""))
        except Refused as refused:
            if isinstance(refused.__cause__, TemplateSyntaxError):
                raise ValueError(f"the chat template of {self.folder} cannot be read: {refused}") from None

    @property
    def mark(self) -> dict[str, Any]:
        """Return everything that decides the tokens of a conversation, except the tokenizer."""
        sha = hashlib.sha256(self.template.encode()).hexdigest()
        return {"loss": self.loss, "sequence": self.sequence, "template": sha}

    def rendered(self, talk: Talk, count: int | None = None, answer: bool = False) -> tuple[str, list[Span]]:
        """Return the text of the first messages and the spans between marks. `answer`: add the generation prompt."""
        render: Any = import_module("transformers.utils.chat_template_utils").render_jinja_template
        try:
            with templates.bounded(f"the chat template of {self.folder}"):
                (found,), spans = render(
                    [list(talk.messages[:count])],
                    tools=talk.tools,
                    chat_template=self.template,
                    return_assistant_tokens_mask=self.marked,
                    add_generation_prompt=answer,
                    **self.tokenizer.special_tokens_map,
                )
        except templates.TooMuch:
            raise
        except Exception as error:  # a template may raise anything
            raise Refused(f"{' '.join(str(error).split()):.200}") from error
        return found, spans[0] if self.marked else []

    def spans(self, talk: Talk) -> tuple[str, list[Span]]:
        """Return the conversation's text and its learned spans. Raises Refused."""
        whole, marked = self.rendered(talk)
        if self.loss == "all":
            return whole, [(0, len(whole))]
        answers = [number for number, said in enumerate(talk.messages) if said["role"] == "assistant"]
        if self.marked:
            if not any(number < talk.given for number in answers):
                return whole, marked
            before, _ = self.rendered(talk, talk.given, answer=True)
            self.must_begin(whole, before, talk)
            return whole, [span for span in marked if span[0] >= len(before)]
        found = []
        for number in answers:
            if number >= talk.given:
                before, _ = self.rendered(talk, number, answer=True)
                after, _ = self.rendered(talk, number + 1)
                self.must_begin(after, before, talk)
                self.must_begin(whole, after, talk)
                found.append((len(before), len(after)))
        return whole, found

    def must_begin(self, whole: str, part: str, talk: Talk) -> None:
        if whole.startswith(part):
            return
        how = (
            "write it as messages"  # where every answer is learned
            if self.marked
            else "put {% generation %} and {% endgeneration %} around what the assistant says in it"
        )
        raise ValueError(
            f"{talk.where}: the chat template of {self.folder} renders a turn otherwise once another follows, so it is "
            f"not known which tokens the answer is; {how}, or write loss=all"
        )

    def tokens(self, talks: Sequence[tuple[str, list[Span]]]) -> list[Tokens | None]:
        """Return the tokens of conversations, cut after `sequence`; None for those with nothing to learn."""
        # large crawls contain half surrogate pairs, which are not text
        texts = [whole[:LONG].encode("utf-8", "replace").decode() for whole, _ in talks]
        with text.explained(self.folder):
            found = self.backend.encode_batch(texts, add_special_tokens=False)
        return [
            self.scored(each, encoding, spans, len(whole) > LONG)
            for each, encoding, (whole, spans) in zip(texts, found, talks, strict=True)
        ]

    def scored(self, said: str, encoding: Any, spans: Sequence[Span], cut: bool) -> Tokens | None:
        ids: Longs = np.array(encoding.ids[: self.sequence], np.int64)
        if not len(ids):
            return None
        begin, end = np.array(encoding.offsets[: self.sequence], np.int64).T
        scored: Flags = np.zeros(len(ids), np.uint8)
        size = 0
        for first, last in spans:
            scored[(begin < last) & (end > first)] = 1
            size += len(said[max(first, end[0]) : min(last, end[-1])].encode())
        scored[0] = 0  # nothing comes before it
        if not scored.any():
            return None
        return Tokens(ids, scored, size, cut or len(encoding.ids) > len(ids))
