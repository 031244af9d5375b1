/* SPDX-License-Identifier: MIT */
/* The dumper's lines, and the errno table beside the man page that prints it. */
#include "shm/errors.h"
#include "shm/wire.h"
#include "tests/harness.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char line[512];

#define HAS(text) CU_ASSERT_PTR_NOT_NULL(strstr(line, text))

static void entries_in_words(void)
{
	struct apr_sqe s = { .op = APR_OP_GENERATE, .flags = APR_SQE_KEEP | APR_SQE_ADD_BOS, .user_data = 0x2a, .in_off = 8192,
			     .in_len = 5, .par_off = 9000, .par_len = 16, .max_tokens = 7, .seed = 0xabc, .timeout_ms = 9 };
	struct apr_cqe e = { .user_data = 0x2a, .res = 77, .flags = APR_CQE_MORE, .type = APR_CQE_TOKEN, .text_len = 4,
			     .pos = 3, .logprob = -0.5f };

	apr_wire_sqe(&s, line, sizeof(line));
	HAS("SQE GENERATE user_data=0x2a");
	HAS(" KEEP ADD_BOS");
	HAS("in=TEXT@8192+5");
	HAS("par=@9000+16");
	HAS("max_tokens=7 n=1 seed=0xabc");
	s.op = 200;
	s.flags = 0x8000;
	apr_wire_sqe(&s, line, sizeof(line));
	HAS("SQE ?(200)");
	HAS("flags=0x8000");

	memcpy(e.u.text, "a\n\"\xff", 4);
	apr_wire_cqe(&e, line, sizeof(line));
	HAS("CQE TOKEN user_data=0x2a res=77 pos=3 MORE");
	HAS("text=\"a\\n\\\"\\xff\"");
	CU_ASSERT_PTR_NULL(strchr(line, '\n'));
	e.text_len = 255; /* a lie */
	apr_wire_cqe(&e, line, sizeof(line));
	e = (struct apr_cqe){ .type = APR_CQE_FINAL, .res = -ECANCELED,
			      .aux = APR_AUX(APR_FINISH_CANCELLED, APR_BACKEND_CPU, APR_ROUTE_INT16, 1) };
	apr_wire_cqe(&e, line, sizeof(line));
	HAS("res=-ECANCELED");
	HAS("finish=cancelled backend=cpu route=int16 fell_back");
	e.type = APR_CQE_ACK;
	e.u.nop.waited_ns = 12;
	apr_wire_cqe(&e, line, sizeof(line));
	HAS("waited=12ns");
}

static void frames_in_words(void)
{
	struct apr_hello h = { .hdr = { APR_FRAME_MAGIC, APR_FRAME_HELLO, 0, sizeof(h), 0 }, .name = "me" };
	struct apr_welcome w = { .hdr = { APR_FRAME_MAGIC, APR_FRAME_WELCOME, 0, sizeof(w), 0 }, .session = 5 };
	struct {
		struct apr_frame f;
		char why[8];
	} bad = { { APR_FRAME_MAGIC, APR_FRAME_STATUS, 0, 24, -EDQUOT }, "too much" };

	apr_wire_frame(&h, sizeof(h), line, sizeof(line));
	HAS("FRAME HELLO size=128");
	HAS("name=\"me\"");
	apr_wire_frame(&w, sizeof(w), line, sizeof(line));
	HAS("session=0x5");
	apr_wire_frame(&bad, sizeof(bad), line, sizeof(line));
	HAS("res=-EDQUOT \"too much\"");
	apr_wire_frame(&bad, 20, line, sizeof(line));
	HAS("(got 20)");
	apr_wire_frame(&bad, 3, line, sizeof(line));
	HAS("too short");
	bad.f.magic = 1;
	bad.f.type = 999;
	apr_wire_frame(&bad, sizeof(bad), line, sizeof(line));
	HAS("FRAME ? magic=0x1");
}

