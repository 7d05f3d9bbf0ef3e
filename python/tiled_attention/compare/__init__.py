"""`python -m tiled_attention compare`: the operators beside PyTorch's own, on made-up and on real input.

With `--out DIR` it writes `compare.json` and PNG plots. The JSON is one object; times are seconds, memory is bytes, a value that does not
exist is null:

    version          1
    quick            bool
    machine          cpu, architecture, logical_cpus, usable_cpus, threads, isa, isas, memory_gib, system, python, torch,
                     peak_gflops {dtype: GFLOP/s of all threads, measured by a loop of multiply-adds},
                     clock_mhz, clock_source, clock_peak_gflops (float32, what that clock allows)
    parity           rows of one tensor of one case:
                     case, id (sizes and options), dtype, tensor ("out", "grad_query", ...), largest (magnitude in float64),
                     tiled, sdpa, multihead, math (largest error against float64; null where that one has no such option), limit, passed
    speed            rows of one (variant, dtype, n, direction):
                     shape (batch, num_heads, n, head_dim), seconds {tiled, sdpa, math}, module_seconds {tiled, multihead},
                     sdpa_ratio, math_ratio, multihead_ratio (their time over ours), share_of_peak (over visible pairs),
                     skipped {implementation: why}
    memory           head_dim, dtype, direction, quoted (the line at n = 4096 or null), rows of
                     implementation, n, bytes (peak beyond the inputs), seconds, stopped (why nothing was measured)
    linear           num_heads, head_dim; parity like above (case, id, dtype, tensor, tiled, definition, limit, passed; the errors of
                     ta.linear_attention and of its definition in the same dtype against that in float64);
                     speed: rows of one (variant, dtype, n, direction), seconds {linear, composite, sdpa, exact}, composite_ratio,
                     sdpa_ratio, exact_ratio, share_of_peak; crossover {direction: the first length from which it is faster than exact
                     causal attention, or null}; memory: rows of implementation, n, bytes, seconds; decode: rows of position,
                     seconds {linear, exact}, bytes {linear, exact}; favor: what favor.sentence_encoder returns, or missing
    operators        the other operators: parity rows (case, n, dtype, tensor, tiled, definition, limit, passed; errors against the
                     definition in float64); speed: rows of one (case, dtype, n, direction), seconds {tiled, peer: ...},
                     ratios {peer: their time over ours}, share (visible share of the pairs, or null); memory: rows of implementation, n,
                     bytes, seconds, of additive attention, none if quick; densities: rows of mask, n, density, dense, passed; recall:
                     rows of num_hashes, pairs, recall, weight, error, passed, of lsh_attention; counts: rows of what, formula, counted,
                     torch, passed
    models           rows of one model: model, missing (what is not installed; then nothing else is there),
                     eager_difference (of the model's own two implementations), limit, seconds, ways {override_sdpa, attn_implementation:
                     difference, passed, served {layer: calls}, all_served, seconds, loss};
                     sentences, padded_share for the encoder; tokens, loss, generation for the decoder, generation being rows of
                     prompts, texts, seconds, ways {...: equal, gap (of the two tokens' logits where texts part), passed, seconds}
    training         text, steps, stock_losses, tiled_losses, stock_eval_loss, tiled_eval_loss, difference, limit, passed,
                     served {layer: calls}, all_served
    failures         what broke, as text; the command exits with 1 unless this is empty
    seconds          how long each step took

`compare --distributed N` compares N processes that share a sequence with one, and nothing else. Its JSON is `distributed.json`:

    version, quick, machine, failures, seconds   as above
    ranks            N
    num_heads        of what is measured, as head_dim
    parity           rows of one tensor of one call: case, dtype, n, tensor, one_process (root mean square of its distance from float64),
                     tiled (the same of the ranks from one process), limit, largest (error of the ranks against float64), largest_limit,
                     passed
    work             rows of layout, n, shares (causal pairs of each rank, over their mean), limit, passed (null: not judged)
    measured         rows of operator, n: one_bytes, bytes [of each rank] (peak above the interpreter's baseline, inputs and results
                     included), limit, passed (null where one process needs too little to judge), one_seconds, seconds (of the slowest
                     rank, forward+backward)
    sent             rows of operator, n, direction: bytes [of each rank over its connections to others] (null where the system does not
                     count them), formula (of all ranks), limit, passed
"""
