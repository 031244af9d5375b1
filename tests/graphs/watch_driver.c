/* SPDX-License-Identifier: MIT */
/*
 * Counts the CUDA driver calls of the process that the driver loads it into, by
 * CUPTI's callbacks: a preload would not see them, since the runtime is linked
 * statically and cuBLAS calls the driver itself.
 *
 * Owns: what counts as an allocation, a free, a wait, a call on the legacy stream;
 * the calls planted on demand; two events around a request's graphs. Loads CUPTI
 * by dlopen: where it is not, the page says so. Its own calls are not counted.
 */
#include <cuda.h>
#include <cupti.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/watch.h"

int InitializeInjection(void) __attribute__((visibility("default")));

static struct watch_page *page;
static uint8_t kind_of[CUPTI_DRIVER_TRACE_CBID_SIZE]; /* kind + 1; 0 not looked up yet. Relaxed: any thread finds the same */
static __thread bool own; /* in a call of this library's */
static uint32_t armed;    /* 0; 1 before the first graph, 2 after it. Relaxed: one thread drives the GPU */

static struct { /* the driver, as everyone gets at it */
	CUresult (*retain)(CUcontext *, CUdevice), (*current)(CUcontext), (*memory)(size_t *, size_t *);
	CUresult (*alloc)(CUdeviceptr *, size_t), (*release)(CUdeviceptr), (*sync)(void);
	CUresult (*copy)(CUdeviceptr, const void *, size_t, CUstream);
	CUresult (*stream)(CUstream *, unsigned), (*event)(CUevent *, unsigned), (*record)(CUevent, CUstream);
	CUresult (*wait)(CUevent), (*elapsed)(float *, CUevent, CUevent);
	CUevent from, to;
	CUdeviceptr planted;
} cu;

/* ---- what a call is -------------------------------------------------------------------- */

static bool starts(const char *name, const char *const *with)
{
	for (; *with; with++)
		if (!strncmp(name, *with, strlen(*with)))
			return true;
	return false;
}

static enum watch_kind classify(const char *name)
{
	static const char *const alloc[] = {"cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemCreate", "cuMemMap",
	                                    "cuMemAddressReserve", "cuArrayCreate", "cuArray3DCreate", "cuMipmappedArrayCreate",
	                                    "cuMemPoolCreate", "cuMemImport", NULL};
	static const char *const release[] = {"cuMemFree", "cuMemHostUnregister", "cuMemRelease", "cuMemUnmap",
	                                      "cuMemAddressFree", "cuArrayDestroy", "cuMemPoolDestroy", "cuMemPoolTrim", NULL};
	static const char *const wait[] = {"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpy",
	                                   "cuMemset", NULL};
	static const char *const make[] = {"cuGraphInstantiate", "cuGraphCreate", "cuGraphAdd", "cuGraphExecDestroy",
	                                   "cuGraphDestroy", "cuGraphUpload", "cuGraphExecUpdate", "cuModuleLoad",
	                                   "cuModuleUnload", "cuLibraryLoad", "cuLinkCreate", "cuCtxCreate", "cuCtxDestroy",
	                                   "cuStreamCreate", "cuStreamDestroy", "cuEventCreate", "cuEventDestroy",
	                                   "cuStreamBeginCapture", "cuDevicePrimaryCtx", NULL};
	static const char *const launch[] = {"cuLaunch", "cuGraphLaunch", NULL};

	if (starts(name, (const char *const[]){"cuMemcpy", "cuMemset", NULL}) && strstr(name, "Async"))
		return WATCH_COPY;
	if (starts(name, (const char *const[]){"cuMemAllocAsync", "cuMemAllocFromPool", NULL}))
		return WATCH_ALLOC;
	if (starts(name, alloc))
		return WATCH_ALLOC;
	if (starts(name, release))
		return WATCH_FREE;
	if (starts(name, wait))
		return WATCH_SYNC;
	if (starts(name, make))
		return WATCH_CREATE;
	return starts(name, launch) ? WATCH_LAUNCH : WATCH_OTHER;
}

static enum watch_kind kind(CUpti_CallbackId id, const char *name)
{
	uint8_t k = id < CUPTI_DRIVER_TRACE_CBID_SIZE ? __atomic_load_n(&kind_of[id], __ATOMIC_RELAXED) : 0;

