/* SPDX-License-Identifier: MIT */
/*
 * The weight types of GGUF: their numbers, block sizes and names.
 *
 * Owns the one table that model/, kernels/ and engine/ read. (model/ includes
 * this header alone of kernels/: it has no symbols, only constants and inlines.)
 * Does not own the meaning of a block's bytes: kernels/common/dequant.h does.
 */
#ifndef APR_KERNELS_TYPES_H
#define APR_KERNELS_TYPES_H

#include <stddef.h>
#include <stdint.h>

enum apr_type { /* numbers as in the GGUF file */
	APR_TYPE_F32 = 0,
	APR_TYPE_F16 = 1,
	APR_TYPE_Q4_0 = 2,
	APR_TYPE_Q4_1 = 3,
	APR_TYPE_Q5_0 = 6,
	APR_TYPE_Q5_1 = 7,
	APR_TYPE_Q8_0 = 8,
	APR_TYPE_Q2_K = 10,
	APR_TYPE_Q3_K = 11,
	APR_TYPE_Q4_K = 12,
	APR_TYPE_Q5_K = 13,
	APR_TYPE_Q6_K = 14,
	APR_TYPE_BF16 = 30,
	APR_TYPE_LIMIT = 31
};

struct apr_type_info {
	const char *name;
	uint16_t block;       /* elements a block; 0: not a type we read */
	uint16_t block_bytes;
};

#ifndef __cplusplus /* designated array elements are C's alone; kernels/cuda/blocks.cuh has the sizes for C++ */
static inline struct apr_type_info apr_type_info(uint32_t type)
{
	static const struct apr_type_info table[APR_TYPE_LIMIT] = {
		[APR_TYPE_F32] = {"F32", 1, 4},       [APR_TYPE_F16] = {"F16", 1, 2},
		[APR_TYPE_BF16] = {"BF16", 1, 2},     [APR_TYPE_Q4_0] = {"Q4_0", 32, 18},
		[APR_TYPE_Q4_1] = {"Q4_1", 32, 20},   [APR_TYPE_Q5_0] = {"Q5_0", 32, 22},
		[APR_TYPE_Q5_1] = {"Q5_1", 32, 24},   [APR_TYPE_Q8_0] = {"Q8_0", 32, 34},
		[APR_TYPE_Q2_K] = {"Q2_K", 256, 84},  [APR_TYPE_Q3_K] = {"Q3_K", 256, 110},
		[APR_TYPE_Q4_K] = {"Q4_K", 256, 144}, [APR_TYPE_Q5_K] = {"Q5_K", 256, 176},
		[APR_TYPE_Q6_K] = {"Q6_K", 256, 210},
	};
	static const struct apr_type_info none = {"unknown", 0, 0};

	return type < APR_TYPE_LIMIT && table[type].block ? table[type] : none;
}
#endif

#endif
