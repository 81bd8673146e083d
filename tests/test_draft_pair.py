"""A real pair: Qwen2.5-Coder-0.5B drafts for Qwen2.5-Coder-1.5B. Only where both files are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from polymodel import Draft, Engine

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("threads", [2], indirect=True)]

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a function in C that reverses a string in place.",
    "Explain what a hash table is in two sentences.",
    "Rename the variable n to count in this code:\ndef double(n):\n    return n + n\n",
)
NUM_NEW = 32


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    given = request.config.getoption("--coder-pair")
    if given is None:
        pytest.skip("give --coder-pair TARGET DRAFTER")
    return Path(given[0]), Path(given[1])


def test_the_smaller_model_drafts_and_changes_no_token(pair: tuple[Path, Path]) -> None:
    with Engine(budget="6GiB", kv_budget="1GiB") as engine:
        engine.add("target", pair[0])
        engine.add("small", pair[1])
        assert engine["target"].vocab_digest == engine["small"].vocab_digest
        num_drafted = num_accepted = 0
        for prompt in PROMPTS:
            ask = {"messages": [{"role": "user", "content": prompt}], "max_new_tokens": NUM_NEW}
            plain = engine.generate("target", draft=None, **ask)
            for draft in (Draft("small"), Draft("small", tokens=3, width=2), Draft(("ngram", "small")), Draft("auto")):
                out = engine.generate("target", draft=draft, **ask)
                assert out.tokens == plain.tokens, draft
                assert out.metrics.num_target_forwards <= plain.metrics.num_target_forwards
                m, ratio = out.metrics, out.metrics.tokens_per_second / plain.metrics.tokens_per_second
                print(
                    f"{draft.by!s:22} width {draft.width}: {m.num_target_forwards} forwards of "
                    f"{plain.metrics.num_target_forwards}, {m.num_accepted} of {m.num_drafted} accepted, "
                    f"{m.mean_acceptance_length:.2f} tokens a forward, x{ratio:.2f} plain"
                )
                num_drafted, num_accepted = num_drafted + m.num_drafted, num_accepted + m.num_accepted
            drawn = engine.generate("target", draft="small", temperature=0.8, top_p=0.95, seed=1, **ask)
            engine.verify_exact(drawn)
        assert 0.2 * num_drafted < num_accepted < num_drafted
