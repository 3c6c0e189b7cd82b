"""A prompt computed once; sequences that share its cells, decoded together, one forward a step.

python shared_prefix.py SmolLM2-135M-Instruct.gguf
"""

import sys

import numpy as np

from cellkv import Executor, Model

PROMPT = "The capital of Sweden is Stockholm. The capital of Norway is Oslo. The capital of"


def decode(executor: Executor, seqs: list[int], tokens: list[int], n_steps: int) -> np.ndarray:
    """Continue each sequence with its token, then with the likeliest: [n_seqs, 1 + n_steps]."""
    steps = [np.array(tokens)]
    for _ in range(n_steps):
        logits = executor.run(steps[-1], seqs)  # [n_seqs, n_vocab]
        steps.append(logits.argmax(axis=1))
    return np.stack(steps, axis=1)


with (
    Model.load(sys.argv[1]) as model,
    model.new_cache() as cache,
    model.executor(cache) as executor,
):
    tokenizer = model.tokenizer
    france, egypt, japan, greece, cuba = tokenizer.encode(" France Egypt Japan Greece Cuba")

    # The prompt is computed once; nobody needs its logits.
    prompt = tokenizer.encode(PROMPT)
    shared = cache.open()
    executor.run(prompt, shared, outputs=[])

    # Three sequences share its cells: each costs the cells of its own tokens alone.
    seqs = [cache.clone(shared) for _ in range(3)]
    for answer in decode(executor, seqs, [france, egypt, japan], n_steps=3):
        print(tokenizer.decode(answer))

    # The second goes back to the prompt's end; the third ends, another takes its place.
    cache.rewind(seqs[1], len(prompt))
    cache.close_seq(seqs[2])
    seqs[2] = cache.clone(shared)
    for answer in decode(executor, seqs[1:], [greece, cuba], n_steps=3):
        print(tokenizer.decode(answer))

    stats = cache.stats
    print(f"{stats.used_cells} cells in use, by sequences that own {stats.owned_cells}")
