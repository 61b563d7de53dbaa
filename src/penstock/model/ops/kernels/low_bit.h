/* Weights as integers of 4 or 8 bits: weight = code * scale + minimum, with a scale and a minimum for every 32 values
 * of k in every column, or for every 16; or (code - middle) * scale. Rows are rounded to integers too, 32 values at a
 * time, so products and their sums are integers and exact in any order; only the scaled sums of the groups are added up
 * as floats, in the order of k: batch invariance.
 *
 * Shapes: weights [n, k] of any size. low_bit_kernels.h has the limit.
 *
 * Large values come alone, and in one digit of 8 bits they would set the step by which the 31 beside them are rounded.
 * So where a linear is precise, values have two digits, 15 bits, and a group's eight products of quads (values 4 i to
 * 4 i + 3) are sixteen: those of second digits, shifted, and those of first digits on top. Elsewhere only the quad with
 * the largest magnitude, the wide quad, has second digits, and the products are nine.
 *
 * One step of a panel is 32 values: their codes as [4][16 columns][4] bytes for 4 bits, where a byte holds the values
 * 8 i + j in its lower and 8 i + 4 + j in its upper half, or [8][16][4] for 8 bits; then the 16 scales and the 16
 * minimums of each group, in half precision. Those are kept in a unit, a power of two, that brings the weight's largest
 * into the middle of what a half can say.
 *
 * MXFP4: a code is one of sixteen floats (e2m1), twice of which is a whole number from -12 to 12; looked up it is that
 * number, counted from -12, and multiplied as codes of 8 bits are. Its scale is the exponent of a power of two, one
 * byte (e8m0), so weights take 4.25 bits, and nothing is rounded. */
#pragma once

#include "product.h"

#define GROUP 32
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_LOW_BIT 1
#else
#define HAS_LOW_BIT 0
#endif

/* A weight [n, k] to be packed. Mirrored in library.py. */
struct codes {
    const uint8_t *values; /* [n, k], one to a byte */
    const void *scales; /* [n, groups], half precision; exponents of MXFP4: bytes */
    const uint16_t *minimums; /* the same; or NULL: codes count from the middle */
    const int32_t *order; /* [k], as struct linear's; or NULL */
    int32_t groups; /* of equal sizes, multiples of a panel's; or one */
    float unit;
    int32_t precise; /* whether rows have two digits throughout */
};

enum low_bit { INT4, INT8, INT4_CENTRED, INT8_CENTRED, INT8_FINE, MXFP4 }; /* fine: groups of 16, with minimums */

/* NULL where this machine has no instruction for it. */
const struct arithmetic *low_bit_arithmetic(enum low_bit kind);

/* One panel of `columns` outputs from `first`. */
void low_bit_pack(char *panel, const struct arithmetic *a, const struct codes *codes, int first, int columns, int k);

/* A column's weights. */
void low_bit_column(const struct arithmetic *a, const char *panel, int column, float unit, float *out, int k);