	if (k)
		return (enum watch_kind)(k - 1);
	k = (uint8_t)(classify(name) + 1);
	if (id < CUPTI_DRIVER_TRACE_CBID_SIZE)
		__atomic_store_n(&kind_of[id], k, __ATOMIC_RELAXED);
	return (enum watch_kind)(k - 1);
}

/* The stream that a call names; *has false where it names none that we know of. */
static CUstream stream_of(CUpti_CallbackId id, const void *p, bool *has)
{
	*has = true;
#define NAMES(call) \
	case CUPTI_DRIVER_TRACE_CBID_##call: \
		return ((const call##_params *)p)->hStream
	switch (id) {
		NAMES(cuMemcpyAsync);
		NAMES(cuMemcpyHtoDAsync_v2);
		NAMES(cuMemcpyDtoHAsync_v2);
		NAMES(cuMemcpyDtoDAsync_v2);
		NAMES(cuMemcpy2DAsync_v2);
		NAMES(cuMemcpy3DAsync_v2);
		NAMES(cuMemsetD8Async);
		NAMES(cuMemsetD16Async);
		NAMES(cuMemsetD32Async);
		NAMES(cuLaunchKernel);
		NAMES(cuLaunchCooperativeKernel);
		NAMES(cuGraphLaunch);
	case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx:
		return ((const cuLaunchKernelEx_params *)p)->config->hStream;
	default:
		*has = false;
		return NULL;
	}
#undef NAMES
}

static void count(enum watch_kind k, const char *name)
{
	if (__atomic_fetch_add(&page->count[k], 1, __ATOMIC_RELAXED) == 0)
		strncpy(page->first[k], name, sizeof page->first[k] - 1);
}

static void around_graph(const CUpti_CallbackData *d)
{
	CUstream s = ((const cuGraphLaunch_params *)d->functionParams)->hStream;
	uint32_t a = __atomic_load_n(&armed, __ATOMIC_RELAXED);

	own = true;
	if (d->callbackSite == CUPTI_API_ENTER && a == 1) {
		cu.record(cu.from, s);
		__atomic_store_n(&armed, 2, __ATOMIC_RELAXED);
	} else if (d->callbackSite == CUPTI_API_EXIT && a == 2) {
		cu.record(cu.to, s);
	}
	own = false;
}

static void CUPTIAPI on_call(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data)
{
	const CUpti_CallbackData *d = data;
	bool has;

	(void)user;
	if (domain != CUPTI_CB_DOMAIN_DRIVER_API || own)
		return;
	if (d->callbackSite == CUPTI_API_ENTER) {
		CUstream s = stream_of(id, d->functionParams, &has);

		count(kind(id, d->functionName), d->functionName);
		if (has && (!s || s == CU_STREAM_LEGACY))
			count(WATCH_LEGACY, d->functionName);
	}
	if (id == CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch && __atomic_load_n(&armed, __ATOMIC_RELAXED))
		around_graph(d);
}

/* ---- orders ------------------------------------------------------------------------------- */

static CUresult plant(enum watch_order what)
{
	static const char byte;
	CUstream s;

	switch (what) {
	case WATCH_PLANT_ALLOC: return cu.alloc(&cu.planted, 1 << 20);
	case WATCH_PLANT_FREE: return cu.release(cu.planted);
	case WATCH_PLANT_SYNC: return cu.sync();
	case WATCH_PLANT_LEGACY: return cu.copy(cu.planted, &byte, 1, NULL);
	default: return cu.stream(&s, CU_STREAM_NON_BLOCKING);
	}
}

static CUresult arm(void)
{
	CUresult rc = cu.from ? CUDA_SUCCESS : cu.event(&cu.from, CU_EVENT_DEFAULT);

	if (!rc && !cu.to)
		rc = cu.event(&cu.to, CU_EVENT_DEFAULT);
	if (!rc)
		__atomic_store_n(&armed, 1, __ATOMIC_RELAXED);
	return rc;
}

static CUresult span(void)
{
	float ms = 0;
	CUresult rc;

	if (__atomic_exchange_n(&armed, 0, __ATOMIC_RELAXED) != 2)
		return CUDA_ERROR_NOT_READY;
	rc = cu.wait(cu.to);
	rc = rc ? rc : cu.elapsed(&ms, cu.from, cu.to);
	page->span_us = ms * 1e3f;
	return rc;
}

static CUresult memory(void)
{
	size_t unused = 0, all;
	CUresult rc = cu.memory(&unused, &all);

	page->free_bytes = unused;
	return rc;
}

static CUresult carry_out(enum watch_order what)
{
	static CUcontext context;
	CUresult rc;

	own = true;
	rc = context ? CUDA_SUCCESS : cu.retain(&context, 0);
	rc = rc ? rc : cu.current(context);
	if (rc)
		return rc;
	if (what == WATCH_RESET) {
		memset(page->count, 0, sizeof page->count);
		memset(page->first, 0, sizeof page->first);
	} else if (what == WATCH_MEMORY) {
		rc = memory();
	} else if (what == WATCH_ARM) {
		rc = arm();
	} else if (what == WATCH_SPAN) {
		rc = span();
	} else {
		own = false;
		rc = plant(what);
	}
	return rc;
}

static void *obey(void *arg)
{
	uint32_t done = 0;

	(void)arg;
	for (;;) {
		uint32_t order = __atomic_load_n(&page->order, __ATOMIC_ACQUIRE); /* pairs with watch_order's release */

		if (order == done) {
			nanosleep(&(struct timespec){0, 200000}, NULL);
			continue;
		}
		page->result = (int32_t)carry_out((enum watch_order)page->what);
		done = order;
		__atomic_store_n(&page->done, done, __ATOMIC_RELEASE); /* pairs with watch_order's acquire */
	}
	return NULL;
}

/* ---- start ---------------------------------------------------------------------------------- */

static bool map_page(void)
{
	const char *path = getenv(WATCH_ENV);
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

	if (fd < 0)
		return false;
	page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return page != MAP_FAILED;
}

static bool find_driver(void)
{
	void *so = dlopen("libcuda.so.1", RTLD_NOW);

	if (!so)
		return false;
#define FIND(field, name) \
	*(void **)&cu.field = dlsym(so, name); \
	if (!cu.field) \
	return false
	FIND(retain, "cuDevicePrimaryCtxRetain");
	FIND(current, "cuCtxSetCurrent");
	FIND(memory, "cuMemGetInfo_v2");
	FIND(alloc, "cuMemAlloc_v2");
	FIND(release, "cuMemFree_v2");
	FIND(sync, "cuCtxSynchronize");
	FIND(copy, "cuMemcpyHtoDAsync_v2");
	FIND(stream, "cuStreamCreate");
	FIND(event, "cuEventCreate");
	FIND(record, "cuEventRecord");
	FIND(wait, "cuEventSynchronize");
	FIND(elapsed, "cuEventElapsedTime");
#undef FIND
	return true;
}

static void *find_cupti(void)
{
	static const char *const name[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so",
	                                   "/usr/local/cuda/lib64/libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so",
	                                   APR_CUDA_HOME "/lib64/libcupti.so", APR_CUDA_HOME "/lib/libcupti.so",
	                                   APR_CUDA_HOME "/extras/CUPTI/lib64/libcupti.so"};
	void *so = NULL;

	for (size_t i = 0; i < sizeof name / sizeof *name && !so; i++)
		so = dlopen(name[i], RTLD_NOW | RTLD_GLOBAL);
	return so;
}

static enum watch_state subscribe(void)
{
	CUptiResult (*to)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *);
	CUptiResult (*enable)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain);
	CUpti_SubscriberHandle handle;
	void *so = find_cupti();

	if (!so)
		return WATCH_NO_CUPTI;
	*(void **)&to = dlsym(so, "cuptiSubscribe");
	*(void **)&enable = dlsym(so, "cuptiEnableDomain");
	if (!to || !enable || to(&handle, on_call, NULL) || enable(1, handle, CUPTI_CB_DOMAIN_DRIVER_API))
		return WATCH_FAILED;
	return WATCH_ON;
}

/* The driver calls it from cuInit. */
int InitializeInjection(void)
{
	enum watch_state s;
	pthread_t t;

	if (page || !map_page())
		return 1;
	s = find_driver() ? subscribe() : WATCH_FAILED;
	if (s == WATCH_ON && pthread_create(&t, NULL, obey, NULL))
		s = WATCH_FAILED;
	__atomic_store_n(&page->state, s, __ATOMIC_RELEASE); /* pairs with watch_state's acquire */
	return 1;
}
