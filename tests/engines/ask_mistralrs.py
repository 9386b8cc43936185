"""Asks mistral.rs's CPU build, in float32. See asking.py.

Its Python package takes text and gives text, with the log-probability of each token that it generated, and none of a prompt:
so the log-probabilities are those of the greedy tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asking


def answer(question: dict[str, Any]) -> asking.Answer:
    from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which

    folder = Path(question["folder"])
    template = folder.parent / "plain.jinja"  # it takes no prompt without one
    template.write_text("{{ messages[0]['content'] }}")
    which = Which.Plain(model_id=str(folder), dtype=ModelDType.F32)
    runner = Runner(which=which, no_paged_attn=True, prefix_cache_n=0, jinja_explicit=str(template))
    given = ChatCompletionRequest(
        messages=[{"role": "user", "content": question["prompt_text"]}], model="default", max_tokens=question["new"], temperature=0.0, logprobs=True,
        top_logprobs=1, ignore_eos=True,
    )  # fmt: skip
    content = runner.send_chat_completion_request(given).choices[0].logprobs.content
    return {
        "greedy": [one.top_logprobs[0].token for one in content],
        "greedy_logprobs": [one.logprob for one in content],
    }


asking.main(answer)
