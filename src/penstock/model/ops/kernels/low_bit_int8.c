/* Weights of 8 bits. */
#include "low_bit_kernels.h"

ARITHMETICS(int8, INT8)
ARITHMETICS(int8_centred, INT8_CENTRED)
