/* SPDX-License-Identifier: MIT */
/*
 * libaprclient-ffi: the inlines of apr/client.h as functions, for languages that
 * load a library and read no header. Owns nothing else.
 */
/* each is defined by the header itself: there is no other prototype */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define APR_INLINE APR_API
#include <apr/client.h>
