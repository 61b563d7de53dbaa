/* Weights in MXFP4: 4 bits that are looked up, and powers of two.
 *
 * Shapes: those of low_bit_kernels.h. Limit: the reading of W with a few rows; a look-up more than codes of 4 bits take
 * for every quad and panel, however many rows meet it. Not measured. */
#include "low_bit_kernels.h"

ARITHMETICS(mxfp4, MXFP4)
