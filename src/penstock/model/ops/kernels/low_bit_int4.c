/* Weights of 4 bits.
 *
 * Shapes: those of low_bit_kernels.h. One row reads W 3.4 times as fast as bfloat16 pair products do, 8 to 128 rows
 * are 1.4 to 1.45 times as fast (docs/cpu.md, one core of a Zen 4). */
#include "low_bit_kernels.h"

ARITHMETICS(int4, INT4)
ARITHMETICS(int4_centred, INT4_CENTRED)
