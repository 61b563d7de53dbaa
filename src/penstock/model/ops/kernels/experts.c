/* The experts of one layer of a mixture: each that was chosen runs once, on its own rows.
 *
 * Shapes: any number of tokens and experts, each expert a gate_up and a down. Limit: the reading of the chosen
 * experts' weights, with many tokens the arithmetic. One token takes 1.5 times, 64 tokens 1.1 times as long as a dense
 * model of as many active weights (docs/benchmarks.md, Mixtures of experts); the share of the limit was not measured.
 *
 * One after the other in the order of their numbers, so that a row's sum is taken in the same order in every batch. */
#include "linear.h"

/* Mirrored in library.py. */
struct experts {
    const struct linear *const *linears; /* gate_up and down of each */
    const int32_t *starts; /* [count + 1]: of each one's places in the next two */
    const int32_t *rows; /* the rows that chose it */
    const float *weights; /* and what they weigh it by */
    int32_t count, hidden;
    float alpha, limit; /* as struct source's */
};

static void gather(float *to, const float *x, const int32_t *rows, int m, int n)
{
    for (int i = 0; i < m; i++) memcpy(to + (size_t)i * n, x + (size_t)rows[i] * n, sizeof(float) * n);
}

static void add_weighed(float *out, const float *found, const int32_t *rows, const float *weights, int m, int n)
{
    for (int i = 0; i < m; i++) {
        float *to = out + (size_t)rows[i] * n, weight = weights[i];
        const float *from = found + (size_t)i * n;
        for (int j = 0; j < n; j++) to[j] += from[j] * weight;
    }
}

/* x [tokens, hidden] -> added to out [tokens, hidden] */
void experts_run(struct pool *pool, const struct experts *e, const float *x, float *out)
{
    int most = 0, n = e->hidden, halves = 0;
    for (int i = 0; i < e->count; i++) {
        int m = e->starts[i + 1] - e->starts[i];
        most = m > most ? m : most;
        halves = e->linears[2 * i]->n > halves ? e->linears[2 * i]->n : halves;
    }
    float *mine = pool_scratch(pool, SCRATCH_BETWEEN, sizeof(float) * most * ((size_t)2 * n + halves));
    float *found = mine + (size_t)most * n, *gate_up = found + (size_t)most * n;
    for (int i = 0; i < e->count; i++) {
        int start = e->starts[i], m = e->starts[i + 1] - start;
        if (!m) continue;
        gather(mine, x, e->rows + start, m, n);
        linear_run(pool, e->linears[2 * i], &(struct source){.x = mine}, gate_up, m);
        struct source gated = {.x = gate_up, .gated = 1, .alpha = e->alpha, .limit = e->limit};
        linear_run(pool, e->linears[2 * i + 1], &gated, found, m);
        add_weighed(out, found, e->rows + start, e->weights + start, m, n);
    }
}
