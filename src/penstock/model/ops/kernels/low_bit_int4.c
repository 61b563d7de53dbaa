/* Weights of 4 bits. */
#include "low_bit_kernels.h"

ARITHMETICS(int4, INT4)
ARITHMETICS(int4_centred, INT4_CENTRED)
