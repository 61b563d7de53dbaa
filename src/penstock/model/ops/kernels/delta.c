/* The gated delta rule of one layer (Gated DeltaNet): a short causal convolution, each sequence's states token by token,
 * and a gated norm.
 *
 * Shapes: any number of sequences with any number of tokens, heads of any size; fastest where value_dim is a multiple of
 * the register's floats. Limit: the cache in which a head's state lies, [key_dim, value_dim] floats that every token
 * reads twice and writes twice. The share of the limit was not measured.
 *
 * A thread takes one head of keys of one sequence with all that the head serves, from its first token to its last, so
 * results depend neither on the batch nor on how a prompt was cut. */
#include "pool.h"
#include "vector.h"

#include <math.h>

/* Mirrored in library.py. */
struct delta {
    const float *projected; /* [tokens, channels + value heads * value_dim] */
    const float *ba; /* [tokens, 2 * value heads] */
    const float *taps; /* [kernel, channels] */
    const float *decay, *dt_bias; /* [value heads] */
    const float *norm; /* [value_dim] */
    float *conv; /* [slots, kernel - 1, channels] */
    float *states; /* [slots, value heads, key_dim, value_dim] */
    const int32_t *query_starts, *positions, *slots;
    float *out; /* [tokens, value heads * value_dim] */
    float *scratch; /* of all threads */
    int32_t sequences, key_heads, served, key_dim, value_dim, kernel;
    float norm_eps;
};

#define LENGTH_EPS 1e-6f /* of queries and keys */
#define COLUMNS (4 * VL) /* of a state, that are gone through together */

INLINE int num_channels(const struct delta *d)
{
    return d->key_heads * (2 * d->key_dim + d->served * d->value_dim);
}

static size_t scratch_floats(const struct delta *d)
{
    return (size_t)2 * d->key_dim + ((size_t)d->served + 2) * d->value_dim;
}

/* Some neighbouring channels of token t: of what is convolved, or of what was before the step. */
INLINE const float *row_at(const struct delta *d, const float *tokens, const float *before, int t)
{
    int width = num_channels(d) + d->key_heads * d->served * d->value_dim;
    return t >= 0 ? tokens + (size_t)t * width : before + (size_t)(d->kernel - 1 + t) * num_channels(d);
}

static void convolve(const struct delta *d, const float *tokens, const float *before, const float *taps, int t,
                     float *out, int n)
{
    int channels = num_channels(d), i = 0;
    for (; i + VL <= n; i += VL) {
        vf sum = splat(0.0f);
        for (int j = 0; j < d->kernel; j++) {
            const float *x = row_at(d, tokens, before, t + 1 - d->kernel + j);
            sum = vfma(load(x + i), load(taps + (size_t)j * channels + i), sum);
        }
        store(out + i, sum / (1.0f + vexp(-sum)));
    }
    for (; i < n; i++) {
        float sum = 0.0f;
        for (int j = 0; j < d->kernel; j++)
            sum += row_at(d, tokens, before, t + 1 - d->kernel + j)[i] * taps[(size_t)j * channels + i];
        out[i] = sum / (1.0f + expf(-sum));
    }
}

/* What the next step must know of some channels: the last tokens, the newest at the end. */
static void keep_last(const struct delta *d, const float *tokens, float *before, int count, int n)
{
    int kept = d->kernel - 1;
    for (int j = 0; j < kept; j++) {
        const float *from = row_at(d, tokens, before, count - kept + j);
        memmove(before + (size_t)j * num_channels(d), from, sizeof(float) * n);
    }
}

static void clear(const struct delta *d, float *before, int n)
{
    for (int j = 0; j < d->kernel - 1; j++) memset(before + (size_t)j * num_channels(d), 0, sizeof(float) * n);
}

static void unit(float *x, int n, float scale)
{
    float squares = 0.0f;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    float by = scale / sqrtf(squares + LENGTH_EPS);
    for (int i = 0; i < n; i++) x[i] *= by;
}

/* `count` columns of a state, by registers or by single floats: forget, ask by the key, add, ask by the query. */
INLINE void advance_vectors(const struct delta *d, float *s, const float *q, const float *k, const float *v, float *out,
                            float forget, float beta, int vectors)
{
    int stride = d->value_dim;
    vf known[4], found[4];
    for (int c = 0; c < vectors; c++) known[c] = found[c] = splat(0.0f);
    for (int i = 0; i < d->key_dim; i++)
        for (int c = 0; c < vectors; c++) {
            vf row = load(s + (size_t)i * stride + c * VL) * forget;
            store(s + (size_t)i * stride + c * VL, row);
            known[c] = vfma(splat(k[i]), row, known[c]);
        }
    for (int c = 0; c < vectors; c++) known[c] = (load(v + c * VL) - known[c]) * beta;
    for (int i = 0; i < d->key_dim; i++)
        for (int c = 0; c < vectors; c++) {
            vf row = vfma(splat(k[i]), known[c], load(s + (size_t)i * stride + c * VL));
            store(s + (size_t)i * stride + c * VL, row);
            found[c] = vfma(splat(q[i]), row, found[c]);
        }
    for (int c = 0; c < vectors; c++) store(out + c * VL, found[c]);
}

