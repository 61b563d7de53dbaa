/* What is done to each row alone: norms, gates and caps.
 *
 * Shapes: any number of rows of any length. Limit: memory, or the cache where the row was just made. Not measured by
 * itself. */
#include "rows.h"

#include "pool.h"
#include "vector.h"

#include <math.h>

#define CHUNK_VALUES (8 << 10) /* below this, another thread costs more than it helps */

struct rows {
    const float *x;
    float *residual; /* or NULL */
    const float *weight;
    float *out;
    float eps; /* of a norm; or the cap */
    int m, n, rows_per_chunk;
    void (*gate)(const float *gate, const float *up, float *out, int n);
    float alpha, limit; /* of a clamped gate */
};

static void run_rows(struct pool *pool, struct rows *j, task run)
{
    j->rows_per_chunk = 1 + CHUNK_VALUES / j->n;
    pool_run(pool, (j->m + j->rows_per_chunk - 1) / j->rows_per_chunk, run, j);
}

INLINE int end_of(const struct rows *j, int chunk)
{
    int end = (chunk + 1) * j->rows_per_chunk;
    return end < j->m ? end : j->m;
}

void norm_row(const float *x, float *residual, const float *weight, float *out, int n, float eps)
{
    vf squares = splat(0.0f);
    float rest = 0.0f;
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = load(x + i);
        if (residual) {
            v += load(residual + i);
            store(residual + i, v);
        }
        squares = vfma(v, v, squares);
    }
    for (; i < n; i++) {
        float v = x[i];
        if (residual) v = residual[i] += v;
        rest += v * v;
    }
    const float *from = residual ? residual : x;
    float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(from + i) * scale * load(weight + i));
    for (; i < n; i++) out[i] = from[i] * scale * weight[i];
}

static void norm_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct rows *j = argument;
    for (int r = chunk * j->rows_per_chunk; r < end_of(j, chunk); r++) {
        size_t at = (size_t)r * j->n;
        norm_row(j->x + at, j->residual ? j->residual + at : NULL, j->weight, j->out + at, j->n, j->eps);
    }
}

void rms_norm(struct pool *pool, const float *x, float *residual, const float *weight, float *out, int m, int n,
              float eps)
{
    struct rows j = {x, residual, weight, out, eps, m, n, 0};
    run_rows(pool, &j, norm_chunk);
}

void silu_row(const float *gate, const float *up, float *out, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf g = load(gate + i);
        store(out + i, g / (1.0f + vexp(-g)) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void gelu_row(const float *gate, const float *up, float *out, int n)
{
    const float a = -1.5957691216f, b = a * 0.044715f; /* twice the root of 2 / pi: a tanh is a sigmoid of twice */
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf g = load(gate + i);
        store(out + i, g / (1.0f + vexp(g * (a + b * g * g))) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + expf(gate[i] * (a + b * gate[i] * gate[i]))) * up[i];
}

void clamped_swiglu_row(const float *gate, const float *up, float *out, int n, float alpha, float limit)
{
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf g = vmin(load(gate + i), splat(limit)), u = vmax(vmin(load(up + i), splat(limit)), splat(-limit));
        store(out + i, g / (1.0f + vexp(g * -alpha)) * (u + 1.0f));
    }
    for (; i < n; i++) {
        float g = fminf(gate[i], limit), u = fmaxf(fminf(up[i], limit), -limit);
        out[i] = g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
    }
}

static void gate_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct rows *j = argument;
    for (int r = chunk * j->rows_per_chunk; r < end_of(j, chunk); r++) {
        const float *gate = j->x + (size_t)r * 2 * j->n;
        j->gate(gate, gate + j->n, j->out + (size_t)r * j->n, j->n);
    }
}

/* [m, 2n], gate first -> silu(gate) * up, [m, n] */
void silu_mul(struct pool *pool, const float *x, float *out, int m, int n)
{
    struct rows j = {.x = x, .out = out, .m = m, .n = n, .gate = silu_row};
    run_rows(pool, &j, gate_chunk);
}

/* [m, 2n], gate first -> gelu(gate) * up, [m, n]; gelu in its tanh form */
void gelu_mul(struct pool *pool, const float *x, float *out, int m, int n)
{
    struct rows j = {.x = x, .out = out, .m = m, .n = n, .gate = gelu_row};
    run_rows(pool, &j, gate_chunk);
}

static void clamped_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct rows *j = argument;
    for (int r = chunk * j->rows_per_chunk; r < end_of(j, chunk); r++) {
        const float *gate = j->x + (size_t)r * 2 * j->n;
        clamped_swiglu_row(gate, gate + j->n, j->out + (size_t)r * j->n, j->n, j->alpha, j->limit);
    }
}

/* [m, 2n], gate first -> gpt-oss's gate, [m, n] */
void clamped_swiglu(struct pool *pool, const float *x, float *out, int m, int n, float alpha, float limit)
{
    struct rows j = {.x = x, .out = out, .m = m, .n = n, .alpha = alpha, .limit = limit};
    run_rows(pool, &j, clamped_chunk);
}

struct gates {
    const float *x, *gates;
    float *out;
    int m, n, stride, rows_per_chunk;
};

static void sigmoid_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct gates *j = argument;
    int end = (chunk + 1) * j->rows_per_chunk;
    for (int r = chunk * j->rows_per_chunk; r < (end < j->m ? end : j->m); r++) {
        const float *x = j->x + (size_t)r * j->n, *gates = j->gates + (size_t)r * j->stride;
        float *out = j->out + (size_t)r * j->n;
        int i = 0;
        for (; i + VL <= j->n; i += VL) store(out + i, load(x + i) / (1.0f + vexp(-load(gates + i))));
        for (; i < j->n; i++) out[i] = x[i] / (1.0f + expf(-gates[i]));
    }
}

/* x * sigmoid(gates), [m, n]; rows of the gates lie `stride` apart */
void sigmoid_mul(struct pool *pool, const float *x, const float *gates, float *out, int m, int n, int stride)
{
    struct gates j = {x, gates, out, m, n, stride, 1 + CHUNK_VALUES / n};
    pool_run(pool, (m + j.rows_per_chunk - 1) / j.rows_per_chunk, sigmoid_chunk, &j);
}

void cap_row(float *x, int n, float cap)
{
    float twice = 2.0f / cap; /* tanh x = 1 - 2 / (1 + e^2x) */
    int i = 0;
    for (; i + VL <= n; i += VL) store(x + i, cap - 2.0f * cap / (1.0f + vexp(load(x + i) * twice)));
    for (; i < n; i++) x[i] = cap * tanhf(x[i] / cap);
}

static void cap_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct rows *j = argument;
    for (int r = chunk * j->rows_per_chunk; r < end_of(j, chunk); r++) cap_row(j->out + (size_t)r * j->n, j->n, j->eps);
}

/* [m, n], in place */
void cap(struct pool *pool, float *x, int m, int n, float cap)
{
    struct rows j = {.out = x, .eps = cap, .m = m, .n = n};
    run_rows(pool, &j, cap_chunk);
}
