/* SPDX-License-Identifier: MIT */
/* aprctl's entry; everything else is in the other files of this folder. */
#include "client/aprctl/ctl.h"

int main(int argc, char **argv)
{
	return ctl_main(argc, argv);
}
