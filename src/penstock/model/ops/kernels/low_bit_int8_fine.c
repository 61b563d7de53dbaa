/* Weights of 8 bits with scales for every 16. */
#include "low_bit_kernels.h"

ARITHMETICS(int8_fine, INT8_FINE)
