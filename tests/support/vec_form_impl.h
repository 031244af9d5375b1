/* SPDX-License-Identifier: MIT */
/* One form of vec.h behind plain arrays; included once by each vec_form_<isa>.c, which names it by VEC_FORM. */
#include "kernels/common/vec.h"
#include "tests/support/vec_forms.h"

void VEC_FORM(const float x[16], const uint32_t word[16], float out[VEC_FORM_OUT][16], uint32_t philox[4][16])
{
	vf v = vf_load(x);
	vi w = vi_load((const int32_t *)word), p[4];
	uint16_t h[16];
	int i;

	vf_store(out[0], vf_exp2(v));
	vf_store(out[1], vf_log2_normal(v));
	vf_store(out[2], vf_unit(w));
	vf_store(out[3], vf_gumbel(vf_unit(w)));
	vf_store(out[4], vf_sigmoid(v));
	vf_store(out[5], vf_tanh(v));
	vf_store_half(h, v);
	vf_store(out[6], vf_load_half(h));
	vf_store_bfloat(h, v);
	vf_store(out[7], vf_load_bfloat(h));
	vu_philox(w, 5, 6, 7, 8, 9, p);
	for (i = 0; i < 4; i++)
		vi_store((int32_t *)philox[i], p[i]);
}
