/* Weights of 8 bits with scales for every 16.
 *
 * Shapes: those of low_bit_kernels.h. Limit: the reading of W with a few rows, else the scaling of twice as many sums
 * as with groups of 32. Not measured. */
#include "low_bit_kernels.h"

ARITHMETICS(int8_fine, INT8_FINE)
