/* All layers of a decoder in one call: at one token a step, crossing from Python for every operation of every layer
 * would take longer than many of the operations do.
 *
 * Shapes: any number of tokens; it counts with one. Limit: with one token the reading of weights: all layers of
 * SmolLM2 take 2.9 ms on one core of a Zen 4, of which linears take 2.7 at 25 GB/s (docs/benchmarks.md). */
#include "attention.h"
#include "kv_prefetch.h"
#include "linear.h"
#include "ranks.h"
#include "sharing.h"

/* Mirrored in library.py. */
struct decoder_layer {
    const struct layer *attention;
    const struct linear *qkv, *output, *gate_up, *down;
    const float *attention_norm, *mlp_norm;
    float attention_eps, mlp_eps;
};

/* What is computed between two products; one layer's is the next one's. */
struct between {
    float *qkv, *attended, *gate_up;
};

static struct between room(struct pool *pool, const struct decoder_layer *layers, int count, int m)
{
    size_t qkv = 0, attended = 0, gate_up = 0;
    for (const struct decoder_layer *l = layers; l < layers + count; l++) {
        qkv = (size_t)l->qkv->n > qkv ? (size_t)l->qkv->n : qkv;
        attended = (size_t)l->output->k > attended ? (size_t)l->output->k : attended;
        gate_up = (size_t)l->gate_up->n > gate_up ? (size_t)l->gate_up->n : gate_up;
    }
    float *at = pool_scratch(pool, SCRATCH_BETWEEN, sizeof(float) * m * (qkv + attended + gate_up));
    return (struct between){at, at + m * qkv, at + m * (qkv + attended)};
}

/* A product whose rows are split over ranks, and the sum of their parts. A part goes where the others read it. */
static int linear_summed(struct pool *pool, struct ranks *ranks, const struct linear *l, const struct source *from,
                         float *y, int m, struct kv_prefetch *prefetch)
{
    size_t n = (size_t)m * l->n;
    float *slot = ranks ? ranks_slot(ranks, n) : NULL, *part = slot ? slot : y;
    linear_run_with(pool, l, from, part, m, prefetch);
    return ranks ? ranks_sum(pool, ranks, part, y, n) : 0;
}

/* `residual` [m, hidden] is the stream. What the last product adds to it stays pending in `pending`, as it does from
 * operation to operation: the next norm adds it on its way. `ranks`: those that share the layers, or NULL. Returns 0, or
 * 1 + the rank that was lost: nothing here is worth anything then. */
int layers_run(struct pool *pool, struct ranks *ranks, const struct decoder_layer *layers, int count,
               const struct batch *batch, float *residual, float *pending)
{
    int m = batch->tokens;
    struct between b = room(pool, layers, count, m);
    struct sharing sharing = attention_sharing(pool, layers->attention, batch);
    struct kv_prefetch prefetch = {0};
    if (layers->attention->settled) prefetch = kv_prefetch_new(pool, layers->attention, batch);
    for (int i = 0; i < count; i++) {
        const struct decoder_layer *l = layers + i;
        struct source before = {i ? pending : residual, i ? residual : NULL, l->attention_norm, l->attention_eps, 0};
        linear_run_with(pool, l->qkv, &before, b.qkv, m, &prefetch);
        if (attention_run_shared(pool, ranks, l->attention, batch, &sharing, b.qkv, b.attended)) break;
        if (i + 1 < count) kv_prefetch_begin(&prefetch, l[1].attention);
        struct source attended = {.x = b.attended}, gated = {.x = b.gate_up, .gated = 1};
        if (linear_summed(pool, ranks, l->output, &attended, pending, m, &prefetch)) break;
        struct source between = {pending, residual, l->mlp_norm, l->mlp_eps, 0};
        linear_run_with(pool, l->gate_up, &between, b.gate_up, m, &prefetch);
        if (linear_summed(pool, ranks, l->down, &gated, pending, m, &prefetch)) break;
    }
    return ranks ? ranks->lost : 0;
}
