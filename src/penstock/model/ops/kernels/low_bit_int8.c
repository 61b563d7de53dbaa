/* Weights of 8 bits.
 *
 * Shapes: those of low_bit_kernels.h. One row of SmolLM2's head, in 8 bits, is read at 28 GB/s by one core of a Zen 4
 * (docs/benchmarks.md); many rows were not measured by themselves. */
#include "low_bit_kernels.h"

ARITHMETICS(int8, INT8)
ARITHMETICS(int8_centred, INT8_CENTRED)
