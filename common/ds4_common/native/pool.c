#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#endif

/* Sections are numbered. A number of 40 bits comes back after a year of steps without a pause. */
#define NUMBER_BITS 40
#define NUMBER(word) ((word) & ((1ull << NUMBER_BITS) - 1))
/* What runs now: number | tasks. */
#define TASKS(section) ((uint32_t)((section) >> NUMBER_BITS))
/* What is left of a thread's run: number of the section that it belongs to | next task | end. */
#define NEXT(run) ((uint32_t)((run) >> NUMBER_BITS) & 0xfff)
#define END(run) ((uint32_t)((run) >> (NUMBER_BITS + 12)))
_Static_assert(DS4_POOL_MAX_TASKS < 1 << 12, "runs count with 12 bits");

#define MOST_VISITS 8 /* threads that an idle one looks at: each visit costs its owner a cache miss */

/* About 50 us of pauses: longer than the gaps inside a step, shorter than a scheduler slice. */
#define SPIN 3000
#define SPIN_CROWDED 20 /* more threads than cores: spinning would take the core of a worker */
#define PATIENCE 500    /* pauses before another thread looks whether the section is over: 10 us */

/* Two cache lines: one that others touch only to take tasks, one that they watch. */
typedef struct {
    _Alignas(64) _Atomic uint64_t run; /* drawn by its owner from the front, by others from the end */
    _Alignas(64) _Atomic uint64_t done; /* tasks that this thread has completed | of that section */
    ds4_pool *pool;
    pthread_t handle;
    int index;
} pool_thread;