static void advance(const struct delta *d, float *s, const float *q, const float *k, const float *v, float *out,
                    float forget, float beta)
{
    int n = d->value_dim, j = 0;
    for (; j + COLUMNS <= n; j += COLUMNS) advance_vectors(d, s + j, q, k, v + j, out + j, forget, beta, 4);
    for (; j + VL <= n; j += VL) advance_vectors(d, s + j, q, k, v + j, out + j, forget, beta, 1);
    for (; j < n; j++) {
        float known = 0.0f, found = 0.0f;
        for (int i = 0; i < d->key_dim; i++) known += k[i] * (s[(size_t)i * n + j] *= forget);
        known = (v[j] - known) * beta;
        for (int i = 0; i < d->key_dim; i++) found += q[i] * (s[(size_t)i * n + j] += k[i] * known);
        out[j] = found;
    }
}

static void norm_and_gate(const struct delta *d, const float *x, const float *gates, float *out)
{
    int n = d->value_dim, i = 0;
    float squares = 0.0f;
    for (int j = 0; j < n; j++) squares += x[j] * x[j];
    float by = 1.0f / sqrtf(squares / (float)n + d->norm_eps);
    for (; i + VL <= n; i += VL) {
        vf g = load(gates + i);
        store(out + i, load(x + i) * by * load(d->norm + i) * (g / (1.0f + vexp(-g))));
    }
    for (; i < n; i++) out[i] = x[i] * by * d->norm[i] * (gates[i] / (1.0f + expf(-gates[i])));
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static void advance_head(void *argument, int chunk, int thread)
{
    const struct delta *d = argument;
    int sequence = chunk / d->key_heads, head = chunk % d->key_heads;
    int first = d->query_starts[sequence], count = d->query_starts[sequence + 1] - first;
    int dim = d->key_dim, channels = num_channels(d), heads = d->key_heads * d->served;
    int values = d->served * d->value_dim, width = channels + heads * d->value_dim;
    size_t slot = d->slots[sequence];
    int begin[3] = {head * dim, (d->key_heads + head) * dim, 2 * d->key_heads * dim + head * values};
    int size[3] = {dim, dim, values};

    float *made = d->scratch + thread * scratch_floats(d), *found = made + 2 * dim + values;
    const float *tokens = d->projected + (size_t)first * width;
    float *before = d->conv + slot * (d->kernel - 1) * channels;
    float *state = d->states + (slot * heads + (size_t)head * d->served) * dim * d->value_dim;
    if (d->positions[first] == 0) {
        memset(state, 0, sizeof(float) * d->served * dim * d->value_dim);
        for (int p = 0; p < 3; p++) clear(d, before + begin[p], size[p]);
    }
    for (int t = 0; t < count; t++) {
        float *to = made;
        for (int p = 0; p < 3; p++) {
            convolve(d, tokens + begin[p], before + begin[p], d->taps + begin[p], t, to, size[p]);
            to += size[p];
        }
        unit(made, dim, 1.0f / sqrtf((float)dim));
        unit(made + dim, dim, 1.0f);
        const float *ba = d->ba + (size_t)(first + t) * 2 * heads;
        for (int h = 0; h < d->served; h++) {
            int own = head * d->served + h;
            float beta = 1.0f / (1.0f + expf(-ba[own]));
            float forget = expf(-d->decay[own] * softplus(ba[heads + own] + d->dt_bias[own]));
            float *s = state + (size_t)h * dim * d->value_dim;
            advance(d, s, made, made + dim, made + 2 * dim + h * d->value_dim, found, forget, beta);
            const float *gates = tokens + (size_t)t * width + channels + own * d->value_dim;
            norm_and_gate(d, found, gates, d->out + (size_t)(first + t) * heads * d->value_dim + own * d->value_dim);
        }
    }
    for (int p = 0; p < 3; p++) keep_last(d, tokens + begin[p], before + begin[p], count, size[p]);
}

void delta_run(struct pool *pool, struct delta *d)
{
    size_t bytes = sizeof(float) * scratch_floats(d) * pool_threads(pool);
    d->scratch = pool_scratch(pool, SCRATCH_WORK, bytes);
    pool_run(pool, d->sequences * d->key_heads, advance_head, d);
}
