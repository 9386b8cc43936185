"""Answer lm-eval's requests with our engine; tokens and scores equal those of lm-eval's own HFLM.

lm-eval makes the prompts and computes the metrics; in between it asks for log-likelihoods and greedy texts. Every
process asks for everything and the engine divides the work, so no process waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evaluation.ask import load
from evaluation.ask.engine import Engine, Score
from evaluation.ask.packing import Ids
from evaluation.ask.remember import Remembered, key
from evaluation.ask.tasks import check_greedy
from upcycle.text import templates

Pair = tuple[list[int], list[int]]
Done = Callable[[Mapping[int, Any]], None]
GENERATED = 256  # tokens, if a task sets no number; the same as HFLM


class DecoderLM(TemplateLM):  # type: ignore[misc]
    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        remembered: Remembered | None = None,
        stops: Iterable[int] = (),
        generate: int = 0,
        max_length: int = 0,
    ) -> None:
        """Set up the model. `stops` are tokens of generation_config.json that also end a text; `generate` limits the
        tokens of a text, whatever the task says; `max_length` limits the tokens that are read."""
        super().__init__()
        self.generate = generate
        self.engine, self.tokenizer, self.remembered = engine, tokenizer, remembered
        context = engine.model.dense.context
        if not 0 <= max_length <= context:
            raise ValueError(f"max_length is {max_length} and the model's context {context}; write 1 to {context}")
        self.max_length = max_length or context
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token, and texts need one between them; set its eos_token"
            )
        self.stops = {tokenizer.eos_token_id, *stops}
        self.cut = 0  # requests that were longer than the model's context and lost their beginning
        self.asked = self.recalled = 0
        self.names: set[str] = set()  # of the requests of earlier calls
        self.chat: str | None = None  # the chat template that chat_template() chose

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        token: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as text, by the tokenizer's template; leave the system message out if the template
        has none."""
        options: dict[str, Any] = {
            "tokenize": False, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt, **({"chat_template": self.chat} if self.chat else {}),
        }  # fmt: skip
        try:
            with templates.bounded("the tokenizer's chat template"):
                return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:
            spoken = [message for message in chat_history if message["role"] != "system"]
            with templates.bounded("the tokenizer's chat template"):
                return str(self.tokenizer.apply_chat_template(spoken, **options))

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the tokenizer's template, by its name if there are several; raise a ValueError if there is none."""
        if not chat_template:
            return ""
        given = self.tokenizer.chat_template
        named = given if isinstance(given, dict) else {"default": given} if given else {}
        name = "default" if chat_template is True else chat_template
        if name not in named:
            raise ValueError(
                f"the tokenizer has no chat template {name!r} (it has {', '.join(named) or 'none'}); leave "
                "apply_chat_template out, or give tokenizer=FOLDER with one"
            )
        self.chat = str(named[name])
        return self.chat

    # ---- tokens of texts

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.encode([string], add_special_tokens)[string]

    def encode(self, texts: Iterable[str], special: bool | None = None) -> dict[str, list[int]]:
        """Return the tokens of each text, made on all processors; a text that starts with the prefix gets no second
        one."""
        prefix = self.tokenizer.decode(self.prefix_token_id)
        found: dict[str, list[int]] = {}
        unique = list(dict.fromkeys(texts))
        for bare in (False, True):
            part = [t for t in unique if bare == (special is False or (special is None and t.startswith(prefix)))]
            found |= load.encoded(self.tokenizer, part, special=not bare)
        return found

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Return TemplateLM's token pairs, all at once; a continuation is the rest of the whole text after its
        context."""
        moved = [moved_spaces(*pair) for pair in texts]
        whole = self.encode([a + b for a, b in moved if a] + [a for a, _ in moved if a])
        alone = self.encode([b for a, b in moved if not a], special=False)
        out = []
        for context, continuation in moved:
            if context:
                ids = whole[context]
                out.append((ids, whole[context + continuation][len(ids) :]))
            else:
                ids = alone[continuation]
                out.append((ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids))
        return out

    # ---- lm-eval's requests

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Score]:
        return self.scores(self.pairs([request.args for request in requests]))

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> list[Score]:
        return self.scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        ids = self.encode(texts)
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(ids[text], self.prefix_token_id, self.max_length, 1)
            ]
            for text in texts
        ]
        scores = iter(self.scores([window for text in windows for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        end = self.tokenizer.decode(self.eot_token_id)
        kinds: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        order = []
        for request in requests:
            prompt, settings = request.args
            check_greedy(settings, request.task_name or "a task")
            options = normalize_gen_kwargs(settings, GENERATED)
            kind = (self.generate or options["max_gen_toks"], tuple(handle_stop_sequences(options["until"], end)))
            kinds.setdefault(kind, []).append(prompt)
            order.append((kind, prompt))
        written = {kind: self.texts(list(dict.fromkeys(prompts)), *kind) for kind, prompts in kinds.items()}
        return [written[kind][prompt] for kind, prompt in order]

    # ---- answers, remembered or computed

    def scores(self, pairs: Sequence[Pair]) -> list[Score]:
        inputs = []
        for context, continuation in pairs:
            if len(continuation) > self.max_length or not continuation:
                raise ValueError(
                    f"an item asks for the likelihood of {len(continuation)} tokens, and the model reads at most "
                    f"{self.max_length}, at least 1; leave the item out or cut it"
                )
            keep = self.max_length + 1 - len(continuation)
            self.cut += len(context) > keep
            inputs.append((np.asarray(context[-keep:], np.int64), np.asarray(continuation, np.int64)))
        names = [key("score", a, b) for a, b in inputs]
        found = self.answers(names, lambda chosen, *rest: self.engine.score([inputs[n] for n in chosen], *rest))
        return [(found[name][0], bool(found[name][1])) for name in names]

    def texts(self, prompts: Sequence[str], limit: int, until: tuple[str, ...]) -> dict[str, str]:
        room = self.max_length - limit
        if room <= 0:
            raise ValueError(
                f"a task writes up to {limit} tokens and the model's context is {self.max_length}; "
                f"leave the task out or write generate={max(1, self.max_length // 2)}"
            )
        ids = self.encode(prompts)
        self.cut += sum(len(ids[prompt]) > room for prompt in prompts)
        inputs: list[Ids] = [np.asarray(ids[prompt][-room:], np.int64) for prompt in prompts]
        stops = ",".join(map(str, sorted(self.stops)))  # these tokens end a text, as the stop words do
        names = [key("write", x, str(limit), stops, *until) for x in inputs]
        stopped = partial(self.stopped, looks=self.looks(until))
        found = self.answers(
            names, lambda chosen, *rest: self.engine.write([inputs[n] for n in chosen], limit, stopped, *rest)
        )
        written = [self.tokenizer.decode(list(found[name]), skip_special_tokens=True) for name in names]
        return {
            prompt: postprocess_generated_text(text, list(until), None)
            for prompt, text in zip(prompts, written, strict=True)
        }

    def looks(self, until: Iterable[str]) -> list[tuple[str, int]]:
        """Return each stop word with the number of last tokens that HFLM searches for it."""
        words = [word for word in until if word]
        return [(word, len(self.tokenizer.encode(word, add_special_tokens=False)) + 2) for word in words]

    def stopped(self, tokens: Sequence[int], looks: Sequence[tuple[str, int]]) -> bool:
        """Return whether a text ends: with a token that ends texts, or with a stop word.

        HFLM searches few tokens, and a decoder may show a stop word in them that it does not show in more (after bytes
        that break UTF-8), or the other way round (a word of other tokens). In the second case HFLM writes on, and cuts
        the text at the word afterwards, which gives the same text."""
        if tokens[-1] in self.stops:
            return True
        # a token is at least a byte, so these tokens hold any stop word
        most = max((len(word.encode()) for word, _ in looks), default=0) + 2
        tail, texts = self.tokenizer.decode(tokens[-most:]), dict[int, str]()
        for word, count in looks:
            if count not in texts:
                texts[count] = self.tokenizer.decode(tokens[-count:])
            if word in texts[count] or (word in tail and word in self.tokenizer.decode(tokens)):
                return True
        return False

    def answers(
        self, names: Sequence[str], compute: Callable[[list[int], Done, Container[int]], None]
    ) -> dict[str, Any]:
        """Return the answers of all processes by name; `compute` answers the requests with the given numbers.

        Each process saves its own answers as they come. All read the same saved answers, so they agree on the requests
        that are left. `compute` gets the answered requests too, with their places: it packs all requests into the
        forwards of an evaluation that was never stopped, so that the rest gets the same digits.
        """
        known = self.remembered.answers if self.remembered else {}
        found = {name: known[name] for name in names if name in known}
        self.asked += len(names)
        self.recalled += sum(name in found for name in names)
        whole = list({name: n for n, name in enumerate(names) if name not in self.names or name not in found}.values())
        answered = {place for place, n in enumerate(whole) if names[n] in found}
        self.names.update(names)
        mine: dict[str, Any] = {}

        def done(answers: Mapping[int, Any]) -> None:
            new = {names[whole[place]]: answer for place, answer in answers.items() if place not in answered}
            mine.update(new)
            if self.remembered:
                self.remembered.put(new)

        with self.engine.open():
            compute(whole, done, answered)
        found |= {name: answer for part in self.engine.ranks.gather(mine) for name, answer in part.items()}
        if self.remembered:
            self.remembered.answers.update(found)
        return found


def moved_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces from a context's end to the next word, because tokenizers join them to it."""
    bare = context.rstrip()
    return (bare, context[len(bare) :] + continuation) if bare else (context, continuation)