struct ds4_pool {
    _Alignas(64) _Atomic uint64_t section;
    _Atomic uint32_t batch;
    ds4_pool_job job;
    int threads, spin;
    int fences; /* publishing and falling asleep are ordered by fences, not by membarrier */
    _Atomic int stopping;
    _Alignas(64) _Atomic uint64_t claimed; /* number of the last section that somebody advances from */
    _Alignas(64) _Atomic uint32_t sleepers;
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
/* The futex word is the lower half of `section`: it changes exactly when there is news. */
static uint32_t *futex_word(ds4_pool *pool) {
    return (uint32_t *)(void *)&pool->section + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static void sleep_while(ds4_pool *pool, uint64_t section, int sure) {
    const struct timespec nap = {0, 1000000};
    syscall(SYS_futex, futex_word(pool), FUTEX_WAIT_PRIVATE, (uint32_t)section, sure ? NULL : &nap, NULL,
            0);
}

static void wake_all(ds4_pool *pool) {
    syscall(SYS_futex, futex_word(pool), FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}
#else
static void sleep_while(ds4_pool *pool, uint64_t section, int sure) {
    (void)pool, (void)section, (void)sure;
    sched_yield();
}

static void wake_all(ds4_pool *pool) { (void)pool; }
#endif

/* Who publishes a section and who falls asleep each write one word and read the other's. That needs a full
 * barrier on both sides; it is cheap for the many who publish when the few who sleep make all do it. */
static int register_barrier(void) {
#if defined(__linux__) && defined(SYS_membarrier)
    return !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
#else
    return 0;
#endif
}

/* Returns whether a publisher is sure to see the sleeper. A call that the system has registered can still
 * fail: a filter of system calls may come later, and a process restored from a checkpoint may have lost its
 * registration. Then nobody may sleep until woken. */
static int barrier_of_sleeper(const ds4_pool *pool) {
    int sure = 1;
#if defined(__linux__) && defined(SYS_membarrier)
    if (!pool->fences) sure = !syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
#endif
    (void)pool;
    atomic_thread_fence(memory_order_seq_cst);
    return sure;
}

static void barrier_of_publisher(const ds4_pool *pool) {
    if (pool->fences)
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
}

/* ---- tasks --------------------------------------------------------------------------------------- */

/* Whether the number of `a` comes before that of `b`. */
static int is_before(uint64_t a, uint64_t b) {
    return !(NUMBER(b - a - 1) >> (NUMBER_BITS - 1));
}

static uint32_t run_begin(const ds4_pool *pool, uint64_t section, int thread) {
    return TASKS(section) * (uint32_t)thread / (uint32_t)pool->threads;
}

static uint64_t run_word(uint64_t section, uint32_t next, uint32_t end) {
    return (uint64_t)(end << 12 | next) << NUMBER_BITS | NUMBER(section);
}

/* Tasks to draw at once, of `left` ones; batch 0: of somebody else. */
static uint32_t batch_of(uint32_t left, uint32_t batch) {
    uint32_t half = (left + 1) / 2;
    return batch < 2 ? 1 : half < batch ? half : batch;
}

/* Draws tasks of that thread's run: its owner the next ones, at most half of what is left, others the last
 * one. Returns how many, 0 when none is left or `section` is over.
 *
 * A run is cut when somebody first draws from it, or when its owner publishes the section. The exchange
 * succeeds only on the very word that was looked at. Whether that was of this section or of an earlier
 * one: tasks of the run are open, so the section still runs, and cannot end before the word changes. A
 * word of a later section says that this one is over. */
static uint32_t draw(ds4_pool *pool, uint64_t section, int owner, uint32_t batch, uint32_t *task) {
    _Atomic uint64_t *word = &pool->thread[owner].run;
    uint64_t run = atomic_load_explicit(word, memory_order_acquire);
    for (;;) {
        uint32_t next = NEXT(run), end = END(run);
        if (NUMBER(run) != NUMBER(section)) {
            if (!is_before(run, section)) return 0;
            next = run_begin(pool, section, owner);
            end = run_begin(pool, section, owner + 1);
        }
        if (next >= end) return 0;
        uint32_t count = batch_of(end - next, batch);
        *task = batch ? next : end - 1;
        if (batch)
            next += count;
        else
            end--;
        if (atomic_compare_exchange_strong_explicit(word, &run, run_word(section, next, end),
                                                    memory_order_acq_rel, memory_order_acquire))
            return count;
    }
}

static void note_done(ds4_pool *pool, uint64_t section, uint32_t done, int thread) {
    atomic_store_explicit(&pool->thread[thread].done,
                          (uint64_t)done << NUMBER_BITS | NUMBER(section), memory_order_release);
}

/* The thread's share of a section, then what others have not come to. Whoever has published the section
 * has drawn its own first tasks with that. */
static void run_section(ds4_pool *pool, uint64_t section, int thread, int published) {
    void *context = pool->job.context;
    uint32_t done = 0, batch = atomic_load_explicit(&pool->batch, memory_order_relaxed);
    uint32_t task = run_begin(pool, section, thread), count = 0;
    uint32_t own = run_begin(pool, section, thread + 1) - task;
    if (published && own) count = batch_of(own, batch);
    if (!batch) batch = 1;
    for (; count || (count = draw(pool, section, thread, batch, &task)); done += count, count = 0)
        pool->job.task(context, task, count, thread);
    if (done) note_done(pool, section, done, thread);
    int visits = pool->threads - 1 < MOST_VISITS ? pool->threads - 1 : MOST_VISITS;
    for (int i = 1; i <= visits; i++)
        while (draw(pool, section, (thread + i) % pool->threads, 0, &task)) {
            pool->job.task(context, task, 1, thread);
            note_done(pool, section, ++done, thread);
        }
}

/* ---- sections ------------------------------------------------------------------------------------ */

/* Returns the section. */
static uint64_t publish(ds4_pool *pool, ds4_pool_section next, int thread) {
    uint64_t before = atomic_load_explicit(&pool->section, memory_order_relaxed);
    uint64_t section = (uint64_t)next.tasks << NUMBER_BITS | NUMBER(before + 1);
    uint32_t first = run_begin(pool, section, thread), end = run_begin(pool, section, thread + 1);
    if (first < end) {
        first += batch_of(end - first, next.batch);
        atomic_store_explicit(&pool->thread[thread].run, run_word(section, first, end),
                              memory_order_relaxed);
    }
    atomic_store_explicit(&pool->batch, next.batch, memory_order_relaxed);
    atomic_store_explicit(&pool->section, section, memory_order_release);
    barrier_of_publisher(pool);
    if (atomic_load_explicit(&pool->sleepers, memory_order_relaxed)) wake_all(pool);
    return section;
}

static int is_complete(ds4_pool *pool, uint64_t section) {
    uint32_t done = 0;
    for (int i = 0; i < pool->threads; i++) {
        uint64_t word = atomic_load_explicit(&pool->thread[i].done, memory_order_acquire);
        if (NUMBER(word) == NUMBER(section)) done += TASKS(word);
    }
    return done == TASKS(section);
}

/* Prepares and publishes the next section if this one is over and nobody else does; returns it, or 0. */
static uint64_t advance(ds4_pool *pool, uint64_t section, int thread) {
    if (!TASKS(section) || !is_complete(pool, section)) return 0;
    uint64_t claimed = atomic_load_explicit(&pool->claimed, memory_order_relaxed);
    if (!is_before(claimed, section)) return 0;
    if (!atomic_compare_exchange_strong_explicit(&pool->claimed, &claimed, NUMBER(section),
                                                 memory_order_acq_rel, memory_order_relaxed))
        return 0;
    return publish(pool, pool->job.advance(pool->job.context, thread), thread);
}

/* Returns once `section` is no longer what runs: the next one when this thread has published it. Who has
 * published this one looks all the time whether it is over, as does who may be the last one awake; all do
 * before they sleep. */
static uint64_t wait_for_news(ds4_pool *pool, uint64_t section, int thread, int published) {
    uint64_t news = 0;
    int alone = published || atomic_load_explicit(&pool->sleepers, memory_order_relaxed);
    int look = alone ? 0 : PATIENCE;
    int more = pool->job.meanwhile && pool->spin == SPIN; /* crowded threads get off their cores */
    for (int i = 0; i < pool->spin; i++) {
        if (atomic_load_explicit(&pool->section, memory_order_acquire) != section) return 0;
        if (i >= look) {
            if ((news = advance(pool, section, thread))) return news;
            if (!alone) look *= 2;
        }
        if (more)
            more = pool->job.meanwhile(pool->job.context, thread);
        else
            relax();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    const int sure = barrier_of_sleeper(pool);
    while (atomic_load(&pool->section) == section && !(news = advance(pool, section, thread)))
        sleep_while(pool, section, sure);
    atomic_fetch_sub(&pool->sleepers, 1);
    return news;
}

/* Works on sections until the job is done (the caller) or the pool closes (a helper). `published`: by this
 * thread, last; others may have published more since. */
static void work(ds4_pool *pool, int thread, uint64_t published) {
    for (;;) {
        uint64_t section = atomic_load_explicit(&pool->section, memory_order_acquire);
        int mine = section == published;
        if (TASKS(section)) {
            const char *notes = pool->job.notes;
            for (uint32_t at = 0; !mine && at < pool->job.notes_bytes; at += 64)
                __builtin_prefetch(notes + at);
            run_section(pool, section, thread, mine);
        } else if (thread == 0 || atomic_load(&pool->stopping)) {
            return;
        }
        published = wait_for_news(pool, section, thread, mine);
    }
}

static void *helper(void *argument) {
    pool_thread *self = argument;
    work(self->pool, self->index, 0);
    return NULL;
}

ds4_pool *ds4_pool_open(int threads, const ds4_pool_job *job) {
    if (threads < 1 || threads > DS4_POOL_MAX_THREADS) return NULL;
    ds4_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    pool->job = *job;
    atomic_init(&pool->section, 0);
    atomic_init(&pool->batch, 0);
    atomic_init(&pool->claimed, 0);
    atomic_init(&pool->sleepers, 0);
    atomic_init(&pool->stopping, 0);
    for (int i = 0; i < threads; i++) {
        atomic_init(&pool->thread[i].run, 0);
        atomic_init(&pool->thread[i].done, 0);
    }
    pool->threads = 1;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) cores = CPU_COUNT(&mine);
#endif
    pool->spin = threads <= cores ? SPIN : SPIN_CROWDED;
    pool->fences = threads > cores || !register_barrier();
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
    publish(pool, (ds4_pool_section){0, 0}, 0);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->thread[i].handle, NULL);
    free(pool);
}

void ds4_pool_run(ds4_pool *pool) {
    ds4_pool_section first = pool->job.advance(pool->job.context, 0);
    if (first.tasks) work(pool, 0, publish(pool, first, 0));
}
