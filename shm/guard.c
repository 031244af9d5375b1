/* SPDX-License-Identifier: MIT */
/*
 * Owns: the SIGBUS handler and the two routines that may fault. See guard.h.
 *
 * On x86-64 and aarch64 the routines are a few lines of assembly between two
 * labels; the handler moves the program counter of a fault between them to an
 * exit that returns -EFAULT. It costs nothing when nothing faults. Elsewhere, and
 * under ThreadSanitizer (which must see the loads), a jump buffer a thread does it.
 */
#include "shm/guard.h"
#include "shm/wake.h" /* APR_TSAN */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <ucontext.h>

#if defined(__x86_64__) && !defined(APR_TSAN)
#define GUARD_ASM 1
#define GUARD_PC(uc) ((uc)->uc_mcontext.gregs[REG_RIP])
/* rdi dst, rsi src, rdx n; 16 bytes a step, then the rest byte by byte */
__asm__(".text\n"
	".p2align 4\n"
	".type apr_guard_begin, @function\n"
	"apr_guard_begin:\n"
	"apr_guard_copy_asm:\n"
	"	cmpq $256, %rdx\n"
	"	jae 3f\n"
	"1:	cmpq $16, %rdx\n"
	"	jb 2f\n"
	"	movdqu (%rsi), %xmm0\n"
	"	movdqu %xmm0, (%rdi)\n"
	"	addq $16, %rsi\n"
	"	addq $16, %rdi\n"
	"	subq $16, %rdx\n"
	"	jmp 1b\n"
	"2:	testq %rdx, %rdx\n"
	"	jz 4f\n"
	"	movb (%rsi), %al\n"
	"	movb %al, (%rdi)\n"
	"	incq %rsi\n"
	"	incq %rdi\n"
	"	decq %rdx\n"
	"	jmp 2b\n"
	"3:	movq %rdx, %rcx\n"
	"	rep movsb\n"
	"4:	xorl %eax, %eax\n"
	"	ret\n"
	"apr_guard_load_asm:\n" /* rdi out, rsi src; a plain load is an acquire here */
	"	movl (%rsi), %eax\n"
	"	movl %eax, (%rdi)\n"
	"	xorl %eax, %eax\n"
	"	ret\n"
	"apr_guard_end:\n"
	"apr_guard_fault:\n"
	"	movl $-14, %eax\n" /* -EFAULT */
	"	ret\n"
	".size apr_guard_begin, .-apr_guard_begin\n");
#elif defined(__aarch64__) && !defined(APR_TSAN)
#define GUARD_ASM 1
#define GUARD_PC(uc) ((uc)->uc_mcontext.pc)
__asm__(".text\n"
	".p2align 4\n"
	".type apr_guard_begin, %function\n"
	"apr_guard_begin:\n"
	"apr_guard_copy_asm:\n"
	"1:	cmp x2, #16\n"
	"	b.lo 2f\n"
	"	ldp x3, x4, [x1], #16\n"
	"	stp x3, x4, [x0], #16\n"
	"	sub x2, x2, #16\n"
	"	b 1b\n"
	"2:	cbz x2, 4f\n"
	"	ldrb w3, [x1], #1\n"
	"	strb w3, [x0], #1\n"
	"	sub x2, x2, #1\n"
	"	b 2b\n"
	"4:	mov w0, #0\n"
	"	ret\n"
	"apr_guard_load_asm:\n"
	"	ldar w3, [x1]\n"
	"	str w3, [x0]\n"
	"	mov w0, #0\n"
	"	ret\n"
	"apr_guard_end:\n"
	"apr_guard_fault:\n"
	"	mov w0, #-14\n"
	"	ret\n"
	".size apr_guard_begin, .-apr_guard_begin\n");
#endif

#ifdef GUARD_ASM
int apr_guard_copy_asm(void *dst, const void *src, size_t n);
int apr_guard_load_asm(uint32_t *out, const uint32_t *src);
extern const char apr_guard_begin[], apr_guard_end[], apr_guard_fault[];
_Static_assert(EFAULT == 14, "the assembly returns it");

static bool recover(ucontext_t *uc)
{
	uintptr_t pc = (uintptr_t)GUARD_PC(uc);
	if (pc < (uintptr_t)apr_guard_begin || pc >= (uintptr_t)apr_guard_end)
		return false;
	GUARD_PC(uc) = (__typeof__(GUARD_PC(uc)))(uintptr_t)apr_guard_fault;
	return true;
}

int apr_guard_copy(void *dst, const void *src, size_t n)
{
	return apr_guard_copy_asm(dst, src, n);
}

int apr_guard_load32(const uint32_t *src, uint32_t *out)
{
	return apr_guard_load_asm(out, src);
}
#else
static __thread sigjmp_buf *volatile armed; /* a per-thread buffer while a copy runs */

static bool recover(ucontext_t *uc)
{
	(void)uc;
	sigjmp_buf *to = armed;
	if (!to)
		return false;
	armed = NULL;
	siglongjmp(*to, 1);
}

int apr_guard_copy(void *dst, const void *src, size_t n)
{
	sigjmp_buf here;
	if (sigsetjmp(here, 1))
		return -EFAULT;
	armed = &here;
	memcpy(dst, src, n);
	armed = NULL;
	return 0;
}

int apr_guard_load32(const uint32_t *src, uint32_t *out)
{
	sigjmp_buf here;
	if (sigsetjmp(here, 1))
		return -EFAULT;
	armed = &here;
	*out = __atomic_load_n(src, __ATOMIC_ACQUIRE);
	armed = NULL;
	return 0;
}
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the two below */
static bool installed;
static struct sigaction before; /* read by the handler; written only while it is not installed */

static void on_sigbus(int sig, siginfo_t *info, void *context)
{
	if (recover(context))
		return;
	if (before.sa_flags & SA_SIGINFO) {
		before.sa_sigaction(sig, info, context);
	} else if (before.sa_handler == SIG_IGN && info->si_code <= 0) {
		return; /* sent, not faulted: it was ignored before */
	} else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
		/* not ours and nobody else's: fault again, with the default's core */
		signal(sig, SIG_DFL);
		if (info->si_code <= 0) /* sent by a process: there is no fault to repeat */
			raise(sig);
	} else {
		before.sa_handler(sig);
	}
}

int apr_guard_install(void)
{
	struct sigaction sa;
	int e = 0;

	memset(&sa, 0, sizeof(sa));
	sa.sa_sigaction = on_sigbus;
	sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
	sigemptyset(&sa.sa_mask);
	pthread_mutex_lock(&lock);
	if (!installed) {
		if (sigaction(SIGBUS, NULL, &before) || sigaction(SIGBUS, &sa, NULL))
			e = -errno;
		else
			installed = true;
	}
	pthread_mutex_unlock(&lock);
	return e;
}

void apr_guard_remove(void)
{
	pthread_mutex_lock(&lock);
	if (installed)
		sigaction(SIGBUS, &before, NULL);
	installed = false;
	pthread_mutex_unlock(&lock);
}

int apr_guard_thread(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGBUS);
	return -pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}
