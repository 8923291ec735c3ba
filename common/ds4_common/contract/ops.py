"""The closed registry of algorithms a program may name.

Owns: each op's inputs, outputs and attributes - the vocabulary shared by recipes (which write op
lists), validation (which refuses anything else), the reference executor and lowering. Ops are
algorithms, never models. Shapes use T = tokens of the step, R = rows for which logits are wanted.
Activations are float32 unless said otherwise;
k = experts per token.

    embed         (tokens i32 [T], table [V, D]) -> x [T, D]
                  x = scale * table[tokens]
    rms_norm      (x [T, heads*D], weight [D]?) -> y
                  y = x / sqrt(mean(x^2) + eps) * weight, in each of `heads` parts of the row
    matmul        (x [T, K], weight [N, K], bias [N]?) -> y [T, N]
                  y = x weight^T (+ bias)
    matmul_heads  (x [T, H*K], weight [H, N, K]) -> y [T, H*N]
                  y_h = x_h weight_h^T: part h of the row meets matrix h
    rope          (x [T, heads*dim], positions i32 [T], factors [rope_dim/2]?,
                  long_factors [rope_dim/2]?) -> y
                  rotates dims [offset, offset + rope_dim) of each head, the others pass through;
                  pairs: style 0 = adjacent (2i, 2i+1), 1 = halves (i, i+rope_dim/2).
                  theta_i = pos * base^(-2i/rope_dim) / factors[i]; long_factors take the place of
                  factors in an executor whose context is longer than original_context. YaRN when
                  ext_factor > 0, else theta *= freq_scale; cos and sin are scaled by attn_factor
                  (YaRN's own magnitude 1 + 0.1 ln(1/freq_scale) multiplies it when ext_factor > 0).
                  YaRN: c(b) = rope_dim * ln(original_context / (2 pi b)) / (2 ln base);
                  low = max(0, floor(c(beta_fast))); high = min(rope_dim - 1, ceil(c(beta_slow))),
                  neither rounded when truncate is 0;
                  mix_i = ext_factor * (1 - clamp((i - low) / max(0.001, high - low), 0, 1));
                  theta_i = theta_i * (freq_scale * (1 - mix_i) + mix_i).
                  pos is the position plus `shift`; inverse = 1 turns by -theta
    kv_store      (k [T, kvh*dim], v [T, kvh*vdim], positions, banks i32 [T], page_table i32 [B, P])
                  -> (kcache, vcache); CACHE buffers [pages, page_tokens, kvh, dim]. Here and below
                  page_table stands for that of the history which holds the plane: the pages of a
                  SLIDING_WINDOW come and go apart, and nothing reads more than its window
    attend_paged  (q [T, h*dim], kcache, vcache, positions, banks, page_table, sinks [h]?)
                  -> y [T, h*vdim]
                  softmax(s) over the bank's positions 0..pos, or the last `window` of them, pos
                  included, when it is not 0; s = scale * q.k, and soft_cap * tanh(s / soft_cap)
                  when that is not 0; exp(sinks[h]) joins the denominator; GQA by h / kvh
    latent_store  (x [T, dim], positions, banks, page_table) -> plane
                  a CACHE buffer [pages, page_tokens, 1, dim]: key and value in one
    attend_latent (q [T, h*dim], plane, positions, banks, page_table, sinks [h]?)
                  -> y [T, h*value_dim]
                  as attend_paged over the stored vectors, all heads over one; their first value_dim
                  dims are the values
    add           (a [T, D], b [T, D]) -> y
    glu           (gate [T, F], up [T, F]) -> y
                  g = min(gate, limit) and u = clamp(up, -limit, limit) when limit is not 0;
                  act 0 = SiLU: g sigmoid(g) u; 1 = GELU by tanh: g sigmoid(2 sqrt(2/pi)
                  (g + 0.044715 g^3)) u; 2 = shifted: g sigmoid(alpha g) (u + 1)
    soft_cap      (x [T, D]) -> y
                  y = cap * tanh(x / cap)
    gate_row      (x [T, D], gate [T, 1]) -> y
                  y = sigmoid(gate) x
    scale_parts   (x [T, k*D], scales [E] or [1], routes [T, 2k]?, bias [D]?) -> y
                  y_j = scales[e] x_j, e the token's expert j; without routes y = scales[0] x
                  (+ bias)
    slice_heads   (x [T, heads*dim]) -> y [T, heads*width]
                  dims [first, first + width) of each head
    join_heads    (a [T, heads*ka], b [T, heads*kb] or [T, kb]) -> y [T, heads*(ka + kb)]
                  dims of a then of b in each head; one head of b serves all
    route_experts (logits [T, E], bias [E]?, tokens i32 [T]?, table i32 [V, k]?) -> routes [T, 2k]
                  k numbers of experts, best first (equal scores: lower number first), then their k
                  weights. p = scores of the logits: score 0 = softmax, 1 = sigmoid,
                  2 = sqrt(ln(1 + exp)), 3 = the logits themselves. Chosen by p + bias, among the
                  experts of the groups_used best of `groups` groups of neighbours; a group counts
                  as the sum of its group_top best p + bias. w = p of the chosen; score 3: softmax
                  over them; normalize = 1: w / max(sum(w), 2^-14); then w * scale.
                  With a table the experts of token t are table[t], in that order
    matmul_experts (x [T, K] or [T, k*K], routes [T, 2k], weight [E, N, K], bias f32 [E, N]?)
                  -> y [T, k*N]
                  y_j = x_j weight_e^T (+ bias_e), e the token's expert j; one x serves all
    combine_experts (x [T, k*D], routes [T, 2k]) -> y [T, D]
                  y = sum over j, in order, of weight j * x_j
    gather_rows   (x [T, D], rows i32 [R]) -> y [R, D]

Residual streams that exchange: n streams of D values side by side in a row.

    hyper_weights (mix [T, n] or [T, n*(2+n)], scale f32 [1] or [3], base [width of mix]) -> w
                  m = mix * scale + base, one scale for the first n values, the next n and the rest.
                  w = sigmoid(m) + eps; then 2 sigmoid(m); then C [n, n]: softmax of each row of m,
                  + eps, columns / (their sum + eps), and `iterations` - 1 times: rows, then
                  columns, likewise
    hyper_read    (s [T, n*D], w [T, n or n*(2+n)]) -> x [T, D]
                  x = sum over i of w_i s_i
    hyper_write   (y [T, D], s [T, n*D], w [T, n*(2+n)]) -> s' [T, n*D]
                  s'_d = w_(n+d) y + sum over i of C[i][d] s_i

Rows instead of keys and values: a plane of rows [pages, page tokens / ratio, 1, dim] holds one row,
key and value in one, for each `ratio` consecutive positions, in f16 whatever the cache is.

    hadamard      (x [T, heads*dim]) -> y
                  y = H x / sqrt(dim) in each head, H by Sylvester; dim a power of two
    round_floats  (x [T, heads*dim]) -> y
                  the first `dims` of each head in blocks of `block`, each rounded to a float of few
                  bits (nearest, ties to even) times its block's power of two. format 0 = e4m3:
                  2^ceil(log2(max(amax, 1e-4) / 448)); 1 = e2m1: 2^ceil(log2(max(amax, 2^-126 * 6)
                  / 6)); the other dims pass
    compress      (k [T, c*D], gate [T, c*D], bias [ratio, c*D], positions, banks, page_table)
                  -> (state, y [T, D])
                  c = 1: y = sum of softmax(gate + bias[pos % ratio]) k over the `ratio` positions
                  of a window, dim by dim; c = 2: over the D first values of the window before (if
                  any), then the D last of this one. y is 0 but where a window ends. The state,
                  CACHE f32 [pages, 1, 3c, D], holds the running maximum, sum and weighted sum after
                  the page's last token
    store_rows    (x [T, D], positions, banks, page_table) -> plane
                  row pos / ratio = x where (pos + 1) % ratio = 0; tiles = 1: for index_rows
    index_rows    (q [T, h*dim], w [T, h], plane, positions, banks, page_table) -> rows [T, k]
                  the k rows c of the bank, (pos + 1) / ratio of them, with the greatest
                  sum over h of scale * w_h * max(q_h . row_c, 0) (equal: lower number first), in
                  ascending order; all of them where there are no more; -1 in the places left
    attend_rows   (q [T, h*dim], recent, positions, banks, page_table, compressed?, chosen [T, k]?,
                  sinks [h]?) -> y [T, h*dim]
                  softmax(scale * q . row) over the last `window` rows of `recent`, then those of
                  `compressed`: the chosen ones, or all (pos + 1) / ratio; times the rows;
                  exp(sinks[h]) joins the denominator

A scratch buffer may be written many times; each read sees the latest write above it in the list.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class GatedUnit(IntEnum):
    """`act` of glu; DS4_GLU_* of native/op_math.h."""

    SILU = 0
    GELU = 1
    SHIFTED = 2


class RouteScore(IntEnum):
    """`score` of route_experts; DS4_SCORE_* of native/image.h."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2
    LOGITS = 3


