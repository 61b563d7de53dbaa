/* A KV cache of 8-bit integers. A key or value of one head is (code - 128) * scale, with codes from 1 to 255 and a scale
 * in bfloat16. Codes lie in panels like any other values of the cache, four to a step. A column of a key panel has one
 * step more, for the scales: the key's in its lower half, that of the same position's value in its upper.
 *
 * Shapes: head sizes of multiples of 8, tiles of 1 to MOST_ROWS rows. cached_int8.c has the limit.
 *
 * What meets the codes is exact or nearly so, in one of two ways. Where there is an instruction for it rows are integers
 * of 15 bits, cut in two digits of 8, and all sums are integers: exact in any order, so batch invariance is free.
 * Elsewhere codes are widened to float32 in registers. */
#pragma once

#include "product.h"

const struct arithmetic *cached_int8_digits(void); /* NULL where this machine has no instruction for it */
const struct arithmetic *cached_int8_widened(void);
