#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

/* The ticket is one word, so that drawing a task tells at once which section it belongs to:
 * epoch (32 bits, counts sections) | tasks (16) | next task (16). */
#define EPOCH(ticket) ((uint32_t)((ticket) >> 32))
#define TASKS(ticket) ((uint32_t)((ticket) >> 16) & 0xffff)
#define NEXT(ticket) ((uint32_t)(ticket) & 0xffff)

/* About 50 us of pauses: longer than the gaps inside a step, shorter than a scheduler slice. */
#define SPIN 3000
#define SPIN_CROWDED 20 /* more threads than cores: spinning would take the core of a worker */

typedef struct {
    ds4_pool *pool;
    pthread_t handle;
    int index;
} pool_thread;

struct ds4_pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t complete; /* tasks of this section that are done */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic int stopping;
    ds4_pool_job job;
    int threads, spin;
    pool_thread thread[DS4_POOL_MAX_THREADS];
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- sleeping ------------------------------------------------------------------------------------ */

#if defined(__linux__)
/* The futex word is the epoch half of the ticket: it changes exactly when there is news. */
static uint32_t *epoch_word(ds4_pool *pool) {
    return (uint32_t *)(void *)&pool->ticket + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
}

static void sleep_while(ds4_pool *pool, uint32_t epoch) {
    syscall(SYS_futex, epoch_word(pool), FUTEX_WAIT_PRIVATE, epoch, NULL, NULL, 0);
}

static void wake_all(ds4_pool *pool) {
    syscall(SYS_futex, epoch_word(pool), FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}
#else
static void sleep_while(ds4_pool *pool, uint32_t epoch) {
    (void)pool, (void)epoch;
    sched_yield();
}

static void wake_all(ds4_pool *pool) { (void)pool; }
#endif

/* Returns once the epoch is no longer `epoch`. */
static void wait_for_news(ds4_pool *pool, uint32_t epoch) {
    for (int i = 0; i < pool->spin; i++) {
        if (EPOCH(atomic_load_explicit(&pool->ticket, memory_order_acquire)) != epoch) return;
        relax();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    while (EPOCH(atomic_load(&pool->ticket)) == epoch) sleep_while(pool, epoch);
    atomic_fetch_sub(&pool->sleepers, 1);
}

/* ---- running ------------------------------------------------------------------------------------- */

static void publish(ds4_pool *pool, uint32_t tasks) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_relaxed);
    uint64_t epoch = (uint32_t)(EPOCH(ticket) + 1);
    atomic_store(&pool->ticket, epoch << 32 | (uint64_t)tasks << 16);
    if (atomic_load(&pool->sleepers)) wake_all(pool);
}

/* Draws and runs tasks until the job is done (the caller) or the pool closes (a helper). */
static void work(ds4_pool *pool, int thread) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        if (NEXT(ticket) < TASKS(ticket)) {
            ticket = atomic_fetch_add_explicit(&pool->ticket, 1, memory_order_acq_rel);
            uint32_t tasks = TASKS(ticket);
            if (NEXT(ticket) < tasks) {
                pool->job.task(pool->job.context, NEXT(ticket), thread);
                if (atomic_fetch_add_explicit(&pool->complete, 1, memory_order_acq_rel) + 1 ==
                    tasks) {
                    atomic_store_explicit(&pool->complete, 0, memory_order_relaxed);
                    publish(pool, pool->job.advance(pool->job.context, thread));
                }
                continue;
            }
        }
        if (!TASKS(ticket) && (thread == 0 || atomic_load(&pool->stopping))) return;
        wait_for_news(pool, EPOCH(ticket));
    }
}

static void *helper(void *argument) {
    pool_thread *self = argument;
    work(self->pool, self->index);
    return NULL;
}

ds4_pool *ds4_pool_open(int threads) {
    if (threads < 1 || threads > DS4_POOL_MAX_THREADS) return NULL;
    ds4_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    atomic_init(&pool->ticket, 0);
    atomic_init(&pool->complete, 0);
    atomic_init(&pool->sleepers, 0);
    atomic_init(&pool->stopping, 0);
    pool->threads = 1;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) cores = CPU_COUNT(&mine);
#endif
    pool->spin = threads <= cores ? SPIN : SPIN_CROWDED;
    sigset_t all, before; /* signals are for the program's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (; pool->threads < threads && !failed; pool->threads += !failed) {
        pool_thread *t = pool->thread + pool->threads;
        t->pool = pool;
        t->index = pool->threads;
        failed = pthread_create(&t->handle, NULL, helper, t);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return pool;
    ds4_pool_close(pool);
    return NULL;
}

void ds4_pool_close(ds4_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stopping, 1);
    publish(pool, 0);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->thread[i].handle, NULL);
    free(pool);
}

void ds4_pool_run(ds4_pool *pool, const ds4_pool_job *job) {
    pool->job = *job;
    uint32_t tasks = job->advance(job->context, 0);
    if (!tasks) return;
    publish(pool, tasks);
    work(pool, 0);
}
