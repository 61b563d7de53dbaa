/* Weights as integers of 4 or 8 bits: weight = code * scale + minimum, with a scale and a minimum for every 32 values
 * of k in every column. Rows are rounded to 8 bits, 32 values at a time, so products and their sums are integers and
 * exact in any order; only the scaled sums of the groups are added up as floats, in the order of k: batch invariance.
 *
 * One step of a panel is a group: its codes as [4][16 columns][4] bytes for 4 bits, where a byte holds the values
 * 8 i + j in its lower and 8 i + 4 + j in its upper half, or [8][16][4] for 8 bits; then 16 scales and 16 minimums in
 * half precision. Those are kept in a unit, a power of two, that brings the weight's largest into the middle of what
 * a half can say. */
#pragma once

#include "product.h"

#define GROUP 32

/* A weight [n, k] to be packed. Mirrored in library.py. */
struct codes {
    const uint8_t *values; /* [n, k], one to a byte */
    const uint16_t *scales, *minimums; /* [n, groups], half precision */
    int32_t groups; /* of equal sizes, multiples of 32; or one */
    float unit;
};

/* NULL where this machine has no instruction for it. */
const struct arithmetic *low_bit_arithmetic(int bits);

/* One panel of `columns` outputs from `first`. */
void low_bit_pack(char *panel, const struct arithmetic *a, const struct codes *codes, int first, int columns, int k);

/* A column's weights. */
void low_bit_column(const struct arithmetic *a, const char *panel, int column, float unit, float *out, int k);
