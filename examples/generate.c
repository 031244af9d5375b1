/* SPDX-License-Identifier: MIT */
/* The shortest useful program: continues a text and prints the answer as it comes.
 *   cc generate.c $(pkg-config --cflags --libs libaprclient) -o generate */
#include <apr/client.h>
#include <stdio.h>
#include <string.h>

static int print(void *arg, const struct apr_token *t)
{
	(void)arg;
	fwrite(t->text, 1, t->len, stdout);
	return fflush(stdout);
}

int main(int argc, char **argv)
{
	struct apr_gen g = {.size = sizeof(g), .text = argc > 1 ? argv[1] : "Once upon a time", .max_tokens = 64,
			    .flags = APR_SQE_ADD_BOS};
	struct apr *c;
	char err[256];
	int e = apr_connect(&c, NULL, err, sizeof(err));

	g.len = strlen(g.text);
	if (!e) {
		e = apr_generate(c, &g, print, NULL, NULL, err, sizeof(err));
		apr_close(c);
	}
	puts(e ? err : "");
	return e ? 1 : 0;
}
