/* SPDX-License-Identifier: MIT */
/* The program's entry; everything is in supervisor.c, where tests reach it. */
#include "daemon/supervisor.h"

int main(int argc, char **argv)
{
	return aprd_main(argc, argv);
}
