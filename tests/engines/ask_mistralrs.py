"""Asks mistral.rs's CPU build, in float32. See asking.py.

Its Python package takes text and gives text, with log-probabilities of what comes next, and none of a prompt: so the
text is asked token by token, where a prefix of it has the tokens that it has in the whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import asking

os.environ["MISTRALRS_CPU_KV_F32"] = "1"  # its cache is float16 otherwise


def answer(question: dict[str, Any]) -> asking.Answer:
    from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which

    folder = Path(question["folder"])
    template = folder.parent / "plain.jinja"  # it takes no prompt without one
    template.write_text("{{ messages[0]['content'] }}")
    which = Which.Plain(model_id=str(folder), dtype=ModelDType.F32)
    runner = Runner(which=which, no_paged_attn=True, prefix_cache_n=0, jinja_explicit=str(template))

    def next_tokens(prompt: str, new: int, top: int) -> list[dict[int, float]]:
        given = ChatCompletionRequest(
            messages=[{"role": "user", "content": prompt}], model="default", max_tokens=new, temperature=0.0, logprobs=True,
            top_logprobs=top, ignore_eos=True,
        )  # fmt: skip
        content = runner.send_chat_completion_request(given).choices[0].logprobs.content
        return [{one.token: one.logprob for one in place.top_logprobs} for place in content]

    text, top = question["text"], min(question["vocabulary"], 1000)  # all of a large vocabulary would take minutes
    logprobs = [None if prefix is None else next_tokens(prefix, 1, top)[0] for prefix in question["prefixes"]]
    return {
        "greedy": [next(iter(top)) for top in next_tokens(question["prompt_text"], question["new"], 1)],
        "logprobs": [found and found.get(token) for found, token in zip(logprobs, text[1:], strict=True)],
    }


asking.main(answer)
