/* Runs jobs of random sections on a pool of threads (arguments: threads, jobs); prints what went wrong, or
 * `sections N`.
 *
 * Every task must run exactly once, in its own section, and see what the tasks of the sections before
 * have written (plain memory: a thread sanitizer sees it when the pool orders too little). Some tasks
 * and some preparations take long enough for the other threads to fall asleep. The very first task waits
 * until another thread has been asked what it does meanwhile; threads that outnumber the cores never are.
 *
 * Built with NO_BARRIER and the linker's --wrap=syscall: the barrier can be registered, but then fails, and,
 * as may happen then, whoever publishes does not see that others sleep.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define SECTIONS 400 /* of a job */
#define PATIENCE 60  /* seconds, far more than a machine under load takes */

#if defined(NO_BARRIER)
#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <stdarg.h>
#include <sys/syscall.h>

long __real_syscall(long number, ...);

long __wrap_syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_membarrier) {
        errno = EPERM;
        return a[0] == MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED ? 0 : -1;
    }
    if (number == SYS_futex && a[1] == FUTEX_WAKE_PRIVATE) return 0;
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
#endif

typedef struct {
    uint32_t seed, section, tasks;
    uint32_t runs[DS4_POOL_MAX_TASKS]; /* of this section */
    uint32_t number[DS4_POOL_MAX_TASKS]; /* of the section that last wrote here */
    _Atomic uint32_t wrong;
    _Atomic int asked; /* relaxed: it orders nothing */
    int threads, asks;
    struct {
        int in_task, waited; /* of one thread, and nobody else's */
    } thread[DS4_POOL_MAX_THREADS];
} state;

static uint32_t draw(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void linger(uint32_t turns) {
    for (volatile uint32_t i = 0; i < turns; i++) {}
}

/* Whether the pool calls `meanwhile` at all: some thread waits, and has a core of its own. */
static int pool_asks(int threads) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) cores = CPU_COUNT(&mine);
#endif
    return threads > 1 && threads <= cores;
}

static int was_asked(state *s) { return atomic_load_explicit(&s->asked, memory_order_relaxed); }

/* Nothing else can go on, so another thread comes to wait. */
static void wait_until_asked(state *s) {
    for (time_t end = time(NULL) + PATIENCE; !was_asked(s) && time(NULL) < end;) sched_yield();
}

static ds4_pool_section advance(void *context, int thread) {
    state *s = context;
    if (thread < 0 || thread >= s->threads) s->wrong++;
    for (uint32_t i = 0; i < s->tasks; i++)
        if (s->runs[i] != 1 || s->number[i] != s->section) s->wrong++;
    s->tasks = 0;
    if (++s->section % SECTIONS == 0) return (ds4_pool_section){0, 0};
    uint32_t kind = draw(&s->seed) % 50;
    s->tasks = kind == 0 ? DS4_POOL_MAX_TASKS : 1 + draw(&s->seed) % (kind < 25 ? 4 : 40);
    for (uint32_t i = 0; i < s->tasks; i++) s->runs[i] = 0;
    if (kind == 1) linger(300000);
    return (ds4_pool_section){s->tasks, draw(&s->seed) % 6};
}

static void task(void *context, uint32_t first, uint32_t count, int thread) {
    state *s = context;
    if (!count || first + count > s->tasks || thread < 0 || thread >= s->threads) s->wrong++;
    s->thread[thread].in_task = 1;
    if (s->asks && s->section == 1 && first == 0) wait_until_asked(s);
    for (uint32_t i = first; i < first + count; i++) {
        s->runs[i]++;
        s->number[i] = s->section;
        if ((i + s->section) % 97 == 0) linger(s->section % 7 == 0 ? 300000 : 3000);
    }
    s->thread[thread].in_task = 0;
}

/* A thread that waits is in no task, and has nothing left to do after some turns. */
static int meanwhile(void *context, int thread) {
    state *s = context;
    if (thread < 0 || thread >= s->threads || s->thread[thread].in_task) s->wrong++;
    if (!was_asked(s)) atomic_store_explicit(&s->asked, 1, memory_order_relaxed);
    return ++s->thread[thread].waited % 50 != 0;
}

int main(int count, char **argument) {
    state *s = calloc(1, sizeof *s);
    s->threads = count > 1 ? atoi(argument[1]) : 2;
    s->seed = (uint32_t)s->threads;
    s->asks = pool_asks(s->threads);
    ds4_pool *pool = ds4_pool_open(s->threads, &(ds4_pool_job){advance, task, s, s, 64, meanwhile});
    if (!pool) return 2;
    for (int jobs = count > 2 ? atoi(argument[2]) : 1; jobs > 0; jobs--) ds4_pool_run(pool);
    ds4_pool_close(pool);
    if (was_asked(s) != s->asks) {
        printf("meanwhile: got %d, expected %d (1: it is called)\n", was_asked(s), s->asks);
        s->wrong++;
    }
    if (s->wrong) printf("%u things went wrong\n", s->wrong);
    else printf("sections %u\n", s->section);
    free(s);
    return 0;
}
