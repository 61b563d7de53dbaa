/* The one matrix product everything is made of: a few rows times a few panels.
 *
 * A panel is 16 columns of a matrix, k-major, as [k / step][16][step] values: `step` values of k lie together because
 * the instruction that consumes them wants it so. Weights, keys (columns: positions, k: dimensions) and values
 * (columns: dimensions, k: positions) are all stored as panels, so linear layers and attention share these kernels.
 *
 * An output element is one chain of multiply-adds in the order of k, starting from zero, in every variant of one
 * arithmetic. So a row's result does not depend on how many rows or panels were computed with it: batch invariance. */
#pragma once

#include "vector.h"

#if VL == 16
#define MOST_ROWS 12
#define MOST_PANELS 2
#elif defined(__aarch64__) || VL == 8
#define MOST_ROWS 6
#define MOST_PANELS 1
#else
#define MOST_ROWS 3
#define MOST_PANELS 1
#endif

struct product {
    const void *x; /* rows, in the arithmetic's form */
    size_t x_stride; /* bytes */
    const char *const *panels; /* [segments][panels]: k may run through several places in memory, like KV blocks */
    int segments;
    int depth; /* steps of k in every segment … */
    int last_depth; /* … but the last */
    float *y;
    size_t y_stride; /* floats */
    const float *bias; /* of these columns, or NULL */
    const char *ahead[MOST_PANELS]; /* fetched into the second-level cache meanwhile: panels that come next */
};

typedef void (*kernel)(const struct product *);

/* One row per way to store weights and compute with them. */
struct arithmetic {
    int step; /* values of k that lie together in a panel, a power of two … */
    int shift; /* … namely 1 << shift */
    int weight_bytes; /* per value, in panels */
    int row_bytes; /* per value, in the rows that kernels read */
    void (*convert)(const float *from, void *to, int count); /* a row to the kernels' form */
    kernel kernels[MOST_ROWS + 1][MOST_PANELS + 1];
};

/* In the order of `ARITHMETICS` in native.py; NULL where this machine has no such instruction. */
const struct arithmetic *arithmetic_at(int index);

INLINE size_t panel_bytes(const struct arithmetic *a, int k)
{
    return (size_t)((k + a->step - 1) & -a->step) * PANEL * a->weight_bytes;
}

/* Where value (k, column) of a panel lies, in values; `columns` is 16 but for blocks of odd sizes. */
INLINE size_t panel_offset(const struct arithmetic *a, int k, int column, int columns)
{
    return (((size_t)(k >> a->shift) * columns + column) << a->shift) + (k & (a->step - 1));
}

INLINE void panel_put(const struct arithmetic *a, void *panel, size_t offset, float value)
{
    if (a->weight_bytes == 2) ((uint16_t *)panel)[offset] = to_bf16(value);
    else ((float *)panel)[offset] = value;
}

INLINE float panel_get(const struct arithmetic *a, const void *panel, size_t offset)
{
    return a->weight_bytes == 2 ? from_bf16(((const uint16_t *)panel)[offset]) : ((const float *)panel)[offset];
}