class SmallFloat(IntEnum):
    """`format` of round_floats; DS4_SMALL_* of native/image.h."""

    E4M3 = 0
    E2M1 = 1


class OpSpec(msgspec.Struct, frozen=True):
    """Signature of one op. Names ending in `?` are optional; attributes map to their defaults,
    None = required. The output may be the same buffer as an input named in `in_place`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, float | None]
    in_place: tuple[str, ...] = ()


OPS: dict[str, OpSpec] = {
    "embed": OpSpec(("tokens", "table"), ("x",), {"scale": 1.0}),
    "rms_norm": OpSpec(("x", "weight?"), ("y",), {"eps": None, "heads": 1.0}, in_place=("x",)),
    "matmul": OpSpec(("x", "weight", "bias?"), ("y",), {}),
    "matmul_heads": OpSpec(("x", "weight"), ("y",), {}),
    "rope": OpSpec(
        ("x", "positions", "factors?", "long_factors?"),
        ("y",),
        {
            "heads": None,
            "dim": None,
            "rope_dim": None,
            "base": None,
            "style": None,
            "offset": 0.0,
            "freq_scale": 1.0,
            "ext_factor": 0.0,
            "attn_factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_context": 0.0,
            "truncate": 1.0,
            "shift": 0.0,
            "inverse": 0.0,
        },
        in_place=("x",),
    ),
    "kv_store": OpSpec(
        ("k", "v", "positions", "banks", "page_table"),
        ("kcache", "vcache"),
        {"kv_heads": None, "dim": None, "value_dim": None},
    ),
    "attend_paged": OpSpec(
        ("q", "kcache", "vcache", "positions", "banks", "page_table", "sinks?"),
        ("y",),
        {
            "heads": None,
            "kv_heads": None,
            "dim": None,
            "value_dim": None,
            "scale": None,
            "window": 0.0,
            "soft_cap": 0.0,
        },
    ),
    "latent_store": OpSpec(("x", "positions", "banks", "page_table"), ("plane",), {"dim": None}),
    "attend_latent": OpSpec(
        ("q", "plane", "positions", "banks", "page_table", "sinks?"),
        ("y",),
        {
            "heads": None,
            "dim": None,
            "value_dim": None,
            "scale": None,
            "window": 0.0,
            "soft_cap": 0.0,
        },
    ),
    "add": OpSpec(("a", "b"), ("y",), {}, in_place=("a", "b")),
    "glu": OpSpec(
        ("gate", "up"), ("y",), {"act": None, "limit": 0.0, "alpha": 1.0}, in_place=("gate", "up")
    ),
    "soft_cap": OpSpec(("x",), ("y",), {"cap": None}, in_place=("x",)),
    "gate_row": OpSpec(("x", "gate"), ("y",), {}, in_place=("x",)),
    "scale_parts": OpSpec(("x", "scales", "routes?", "bias?"), ("y",), {}, in_place=("x",)),
    "slice_heads": OpSpec(
        ("x",), ("y",), {"heads": None, "dim": None, "first": None, "width": None}
    ),
    "join_heads": OpSpec(("a", "b"), ("y",), {"heads": None}),
    "route_experts": OpSpec(
        ("logits", "bias?", "tokens?", "table?"),
        ("routes",),
        {
            "score": None,
            "normalize": 0.0,
            "scale": 1.0,
            "groups": 1.0,
            "groups_used": 1.0,
            "group_top": 1.0,
        },
    ),
    "matmul_experts": OpSpec(("x", "routes", "weight", "bias?"), ("y",), {}),
    "combine_experts": OpSpec(("x", "routes"), ("y",), {}),
    "gather_rows": OpSpec(("x", "rows"), ("y",), {}),
    "hyper_weights": OpSpec(
        ("mix", "scale", "base"), ("w",), {"streams": None, "eps": None, "iterations": 1.0}
    ),
    "hyper_read": OpSpec(("s", "w"), ("x",), {}),
    "hyper_write": OpSpec(("y", "s", "w"), ("s",), {}, in_place=("s",)),
    "hadamard": OpSpec(("x",), ("y",), {"heads": 1.0}, in_place=("x",)),
    "round_floats": OpSpec(
        ("x",), ("y",), {"format": None, "block": None, "dims": None, "heads": 1.0}, in_place=("x",)
    ),
    "compress": OpSpec(
        ("k", "gate", "bias", "positions", "banks", "page_table"), ("state", "y"), {"ratio": None}
    ),
    "store_rows": OpSpec(
        ("x", "positions", "banks", "page_table"), ("plane",), {"ratio": 1.0, "tiles": 0.0}
    ),
    "index_rows": OpSpec(
        ("q", "w", "plane", "positions", "banks", "page_table"),
        ("rows",),
        {"heads": None, "ratio": None, "scale": 1.0},
    ),
    "attend_rows": OpSpec(
        ("q", "recent", "positions", "banks", "page_table", "compressed?", "chosen?", "sinks?"),
        ("y",),
        {"heads": None, "scale": None, "window": None, "ratio": 1.0},
    ),
}

# Transport buffers every text program declares, with their value source (see the .proto).
TOKENS, POSITIONS, BANKS, PAGE_TABLE, OUTPUT_ROWS, LOGITS = (
    "tokens",
    "positions",
    "banks",
    "page_table",
    "output_rows",
    "logits",
)