static void no_buffer_is_overrun(void)
{
	struct apr_cqe e = { .type = APR_CQE_TOKEN, .text_len = 32 };
	char small[64];

	for (size_t n = 0; n < sizeof(small); n++) {
		memset(small, '#', sizeof(small));
		apr_wire_cqe(&e, small, n);
		CU_ASSERT_EQUAL(small[n], '#');
		if (n)
			CU_ASSERT(memchr(small, 0, n) != NULL);
	}
}

static void names(void)
{
	CU_ASSERT_STRING_EQUAL(apr_wire_op(APR_OP_FREE), "FREE");
	CU_ASSERT_STRING_EQUAL(apr_wire_op(9), "?");
	CU_ASSERT_STRING_EQUAL(apr_wire_cqe_type(0), "?");
	CU_ASSERT_STRING_EQUAL(apr_wire_frame_type(APR_FRAME_LOG), "LOG");
	CU_ASSERT_STRING_EQUAL(apr_wire_frame_type(20), "?");
	CU_ASSERT_STRING_EQUAL(apr_wire_finish(APR_FINISH_STOP_STRING), "stop_string");
	CU_ASSERT_STRING_EQUAL(apr_wire_finish(APR_FINISH_ERROR), "error");
	CU_ASSERT_STRING_EQUAL(apr_wire_backend(APR_BACKEND_FAKE), "fake");
	CU_ASSERT_STRING_EQUAL(apr_wire_route(APR_ROUTE_FP8_FAST), "fp8-fast");
	CU_ASSERT_STRING_EQUAL(apr_errno_name(-EDQUOT), "EDQUOT");
	CU_ASSERT_STRING_EQUAL(apr_errno_name(EDQUOT), "EDQUOT");
	CU_ASSERT_PTR_NULL(apr_errno_name(0));
	CU_ASSERT_PTR_NULL(apr_errno_meaning(INT_MIN));
	CU_ASSERT_PTR_NULL(apr_errno_meaning(ENOTTY));
}

/* The source tree is the parent of the folder that holds build/: where make runs the tests. */
static char *read_page(void)
{
	FILE *f = fopen("man/aprd-protocol.7", "r");
	char *text = calloc(1, 1 << 20);

	if (f) {
		if (!fread(text, 1, (1 << 20) - 1, f))
			text[0] = '\0';
		fclose(f);
	}
	return text;
}

static void every_row_is_in_the_man_page(void)
{
	char *page = read_page(), want[256];

	if (!*page) {
		free(page);
		SKIP("man/aprd-protocol.7 is not below the working directory");
	}
	for (size_t i = 0; i < apr_errno_rows; i++) {
		const struct apr_errno_row *r = &apr_errno_table[i];
		snprintf(want, sizeof(want), ".It Bq Er %s\n(%s%s%s) %s.\n", r->name, r->where & APR_ERR_FINAL ? "F" : "",
			 r->where & APR_ERR_FRAME ? "S" : "", r->where & APR_ERR_CALL ? "C" : "", r->meaning);
		CU_ASSERT_PTR_NOT_NULL(strstr(page, want));
		for (size_t k = 0; k < i; k++)
			CU_ASSERT_NOT_EQUAL(apr_errno_table[k].err, r->err);
	}
	size_t rows = 0;
	for (const char *p = page; (p = strstr(p, ".It Bq Er ")); p++)
		rows++;
	CU_ASSERT_EQUAL(rows, apr_errno_rows);
	free(page);
}

static const struct apr_test tests[] = {
	{ "entries_in_words", entries_in_words, 0 },
	{ "frames_in_words", frames_in_words, 0 },
	{ "no_buffer_is_overrun", no_buffer_is_overrun, 0 },
	{ "names", names, 0 },
	{ "every_row_is_in_the_man_page", every_row_is_in_the_man_page, KEEPS_HEAP }, /* stdio */
};
TEST_MAIN("shm/wire", tests)
